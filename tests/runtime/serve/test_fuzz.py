"""Raw requests with something wrong in them, by chance and repeatably: none brings a 5xx, or the engine down."""

import json
import random
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.mutations import JUNK, mutated_bytes, mutated_json
from tests.serving import Running

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]}
_COMMON: dict[str, Any] = {
    "model": "pair", "n": 1, "seed": 3, "stop": ["x", "yy"], "stream": True, "stream_options": {"include_usage": True},
    "logit_bias": {"5": 1.5}, "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "user": "u", "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": False,
    "stop_token_ids": [7], "include_stop_str_in_output": True, "prompt_logprobs": 1, "return_token_ids": True,
    "cache_salt": "s", "specpress": {"drafter": "lookup", "draft_length": 3, "verify": "coupled", "rounds": True},
}  # fmt: skip
_PART = {"type": "text", "text": "a"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_FORM = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": _SCHEMA}}
# Sound ones, in which every field stands somewhere.
SOUND: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "def f", "max_tokens": 2}),
    ("/v1/completions", _COMMON | {"prompt": "def f", "max_tokens": 3, "echo": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 1, "logprobs": 2, "echo": True, "n": 2}),
    ("/v1/completions", {"prompt": [5, 6], "max_tokens": 4, "response_format": _FORM, "add_special_tokens": False}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[a-c]{2,4}"}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "structured_outputs": {"grammar": 'start: "a" /b+/'}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}),
    (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 4, "prediction": {"type": "content", "content": "b c"}, "stream": False},
    ),
    (
        "/v1/chat/completions",
        _COMMON
        | {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [_PART]}]}
        | {"max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2, "response_format": _FORM},
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [_CALL]}]}
        | {"tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 6},
    ),
    ("/v1/responses", {"input": "a", "instructions": "b", "max_output_tokens": 3, "temperature": 0.5, "stream": True}),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "max_output_tokens": 2}
        | {"text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}}},
    ),
    ("/tokenize", {"prompt": "a b", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
)
# Values that are at the edge, or beyond it, of what fields take; those of schemas and grammars among them.
_EDGES: tuple[Any, ...] = (
    *(16, 17, 20, 21, 63, 65, 511, 512, 1023, 1024, 32_000, 2**31 - 1, 2**32, 2**64, -(2**63), 10**400, 1e-320, -0.0),
    *({"type": "array", "items": {}}, {"$ref": "#"}, {"type": "string", "pattern": "(a*)*"}, {"enum": [10**400]}),
    *({"const": 1e308}, {"minimum": 10**400}, {"type": "number", "multipleOf": 1e-320}, {"minLength": 2**40}),
    *({"maxItems": 2**63}, {"properties": {"\ud800": {}}}, {"allOf": [{"$ref": "#"}]}, "(", "[z-a]", "a{99999}", "^$"),
    *("\\", "\\u{110000}", "start: start", "start: %json {", "%llguidance {}", "<|im_end|>", "\U0010ffff", "\u200b"),
    *([0] * 300, [[1]] * 300, ["a"] * 300, {str(i): i for i in range(300)}, "a" * 20_000),
)
_VALUES = (*JUNK, *_EDGES)
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize", "/v1/models", "/x")
_HEADERS = (
    *(b"Content-Length: -1", b"Content-Length: 5, 6", b"Content-Length: 99999999999999999999", b"Content-Length: 0x10"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Expect: 100-continue", b"Upgrade: websocket"),
    *(b"Host: ", b"Host: evil.example", b"Host: [::1", b"Content-Type: text/plain", b"Content-Type: application/json;"),
    *(b"Content-Encoding: gzip", b"X-A: " + b"a" * 70_000, b"X-B: \xff\xfe", b": x", b"X-C", b"\x00: y", b"X D: z"),
    *(
        b"Authorization: Bearer \xff",
        b"Connection: upgrade",
        b"Content-Type: application/json; charset=utf-16",
        b" X: y",
    ),
    *(b"Origin: http://evil.example", b"Cookie: " + b"a=b; " * 2000, b"Accept: \x7f", b"Range: bytes=0-"),
)


def mutated_request(chance: random.Random) -> tuple[bytes, bool]:
    """A request, sound but for a few changes, and whether the server can know where it ends."""
    path, fields = chance.choice(SOUND)
    body = json.dumps(fields).encode()
    if (way := chance.random()) < 0.6:
        body = mutated_json(chance, body, _VALUES)
    elif way < 0.85:
        body = mutated_bytes(chance, body)
    if chance.random() < 0.05:
        path = chance.choice([*_PATHS, "/v1/../health", "//", "/%ff", "/v1/models/" + "%2e" * 50, "*", "http://x/y"])
    method = chance.choice(["POST"] * 60 + ["GET", "PUT", "BREW", "HEAD", "OPTIONS"])
    version = chance.choice(["HTTP/1.1"] * 60 + ["HTTP/1.0", "HTTP/2.0", "HTTP/9", "ICY"])
    whole, sent = True, body
    headers = [b"Host: localhost", b"Content-Type: application/json", b"Connection: close"]
    if (way := chance.random()) < 0.1:
        headers.append(b"Transfer-Encoding: chunked")
        sent = _chunked(chance, body)
        whole = sent.endswith(b"0\r\n\r\n")
    elif way < 0.2:
        length = chance.randrange(2 * len(body) + 2)
        headers.append(b"Content-Length: %d" % length)
        whole = length <= len(body)
    else:
        headers.append(b"Content-Length: %d" % len(body))
    if chance.random() < 0.1:
        headers[chance.randrange(len(headers))] = chance.choice(_HEADERS)
        whole = False
    if chance.random() < 0.05:
        headers.insert(chance.randrange(len(headers)), chance.choice(_HEADERS))
        whole = False
    raw = f"{method} {path} {version}\r\n".encode() + b"\r\n".join(headers) + b"\r\n\r\n" + sent
    if chance.random() < 0.05:
        raw, whole = mutated_bytes(chance, raw), False
    return raw, whole and method == "POST" and version == "HTTP/1.1"


def _chunked(chance: random.Random, body: bytes) -> bytes:
    """The body in chunks; one in three has something wrong."""
    out, left = b"", body
    while left:
        size = chance.randrange(1, 200)
        out, left = out + b"%x\r\n%s\r\n" % (len(left[:size]), left[:size]), left[size:]
    out += b"0\r\n\r\n"
    return mutated_bytes(chance, out) if chance.random() < 0.3 else out


def answer_of(server: Running, raw: bytes, whole: bool) -> tuple[int, bytes]:
    """(status, answer); 0 where nothing came back, as for bytes that wait for more."""
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        try:
            connection.sendall(raw)
            if not whole:
                connection.shutdown(socket.SHUT_WR)  # who waits for the rest learns that there is none
            while part := connection.recv(65536):
                answer += part
        except (ConnectionResetError, BrokenPipeError):
            pass  # closed before all was sent, as what is no HTTP may be
    # Of several answers, as to a request after which another stood, the last.
    statuses = [int(head.split(b" ", 2)[1]) for head in answer.split(b"HTTP/1.1")[1:] if head[:1] == b" "]
    return max(statuses, default=0), answer


def _fuzz(server: Running, count: int, seed: int) -> None:
    chance = random.Random(seed)
    requests = [mutated_request(chance) for _ in range(count)]
    restarts = server.engine()["restarts"]

    def status(one: tuple[bytes, bool]) -> int:
        found, answer = answer_of(server, *one)
        assert found < 500 and b'"server_error"' not in answer, (one[0], answer)
        # A text may say it: the pair has read Python.
        assert found == 200 or b"Traceback" not in answer, (one[0], answer)
        if found >= 400 and found != 499 and not one[0].startswith((b"HEAD", b"OPTIONS")):
            assert b'"error"' in answer, (one[0], answer)
        return found

    with ThreadPoolExecutor(4) as pool:
        seen = Counter(pool.map(status, requests))
    print(f"{count} requests: {dict(seen)}")
    assert server.engine()["restarts"] == restarts
    assert "Traceback" not in server.log.read_text()
    assert seen[200] > count / 10 and seen[400] > count / 4, seen
    assert server.wait_idle(60)["pages_used"] == 0


def test_mutated_requests_bring_no_5xx(server: Running) -> None:
    _fuzz(server, 300, 1)


@pytest.mark.slow
def test_twenty_thousand_mutated_requests_bring_no_5xx(server: Running) -> None:
    _fuzz(server, 20_000, 2)
