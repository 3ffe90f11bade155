"""`/v1/responses`, without memory: its answer, whole or as a stream of typed events."""

import json
import secrets
from typing import Any

from runtime.serve.chat import calls_of, message_of
from runtime.serve.chat_protocol import ChatRequest, Function, NamedFunction, NamedTool, Tool
from runtime.serve.errors import ApiError
from runtime.serve.protocol import JsonSchema, ResponseFormat
from runtime.serve.responses_protocol import ResponsesRequest, ResponseToolChoice
from runtime.serve.run import Fresh, Progress, Run
from runtime.serve.texts import Scored, chat_logprobs


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """The same as a request for a chat's answer, but for its messages."""
    tools = [
        Tool(type="function", function=Function(**tool.model_dump(exclude={"type"}))) for tool in request.tools or []
    ]
    choice: Any = request.tool_choice
    if isinstance(choice, ResponseToolChoice):
        choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
    form = request.text.format if request.text is not None else None
    asked = None
    if form is not None and form.type != "text":
        schema = JsonSchema.model_validate({"schema": form.schema_ or {}}) if form.type == "json_schema" else None
        asked = ResponseFormat(type=form.type, json_schema=schema)
    include = request.include or []
    return ChatRequest.model_construct(
        messages=[],
        model=request.model,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=bool(include) or request.top_logprobs is not None,
        top_logprobs=request.top_logprobs,
        stream=request.stream,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=asked,
        seed=request.seed,
        cache_salt=request.cache_salt,
        specpress=request.specpress,
    )


class Answer:
    """Gathers, or streams, one response."""

    def __init__(self, run: Run, request: ResponsesRequest, chat: ChatRequest) -> None:
        self._run, self._plan, self._request = run, run.plan, request
        self._calls = calls_of(chat)
        self._number = 0
        self._item = f"msg_{secrets.token_hex(16)}"
        self._text = ""
        self._scored: list[Scored] = []
        self._open = False
        # A call can only be told from text when it is whole: then its events come at the end.
        self._live = self._calls is None

    def opening(self) -> bytes:
        """See sse.Writer."""
        body = self._body("in_progress", [])
        return self._event("response.created", {"response": body}) + self._event(
            "response.in_progress", {"response": body}
        )

    def delta(self, text: Progress, fresh: Fresh) -> bytes:
        """See sse.Writer."""
        self._text += fresh.text
        self._scored += fresh.scored
        if not self._live:
            return b""
        out = self._opened() if not self._open else b""
        if fresh.text or fresh.scored:
            told = {"delta": fresh.text, "logprobs": self._logprobs(fresh.scored)}
            out += self._event("response.output_text.delta", self._place() | told)
        return out

    def closing(self) -> bytes:
        """See sse.Writer."""
        items, out = self._items(), b""
        for place, item in enumerate(items):
            if item["type"] == "message":
                if not self._open:
                    out += self._opened()
                    out += self._event(
                        "response.output_text.delta",
                        self._place() | {"delta": item["content"][0]["text"], "logprobs": []},
                    )
                part = item["content"][0]
                done = self._place() | {"text": part["text"], "logprobs": part["logprobs"]}
                out += self._event("response.output_text.done", done)
                out += self._event("response.content_part.done", self._place() | {"part": part})
            else:
                begun = item | {"arguments": "", "status": "in_progress"}
                where = {"item_id": item["id"], "output_index": place}
                out += self._event("response.output_item.added", {"output_index": place, "item": begun})
                out += self._event("response.function_call_arguments.delta", where | {"delta": item["arguments"]})
                told = {"arguments": item["arguments"], "name": item["name"]}
                out += self._event("response.function_call_arguments.done", where | told)
            out += self._event("response.output_item.done", {"output_index": place, "item": item})
        body = self._body(self._status(), items)
        name = "response.completed" if body["status"] == "completed" else "response.incomplete"
        return out + self._event(name, {"response": body})

    def error(self, error: ApiError) -> bytes:
        """See sse.Writer."""
        told = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", told | error.content)

    async def whole(self) -> dict[str, Any]:
        """The answer, when the text has ended. Raises ApiError."""
        found = await self._run.whole()
        self._text, self._scored = found[0].text, found[0].scored
        return self._body(self._status(), self._items())

    def _status(self) -> str:
        return "completed" if self._run.texts[0].flight.finish == "stop" else "incomplete"

    def _items(self) -> list[dict[str, Any]]:
        """The message, or the calls, of the whole text."""
        message = message_of(self._calls, self._text)
        made = message.get("tool_calls", [])
        items: list[dict[str, Any]] = []
        if message["content"] or not made:
            part = {
                "type": "output_text",
                "text": message["content"] or "",
                "annotations": [],
                "logprobs": self._logprobs(self._scored),
            }
            items.append(
                {"type": "message", "id": self._item, "role": "assistant", "status": self._status(), "content": [part]}
            )
        for call in made:
            items.append(
                {
                    "type": "function_call",
                    "id": f"fc_{secrets.token_hex(16)}",
                    "call_id": call["id"],
                    "name": call["function"]["name"],
                    "arguments": call["function"]["arguments"],
                    "status": "completed",
                }
            )
        return items

    def _logprobs(self, scored: list[Scored]) -> list[dict[str, Any]]:
        top = self._plan.top
        return [] if top is None else chat_logprobs(self._plan.served.vocabulary, scored, top)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _opened(self) -> bytes:
        self._open = True
        item = {"type": "message", "id": self._item, "role": "assistant", "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        out = self._event("response.output_item.added", {"output_index": 0, "item": item})
        return out + self._event("response.content_part.added", self._place() | {"part": part})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        told = {"type": name, "sequence_number": self._number} | fields
        self._number += 1
        return f"event: {name}\ndata: {json.dumps(told, separators=(',', ':'))}\n\n".encode()

    def _body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        request, plan = self._request, self._plan
        sampling = plan.asked[0]["sampling"]
        said = self._run.usage()
        usage = {
            "input_tokens": said["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": said["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": said["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": said["total_tokens"],
        }
        ended = status != "in_progress"
        return {
            "id": plan.id,
            "object": "response",
            "created_at": plan.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": plan.served.name,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling["temperature"],
            "text": {"format": {"type": "text"}}
            if request.text is None or request.text.format is None
            else request.text.model_dump(exclude_none=True, by_alias=True),
            "tool_choice": request.tool_choice
            if isinstance(request.tool_choice, str)
            else "auto"
            if request.tool_choice is None
            else request.tool_choice.model_dump(),
            "tools": [tool.model_dump() for tool in request.tools or []],
            "top_p": sampling["top_p"],
            "truncation": "disabled",
            "usage": usage if ended else None,
            "user": request.user,
            "metadata": request.metadata or {},
            "system_fingerprint": plan.served.about["fingerprint"],
            "specpress": {"seed": plan.seed},
        }
