"""What is wrong with a request is told in one sentence, in OpenAI's shape, and the next request is served."""

import json
import socket
from typing import Any

import pytest

from tests.serving import Running

DEEP = 10_000
MILLION = 1_000_000


def _nested(key: str) -> bytes:
    return b'{"prompt": "a", "' + key.encode() + b'": ' + b"[" * DEEP + b"]" * DEEP + b"}"


# name: (path, body, part of the sentence, param)
BODIES: dict[str, tuple[str, bytes, str, str | None]] = {
    "no UTF-8": ("/v1/completions", b'{"prompt": "\xff\xfe"}', "not UTF-8", None),
    "no JSON": ("/v1/completions", b'{"prompt": ', "not JSON", None),
    "empty": ("/v1/completions", b"", "not JSON", None),
    "a list": ("/v1/completions", b"[1, 2]", "must be a JSON object", None),
    "NaN": ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', "NaN", None),
    "Infinity": ("/v1/completions", b'{"prompt": "a", "temperature": -Infinity}', "Infinity", None),
    "1e999": ("/v1/completions", b'{"prompt": "a", "temperature": 1e999}', "temperature", "temperature"),
    "nested": ("/v1/completions", _nested("stop"), "deep", None),
    "nested in a schema": ("/v1/completions", _nested("response_format"), "deep", None),
    "a number of a million digits": (
        "/v1/completions", b'{"prompt": "a", "seed": ' + b"9" * MILLION + b"}", "4,300 digits", None,
    ),
    "half a character": ("/v1/completions", b'{"prompt": "\\ud800"}', "half a character", "prompt"),
    "half a character in a stop": (
        "/v1/completions", b'{"prompt": "a", "stop": "\\udc00"}', "half a character", "stop",
    ),
    "half a character in a name": ("/v1/completions", b'{"prompt": "a", "\\ud800": 1}', "half a character", None),
    "half a character in a chat": (
        "/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "half a character", "messages",
    ),
    "half a character to tokenize": ("/tokenize", b'{"prompt": "\\ud800"}', "half a character", "prompt"),
    "no prompt": ("/v1/completions", b"{}", "prompt is missing", "prompt"),
    "an empty prompt": ("/v1/completions", b'{"prompt": ""}', "types fits (prompt: string", "prompt"),
    "no tokens": ("/v1/completions", b'{"prompt": []}', "prompt", "prompt"),
    "a prompt of prompts of nothing": ("/v1/completions", b'{"prompt": [[]]}', "prompt", "prompt"),
    "unknown fields": ("/v1/completions", b'{"prompt": "a", "foo": 1, "bar": 2}', "bar, foo are no fields", "bar"),
    "an unknown field inside": (
        "/v1/completions",
        b'{"prompt": "a", "specpress": {"draft": 1}}', "specpress.draft is no field", "specpress.draft",
    ),
    "text for a number": ("/v1/completions", b'{"prompt": "a", "max_tokens": "5"}', "max_tokens", "max_tokens"),
    "true for a number": ("/v1/completions", b'{"prompt": "a", "max_tokens": true}', "max_tokens", "max_tokens"),
    "negative max_tokens": ("/v1/completions", b'{"prompt": "a", "max_tokens": -1}', "max_tokens", "max_tokens"),
    "an id that there is not": ("/v1/completions", b'{"prompt": [5, 99999]}', "99999", "prompt"),
    "a negative id": ("/v1/completions", b'{"prompt": [5, -1]}', "prompt", "prompt"),
    "an enormous id": ("/v1/completions", b'{"prompt": [5, ' + b"9" * 400 + b"]}", "prompt", "prompt"),
    "a bias on an id that there is not": (
        "/v1/completions", b'{"prompt": "a", "logit_bias": {"99999": 1}}', "99999", "logit_bias",
    ),
    "a bias on a word": ("/v1/completions", b'{"prompt": "a", "logit_bias": {"x": 1}}', "no token id", "logit_bias"),
    "a prompt over the context": (
        "/v1/completions", json.dumps({"prompt": "a b " * 4000}).encode(), "context", "prompt",
    ),
    "n of 17": ("/v1/completions", b'{"prompt": "a", "n": 17}', "n:", "n"),
    "logprobs of 21": ("/v1/completions", b'{"prompt": "a", "logprobs": 21}', "logprobs", "logprobs"),
    "17 stops": ("/v1/completions", json.dumps({"prompt": "a", "stop": ["x"] * 17}).encode(), "stop", "stop"),
    "best_of": ("/v1/completions", b'{"prompt": "a", "best_of": 3}', "best_of is not offered", None),
    "suffix": ("/v1/completions", b'{"prompt": "a", "suffix": "b"}', "suffix is not offered", None),
    "stream_options alone": (
        "/v1/completions", b'{"prompt": "a", "stream_options": {"include_usage": true}}', "stream_options", None,
    ),
    "min_tokens over max_tokens": (
        "/v1/completions", b'{"prompt": "a", "max_tokens": 2, "min_tokens": 3}', "min_tokens", "min_tokens",
    ),
    "an unknown drafter": (
        "/v1/completions", b'{"prompt": "a", "specpress": {"drafter": "x"}}', "must be one of", "specpress.drafter",
    ),
    "no messages": ("/v1/chat/completions", b'{"messages": []}', "messages", "messages"),
    "an unknown role": (
        "/v1/chat/completions", b'{"messages": [{"role": "boss", "content": "a"}]}', "messages.0.role", "messages",
    ),
    "a picture": (
        "/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
        "image_url is no field", "messages.0.content.0.image_url",
    ),
    "top_logprobs alone": (
        "/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}', "top_logprobs needs logprobs", None,
    ),
    "a tool that is none": (
        "/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}],'
        b' "tool_choice": {"type": "function", "function": {"name": "g"}}}',
        "none of the tools", "tool_choice",
    ),
    "a stored response": ("/v1/responses", b'{"input": "a", "store": true}', "remembers no responses", None),
    "a previous response": ("/v1/responses", b'{"input": "a", "previous_response_id": "x"}', "remembers no", None),
    "ids to detokenize that there are not": ("/detokenize", b'{"tokens": [99999]}', "99999", "tokens"),
    "a model that is not there": ("/admin/models/load", b'{"name": "x", "path": "no/such"}', "no such file", "path"),
    "a path with a NUL": ("/admin/models/load", b'{"name": "x", "path": "a\\u0000b"}', "path", "path"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_is_told_in_a_sentence(server: Running, name: str) -> None:
    path, body, part, param = BODIES[name]
    answer = server.ask("POST", path, body)
    assert answer.status == 400, answer.body
    error = answer.json()["error"]
    assert part in error["message"] and "\n" not in error["message"] and len(error["message"]) < 700
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert (
        "Traceback" not in error["message"] and "/work" not in error["message"] and "pydantic" not in error["message"]
    )


def test_the_server_still_answers_afterwards(server: Running) -> None:
    assert server.post("/v1/completions", prompt="a", max_tokens=2)["choices"][0]["finish_reason"] == "length"
    assert "Traceback" not in server.log.read_text()


def test_wrong_methods_paths_types_hosts_and_sizes_have_the_same_shape(server: Running) -> None:
    found = {
        404: server.ask("GET", "/nothing"),
        405: server.ask("DELETE", "/v1/models"),
        415: server.ask("POST", "/v1/completions", b"prompt=a", {"Content-Type": "application/x-www-form-urlencoded"}),
        403: server.ask("GET", "/v1/models", headers={"Host": "evil.example"}),
        413: server.ask("POST", "/v1/completions", b" " * 8_000_001),
    }
    for status, answer in found.items():
        assert answer.status == status, answer.body
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"].startswith("req_")
        assert "access-control-allow-origin" not in answer.headers
    unknown = server.ask("POST", "/v1/completions", {"model": "nobody", "prompt": "a"})
    assert unknown.status == 404 and unknown.json()["error"]["code"] == "model_not_found"
    assert server.ask("GET", "/v1/models/nobody").status == 404


def test_a_long_sound_body_is_read(server: Running) -> None:
    answer = server.ask("POST", "/tokenize", {"prompt": "word " * 200_000})
    assert answer.status == 200 and answer.json()["count"] >= 200_000


def test_half_open_connections_delay_nobody(server: Running) -> None:
    idle: list[Any] = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    try:
        for connection in idle:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        assert server.post("/v1/completions", prompt="a", max_tokens=4)["usage"]["completion_tokens"] == 4
    finally:
        for connection in idle:
            connection.close()
