"""`/openapi.json`: the endpoints, what they take, and that their errors all look alike."""

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from runtime.serve import chat_protocol, protocol, responses_protocol

_REF = "#/components/schemas/{model}"
# path: (method, what for, request's model, statuses beside 200)
_ENDPOINTS: dict[str, tuple[str, str, type[BaseModel] | None, tuple[int, ...]]] = {
    "/v1/completions": ("post", "Continue prompts", protocol.CompletionRequest, (404, 429, 500, 503)),
    "/v1/chat/completions": ("post", "Answer a conversation", chat_protocol.ChatRequest, (404, 429, 500, 503)),
    "/v1/responses": (
        "post",
        "Answer a conversation, statelessly",
        responses_protocol.ResponsesRequest,
        (404, 429, 500, 503),
    ),
    "/tokenize": ("post", "Tokens of a text", chat_protocol.TokenizeRequest, (404, 503)),
    "/detokenize": ("post", "Text of tokens", protocol.DetokenizeRequest, (404, 503)),
    "/admin/models/load": ("post", "Load a model, or another under a name", protocol.LoadRequest, (403,)),
    "/admin/models/unload": ("post", "Take a model away", protocol.UnloadRequest, (403, 404, 503)),
    "/admin/models": ("get", "The models and their engines", None, (403,)),
    "/v1/models": ("get", "The models", None, ()),
    "/v1/models/{name}": ("get", "One model", None, (404, 503)),
    "/tokenizer_info": ("get", "Special tokens and the chat template", None, (503,)),
    "/health": ("get", "Whether the server lives", None, ()),
    "/ready": ("get", "Whether it takes requests", None, (503,)),
    "/metrics": ("get", "Figures for Prometheus", None, ()),
    "/version": ("get", "The version", None, ()),
    "/openapi.json": ("get", "This description", None, ()),
}
_SAID = {
    400: "The request is wrong; the message says where",
    401: "A key is needed",
    403: "Not from here",
    404: "There is no such model, or no such path",
    413: "The body is too large",
    415: "The body is no JSON",
    429: "Too much waits already; Retry-After says when to ask again",
    500: "The server's fault",
    503: "Not now; Retry-After says when to ask again",
}


@cache
def described(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 description."""
    kinds = [model for _, _, model, _ in _ENDPOINTS.values() if model is not None]
    names, schema = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    components = schema.get("$defs", {}) | {"Error": _error_schema()}
    paths: dict[str, Any] = {}
    for path, (method, summary, kind, statuses) in _ENDPOINTS.items():
        text = "text/plain" if path == "/metrics" else "application/json"
        answers: dict[str, Any] = {"200": {"description": "Done", "content": {text: {"schema": {}}}}}
        if kind is not None and path.startswith("/v1/"):
            answers["200"]["content"]["text/event-stream"] = {"schema": {}}
        if path == "/metrics":
            answers["200"]["content"][text]["schema"] = {"type": "string"}
        errors = (401, 403, *statuses, *((400, 413, 415) if kind is not None else ()))
        for status in sorted(set(errors)):
            answers[str(status)] = {
                "description": _SAID[status],
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            }
        operation: dict[str, Any] = {
            "summary": summary,
            "operationId": path.strip("/").replace("/", "_").replace(".", "_").replace("{", "").replace("}", ""),
            "responses": answers,
        }
        if kind is not None:
            ref = names[(kind, "validation")]
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref}}}
        if "{name}" in path:
            where = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            operation["parameters"] = [where]
        if path != "/health":
            operation["security"] = [{}, {"key": []}]
        paths[path] = {method: operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Specpress", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _error_schema() -> dict[str, Any]:
    text_or_null = {"type": ["string", "null"]}
    inner = {"message": {"type": "string"}, "type": {"type": "string"}, "param": text_or_null, "code": text_or_null}
    error = {"type": "object", "properties": inner, "required": list(inner)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
