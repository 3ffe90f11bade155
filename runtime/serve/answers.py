"""Whole answers: JSON, and errors in OpenAI's shape whoever noticed them."""

import json
import logging
from typing import Any

from fastapi import Request, Response
from starlette.exceptions import HTTPException

from runtime.serve.errors import ApiError, failed
from runtime.serve.models import Served

_LOG = logging.getLogger("specpress.serve")


def model_shown(served: Served) -> dict[str, Any]:
    """A model as OpenAI's and vLLM's clients expect it."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "specpress",
        "root": served.name,
        "parent": None,
        "max_model_len": served.about["context"],
    }


def as_json(content: Any) -> Response:
    """An answer. Raises ValueError for a number that is not finite: none may be there."""
    # A half of a character in a model's text cannot be: texts come of whole characters. allow_nan: figures are finite.
    return Response(json.dumps(content, separators=(",", ":"), allow_nan=False).encode(), media_type="application/json")


async def api_error(_: Request, error: Exception) -> Response:
    """Of our own errors."""
    assert isinstance(error, ApiError)
    return Response(error.body, error.status, error.headers, "application/json")


async def http_error(request: Request, error: Exception) -> Response:
    """Of the framework's: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    where = request.url.path[:100].encode("ascii", "backslashreplace").decode()
    said = {404: f"there is no {where} here", 405: f"{where} does not take {request.method[:20]}"}
    message = said.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    told = ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))
    return Response(told.body, told.status, told.headers, "application/json")


async def client_gone(_: Request, __: Exception) -> Response:
    """Of a client that left in the middle of its body: nobody hears the answer."""
    return Response(status_code=499)


async def bug(_: Request, error: Exception) -> Response:
    """Of what nobody expected: the log has it, the client learns that it happened."""
    _LOG.error("a request failed", exc_info=error)
    told = failed()
    return Response(told.body, told.status, told.headers, "application/json")
