"""Engines behind an OpenAI-compatible URL: /v1/completions, in the words that vLLM, llama.cpp and this project share.

Tokens come as ids where the engine gives them (`token_ids`, or ids within logprobs); the known model's texts give them
back character by character. No proxy, no redirect, and no host but this one unless it was asked for.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, urlsplit

from runtime.audit.asks import Answer, Ask
from runtime.errors import UserError

_MOST = 64_000_000  # bytes of an answer
_LONG = 300.0  # seconds of silence


@dataclass(frozen=True)
class HttpOptions:
    """Where an engine is, and what its dialect wants besides.

    url         the base, http://127.0.0.1:8000/v1.
    plain_url   the same engine without speculation, at another port; None: `send_plain` switches it off.
    send        fields for every request; send_drafts, send_plain: for those with and without drafts.
    concurrent  the most requests at once.
    """

    url: str
    plain_url: str | None = None
    model: str | None = None
    send: Mapping[str, Any] = field(default_factory=dict)
    send_drafts: Mapping[str, Any] = field(default_factory=dict)
    send_plain: Mapping[str, Any] = field(default_factory=dict)
    remote: bool = False
    concurrent: int = 16


class HttpEngine:
    """An engine by its URL. Raises UserError for an address that is not this machine's, or does not answer."""

    def __init__(self, options: HttpOptions) -> None:
        self.name = options.url
        self.has_plain = options.plain_url is not None or bool(options.send_plain)
        self._options = options
        self._bases = {
            drafts: _checked(url, options.remote)
            for drafts, url in ((True, options.url), (False, options.plain_url or options.url))
        }
        self._pool = ThreadPoolExecutor(max_workers=options.concurrent)
        # Connections are kept, one for each thread of the pool.
        self._local = threading.local()
        self._model = options.model or self._first_model()

    def ask(self, asks: Sequence[Ask], together: bool) -> list[Answer]:
        """One request for each ask, at once or one after the other."""
        if not together:
            return [self._complete(one) for one in asks]
        return list(self._pool.map(self._complete, asks))

    def _first_model(self) -> str:
        found = self._request(self._bases[True], "GET", "/models", None)
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"{self.name}/models names no model: give --model-name") from error

    def _complete(self, ask: Ask) -> Answer:
        options = self._options
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": ask.text,
            "max_tokens": ask.new_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k,
            "min_p": 0.0,
            "seed": ask.seed,
        }
        if ask.logprobs:
            body["logprobs"] = 1
        body |= {**options.send, **(options.send_drafts if ask.drafts else options.send_plain)}
        base = self._bases[ask.drafts]
        found = self._request(base, "POST", "/completions", {k: v for k, v in body.items() if v is not None})
        try:
            return _read(found["choices"][0])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{base.geturl()}/completions gave an answer without a text: {str(found)[:200]}") from error

    def _request(self, base: SplitResult, method: str, path: str, body: Any) -> dict[str, Any]:
        where = f"{base.geturl()}{path}"
        data = None if body is None else json.dumps(body).encode()
        known: dict[str, HTTPConnection] = self._local.__dict__.setdefault("open", {})
        for attempt in (0, 1):
            fresh = base.netloc not in known
            connection = known.setdefault(base.netloc, _connection(base))
            try:
                connection.request(method, base.path + path, data, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                raw = answer.read(_MOST)
                break
            except (OSError, HTTPException) as error:
                connection.close()
                del known[base.netloc]
                # A server may close a connection that it has kept for some time.
                if fresh or attempt:
                    raise UserError(f"{where} does not answer ({error or type(error).__name__})") from error
        if answer.status != 200:
            raise UserError(f"{where} answered {answer.status}: {' '.join(raw[:300].decode(errors='replace').split())}")
        try:
            found = json.loads(raw)
        except ValueError as error:
            raise UserError(f"{where} did not answer in JSON: {raw[:100]!r}") from error
        if not isinstance(found, dict):
            raise UserError(f"{where} must answer with a JSON object, found {type(found).__name__}")
        return found


def _connection(base: SplitResult) -> HTTPConnection:
    kind = HTTPSConnection if base.scheme == "https" else HTTPConnection
    return kind(base.hostname or "", base.port, timeout=_LONG)


def _checked(url: str, remote: bool) -> SplitResult:
    try:
        base = urlsplit(url.rstrip("/"))
        host, _ = base.hostname or "", base.port
    except ValueError as error:
        raise UserError(f"{url} is no URL ({error}); give one like http://127.0.0.1:8000/v1") from error
    if base.scheme not in ("http", "https") or not host:
        raise UserError(f"{url} is no URL of http or https; give one like http://127.0.0.1:8000/v1")
    try:
        near = ip_address(host).is_loopback
    except ValueError:
        near = host == "localhost"
    if not near and not remote:
        raise UserError(f"{url} is not on this machine: add --remote to send requests there")
    return base


def _read(choice: Mapping[str, Any]) -> Answer:
    """A choice of /v1/completions: logprobs in OpenAI's old form (lists) or its new one (`content`), as llama.cpp."""
    text, said, ids = str(choice["text"]), choice.get("logprobs") or {}, choice.get("token_ids")
    content = said.get("content")
    if content:
        values = [one["logprob"] for one in content]
        ids = ids or ([one["id"] for one in content] if all("id" in one for one in content) else None)
    else:
        values = said.get("token_logprobs") or []
    tokens = None if not ids else tuple(int(one) for one in ids)
    return Answer(tokens, text, tuple(float(one) for one in values if one is not None))
