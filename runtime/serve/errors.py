"""What a client is told when something is wrong: OpenAI's error object, whoever noticed."""

import json
from typing import Any

from runtime.errors import UserError


class ApiError(Exception):
    """An answer that is an error: `{"error": {"message", "type", "param", "code"}}` with an HTTP status.

    message      one sentence; holds no path, key or traceback.
    param        the field that is wrong, where it is one.
    retry_after  seconds after which the same request may do better.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)
        if status == 500:
            # A bug does not go away by asking again; OpenAI's clients look at this before they do.
            self.headers["x-should-retry"] = "false"

    @property
    def content(self) -> dict[str, Any]:
        """The error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def body(self) -> bytes:
        """The error object as JSON."""
        return json.dumps(self.content).encode()


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request says something that cannot be done."""
    return ApiError(400, message, param=param, code=code)


def refused(error: UserError) -> ApiError:
    """400 with an engine's sentence; the field is the sentence's first word where that is a field's name."""
    message = str(error)
    first = message.split(" ", 1)[0].rstrip(":")
    return invalid(message, first if first in _FIELDS else None)


def unavailable(message: str, code: str, retry_after: int) -> ApiError:
    """503: not now."""
    return ApiError(503, message, "server_error", code=code, retry_after=retry_after)


def overloaded(message: str, retry_after: int) -> ApiError:
    """429: too much is waiting already."""
    return ApiError(429, message, "rate_limit_error", code="queue_full", retry_after=retry_after)


def failed(message: str = "the server made a mistake over this request; its log says more") -> ApiError:
    """500: a bug, or a request that brings the engine down."""
    return ApiError(500, message, "server_error", code="internal_error")


_FIELDS = {
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "logit_bias", "min_tokens", "stop", "logprobs", "prompt_logprobs", "prompt", "draft_length", "drafter", "verify",
    "response_format", "structured_outputs", "prediction",
}  # fmt: skip
