"""The endpoints, and that every error has OpenAI's shape."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from runtime.errors import UserError
from runtime.serve import metrics
from runtime.serve.answers import api_error, as_json, bug, client_gone, http_error, model_shown
from runtime.serve.bodies import Model, read
from runtime.serve.chat import Chat
from runtime.serve.chat_protocol import ChatRequest, TokenizeRequest
from runtime.serve.completions import Completion, plan_top
from runtime.serve.errors import ApiError, invalid, unavailable
from runtime.serve.models import Models, Served
from runtime.serve.openapi import described
from runtime.serve.page_routes import PageRoutes
from runtime.serve.plan import Plan, Structured, Wanted, make_plan, structure_of, token_prompts
from runtime.serve.protocol import (
    Common,
    CompletionRequest,
    DetokenizeRequest,
    LoadRequest,
    UnloadRequest,
)
from runtime.serve.responses import Answer, as_chat
from runtime.serve.responses_protocol import ResponsesRequest
from runtime.serve.run import ClientGone, Run, unless_gone
from runtime.serve.settings import Limits, ModelSettings, PageSettings
from runtime.serve.sse import EventStream
from runtime.serve.templates import chat_messages, chat_tools, render, response_messages
from runtime.serve.tools import held

_INLINE = 20_000  # characters that are tokenised between other things; more go to a thread
VERSION = metadata.version("specpress")
Writers = Callable[[Run], Any]
Endpoint = Callable[..., Awaitable[Response]]


class Service:
    """What the endpoints share. `draining`: nothing new is taken on."""

    def __init__(
        self, models: Models, registry: metrics.Registry, limits: Limits, base: ModelSettings, page: PageSettings
    ) -> None:
        self.models, self.registry, self.limits, self._base = models, registry, limits, base
        self._page = PageRoutes(models, page, VERSION)
        self.draining = False

    def app(self) -> FastAPI:
        """The ASGI app."""
        app = FastAPI(title="Specpress", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
        posts: tuple[tuple[str, Endpoint], ...] = (
            ("/v1/completions", self.completions),
            ("/v1/chat/completions", self.chat),
            ("/v1/responses", self.responses),
            ("/tokenize", self.tokenize),
            ("/detokenize", self.detokenize),
            ("/admin/models/load", self.load),
            ("/admin/models/unload", self.unload),
        )
        for path, endpoint in posts:
            app.add_api_route(path, endpoint, methods=["POST"], response_model=None)
        gets: tuple[tuple[str, Endpoint], ...] = (
            ("/v1/models", self.list_models),
            ("/v1/models/{name:path}", self.one_model),
            ("/tokenizer_info", self.tokenizer_info),
            ("/health", self.health),
            ("/ready", self.ready),
            ("/metrics", self.metrics),
            ("/version", self.version),
            ("/openapi.json", self.openapi),
            ("/admin/models", self.admin_models),
        )
        for path, endpoint in gets:
            app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
        self._page.add_to(app, self._read)
        app.add_exception_handler(ApiError, api_error)
        app.add_exception_handler(HTTPException, http_error)
        app.add_exception_handler(ClientDisconnect, client_gone)
        app.add_exception_handler(Exception, bug)
        return app

    # Texts.

    async def completions(self, request: Request) -> Response:
        """Continues prompts: OpenAI's completions."""
        asked = await self._read(CompletionRequest, request)
        served = self._served(asked.model)
        prompts = 1 if isinstance(asked.prompt, str) or isinstance(asked.prompt[0], int) else len(asked.prompt)

        async def plan() -> Plan:
            top, prompt_top = plan_top(asked)
            most = 16 if asked.max_tokens is None else asked.max_tokens
            wanted = Wanted(most, top, prompt_top, await _structure(asked))
            tokens = await self._apart(
                token_prompts, _size(asked.prompt), served, asked.prompt, asked.add_special_tokens
            )
            return make_plan(served, asked, tokens, wanted, int(time.time()), f"cmpl-{secrets.token_hex(12)}")

        return await self._answer(
            request, served, prompts * (asked.n or 1), plan, lambda run: Completion(run, asked), asked
        )

    async def chat(self, request: Request) -> Response:
        """Answers a conversation: OpenAI's chat completions."""
        asked = await self._read(ChatRequest, request)
        served = self._served(asked.model)

        async def plan() -> Plan:
            return await self._chat_plan(served, asked, chat_messages(asked.messages), "chatcmpl-")

        return await self._answer(request, served, asked.n or 1, plan, lambda run: Chat(run, asked), asked)

    async def responses(self, request: Request) -> Response:
        """Answers a conversation: OpenAI's responses, of which nothing is remembered."""
        asked = await self._read(ResponsesRequest, request)
        served, chat = self._served(asked.model), as_chat(asked)

        async def plan() -> Plan:
            return await self._chat_plan(served, chat, response_messages(asked), "resp_")

        return await self._answer(request, served, 1, plan, lambda run: Answer(run, asked, chat), chat)

    async def _chat_plan(self, served: Served, asked: ChatRequest, messages: list[dict[str, Any]], prefix: str) -> Plan:
        structure = held(asked, served.vocabulary) or await _structure(asked)

        def tokens() -> list[int]:
            text = render(served.vocabulary, messages, chat_tools(asked), asked.chat_template_kwargs)
            return served.vocabulary.encode(text, False, "messages")

        size = sum(len(one["content"]) for one in messages)
        prompt = await self._apart(tokens, size)
        top = (asked.top_logprobs or 0) if asked.logprobs else None
        most = asked.max_completion_tokens if asked.max_tokens is None else asked.max_tokens
        wanted = Wanted(most, top, asked.prompt_logprobs, structure)
        return make_plan(served, asked, [prompt], wanted, int(time.time()), f"{prefix}{secrets.token_hex(12)}")

    async def _answer(
        self,
        request: Request,
        served: Served,
        texts: int,
        plan: Callable[[], Awaitable[Plan]],
        writers: Writers,
        asked: Common,
    ) -> Response:
        """Takes places for the texts, then looks what they are; begins them, and answers. Raises ApiError."""
        try:
            served.admission.reserve(texts)
        except ApiError:
            served.meter.rejected()
            raise
        run: Run | None = None
        try:
            run = Run(await plan(), texts)
            await unless_gone(run.begin(), request.receive)
            writer = writers(run)
            if asked.stream:
                streaming, run = run, None
                return EventStream(streaming, writer, {})
            return as_json(await unless_gone(writer.whole(), request.receive))
        except ClientGone:
            return Response(status_code=499)
        except BaseException:
            if run is None:
                served.admission.release(texts)
            raise
        finally:
            if run is not None:
                run.close()

    async def _apart(self, work: Callable[..., Any], size: int, *values: Any) -> Any:
        return await asyncio.to_thread(work, *values) if size > _INLINE else work(*values)

    # What else there is to ask.

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a text, or of a conversation by the chat template."""
        asked = await self._read(TokenizeRequest, request)
        served = self._served(asked.model)
        vocabulary = served.vocabulary

        def tokens() -> list[int]:
            if asked.messages is None:
                return vocabulary.encode(str(asked.prompt), asked.add_special_tokens, "prompt")
            text = render(vocabulary, chat_messages(asked.messages), generation=asked.add_generation_prompt)
            return vocabulary.encode(text, bool(asked.add_special_tokens), "messages")

        found = await self._apart(tokens, len(asked.prompt or "") or _INLINE)
        names = [vocabulary.shown(token) for token in found] if asked.return_token_strs else None
        return as_json(
            {"tokens": found, "count": len(found), "max_model_len": served.about["context"], "token_strs": names}
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        asked = await self._read(DetokenizeRequest, request)
        served = self._served(asked.model)
        return as_json({"prompt": await self._apart(served.vocabulary.decode, len(asked.tokens), asked.tokens)})

    async def tokenizer_info(self) -> Response:
        """Special tokens and the chat template."""
        return as_json(self.models.get(None).vocabulary.about())

    async def list_models(self) -> Response:
        """The models that can be asked for."""
        return as_json({"object": "list", "data": [model_shown(one) for one in self.models]})

    async def one_model(self, name: str) -> Response:
        """One of them."""
        return as_json(model_shown(self.models.get(name)))

    async def health(self) -> Response:
        """Whether the server lives; it does."""
        return as_json({"status": "ok"})

    async def ready(self) -> Response:
        """Whether a request would be taken on now."""
        if self.draining:
            raise unavailable("the server is shutting down", "draining", 5)
        if not self.models.ready:
            raise unavailable("an engine is starting", "engine_down", 5)
        return as_json({"status": "ready"})

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        self.models.gauge()
        return Response(self.registry.text(), media_type=metrics.CONTENT_TYPE)

    async def version(self) -> Response:
        """The server's version."""
        return as_json({"version": VERSION})

    async def openapi(self) -> Response:
        """This description."""
        return as_json(described(VERSION))

    async def admin_models(self) -> Response:
        """The models and their engines."""
        found = [
            {
                "name": one.name,
                "state": one.front.state,
                "pid": one.front.pid,
                "restarts": one.front.restarts,
                "fingerprint": one.about["fingerprint"],
                "context": one.about["context"],
                "drafters": one.about["drafters"],
                **({"replicas": one.front.replicas} if one.front.replicas else {}),
                **dict(zip(("running", "waiting", "pages_used", "pages_free"), one.front.counts, strict=True)),
            }
            for one in self.models
        ]
        return as_json({"models": found})

    async def load(self, request: Request) -> Response:
        """Loads a model, then gives it its name; the one that had it ends its texts."""
        asked = await self._read(LoadRequest, request)
        settings = replace(
            self._base, **{key: value for key, value in asked.model_dump().items() if value is not None}, corpus=None
        )
        try:
            if not Path(asked.path).exists():
                raise UserError("path: there is no such file or folder on the server's machine")
            served = await self.models.load(settings)
        except (UserError, OSError, ValueError) as error:
            said = str(error) if isinstance(error, UserError) else "path: it cannot be read"
            raise invalid(said, "path", "load_failed") from None
        return as_json(model_shown(served))

    async def unload(self, request: Request) -> Response:
        """Takes a model away; its texts end first."""
        asked = await self._read(UnloadRequest, request)
        self.models.unload(asked.name)
        return as_json({"name": asked.name, "unloaded": True})

    def _served(self, name: str | None) -> Served:
        if self.draining:
            raise unavailable("the server is shutting down", "draining", 5)
        return self.models.get(name)

    async def _read(self, kind: type[Model], request: Request) -> Model:
        """The body. Raises ApiError."""
        # Anything but JSON can be sent by a page of another origin without being asked for leave.
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the Content-Type must be application/json", code="unsupported_media_type")
        most, parts, size = self.limits.max_body, [], 0
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > most:
            raise _too_large(most)
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > most:
                raise _too_large(most)
        return read(kind, b"".join(parts), self.limits.lenient)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most} bytes: send less at once", code="body_too_large")


def _size(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(one) for one in prompt if isinstance(one, str))


async def _structure(asked: Common) -> Structured | None:
    """The form that the text must have; beside other things, as a large one takes long to look at. Raises ApiError."""
    if asked.response_format is None and asked.structured_outputs is None:
        return None
    return await asyncio.to_thread(structure_of, asked.response_format, asked.structured_outputs)
