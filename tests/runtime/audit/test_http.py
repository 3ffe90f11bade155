"""Engines behind a URL: planted bugs on loopback, and servers that do not answer as they should."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from runtime.audit.asks import Ask
from runtime.audit.http import HttpEngine, HttpOptions
from runtime.audit.known import LETTERS
from runtime.audit.run import Plan, audit
from runtime.audit.sampled import Known, Setting
from runtime.errors import UserError
from tests.runtime.audit.engines import Sampler
from tests.runtime.audit.planted import BUGS

Reply = Callable[[str, dict[str, Any]], tuple[int, Any]]


@contextmanager
def serving(reply: Reply) -> Iterator[str]:
    """The base URL of a server whose answers to (path, body) are (status, JSON or bytes)."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, said = reply(self.path, json.loads(body) if body else {})
            data = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *said: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def engine_of(sampler: Sampler, ids: bool) -> Reply:
    """A sampler behind /v1/completions; `spec` in a body switches its drafts. Tokens as ids, or as text alone."""
    turn = threading.Lock()
    bytes_of = dict(zip(sampler.known.target.letters, LETTERS, strict=True))

    def reply(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path.endswith("/models"):
            return 200, {"data": [{"id": "known"}]}
        prompt = tuple(sampler.known.target.encode(body["prompt"]))
        ask = Ask(
            prompt, body["prompt"], body["max_tokens"], body["temperature"], body["top_k"], body["top_p"],
            body["seed"], body["spec"], "logprobs" in body,
        )  # fmt: skip
        with turn:
            found = sampler([ask])[0]
        choice: dict[str, Any] = {"text": "".join(bytes_of.get(token, "?") for token in found["tokens"])}
        if ids:
            choice |= {"token_ids": found["tokens"]}
        if ask.logprobs:
            choice |= {"logprobs": {"token_logprobs": found["logprobs"], "tokens": list(choice["text"])}}
        return 200, {"choices": [choice]}

    return reply


PLAN = Plan(requests=250, settings=(Setting(),), new_tokens=10, greedy_tokens=4, repeats=1, effect=0.25)


def test_a_planted_bug_is_found_over_http_and_a_sound_engine_is_not_accused(known: Known) -> None:
    verdicts = []
    for kind, ids in ((Sampler, False), (BUGS["AcceptsLikely"], True)):
        with serving(engine_of(kind(known), ids)) as url:
            found = audit(HttpEngine(HttpOptions(url, send={"spec": True})), known, PLAN)
        assert len(found.logprobs) == 1 and all(row.largest < 1e-9 for row in found.logprobs)
        verdicts.append(found.verdict)
    assert verdicts == ["lossless", "differs"]


def test_without_plain_decoding_greedy_texts_are_compared_with_float64(known: Known) -> None:
    sampler = Sampler(known)
    plan = Plan(requests=70, settings=(Setting(),), new_tokens=8, greedy_tokens=9, repeats=1)
    for sent, reference, rows in (
        ({"send": {"spec": True}}, "greedy texts in float64", 2),
        ({"send_drafts": {"spec": True}, "send_plain": {"spec": False}}, "its texts without drafts, each alone", 3),
    ):
        with serving(engine_of(sampler, True)) as url:
            found = audit(HttpEngine(HttpOptions(url, **sent)), known, plan)  # type: ignore[arg-type]
        assert found.greedy_reference == reference
        assert sum(row.equal == row.texts > 0 for row in found.greedy) == rows
        assert found.verdict == "cannot tell" and "more requests" in found.sentence


REPLIES: dict[str, tuple[Reply, str]] = {
    "status": (lambda path, body: (503, {"error": "loading"}), "answered 503"),
    "no json": (lambda path, body: (200, b"<html>"), "did not answer in JSON"),
    "a list": (lambda path, body: (200, [1]), "JSON object"),
    "no models": (lambda path, body: (200, {"data": []}), "names no model"),
}


@pytest.mark.parametrize("name", REPLIES)
def test_servers_that_do_not_answer_as_they_should_are_told_in_a_sentence(name: str) -> None:
    reply, sentence = REPLIES[name]
    with serving(reply) as url, pytest.raises(UserError, match=sentence):
        HttpEngine(HttpOptions(url))


def test_an_answer_without_a_text_is_told() -> None:
    def reply(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"data": [{"id": "m"}], "choices": [{"message": {}}]}

    with serving(reply) as url, pytest.raises(UserError, match="without a text"):
        HttpEngine(HttpOptions(url)).ask([Ask((), "abc", 4)], together=True)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://192.0.2.7:8000/v1", "--remote"),
        ("http://example.org/v1", "--remote"),
        ("ftp://127.0.0.1/v1", "no URL of http"),
        ("http://127.0.0.1:notaport/v1", "no URL"),
        ("http://127.0.0.1:9/v1", "does not answer"),
    ],
)
def test_addresses_are_checked(url: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        HttpEngine(HttpOptions(url))
