"""`/v1/chat/completions`: its answer, whole or as a stream."""

import json
from typing import Any

from runtime.serve.chat_protocol import ChatRequest, NamedTool
from runtime.serve.completions import reason
from runtime.serve.errors import ApiError
from runtime.serve.run import Fresh, Progress, Run, round_shown
from runtime.serve.sse import DONE, error_event, event
from runtime.serve.texts import chat_logprobs, prompt_logprobs
from runtime.serve.tools import Calls


class Chat:
    """Gathers, or streams, the answers of one request."""

    def __init__(self, run: Run, request: ChatRequest) -> None:
        self._run, self._plan, self._request = run, run.plan, request
        self._usage = bool(request.stream_options and request.stream_options.include_usage)
        self._each = bool(request.stream_options and request.stream_options.continuous_usage_stats)
        self._begun = [False] * len(run.texts)
        self._calls = [calls_of(request) for _ in run.texts]
        plan = run.plan
        self._head = {
            "id": plan.id,
            "object": "chat.completion",
            "created": plan.created,
            "model": plan.served.name,
            "system_fingerprint": run.fingerprint,
        }
        self._chunk = self._head | {"object": "chat.completion.chunk"}
        self._start = "data: " + json.dumps(self._chunk, separators=(",", ":"))[:-1] + ',"choices":[{"index":'
        self._plain_end = ',"logprobs":null,"finish_reason":null}]' + (',"usage":null' if self._usage else "") + "}\n\n"
        ours = request.specpress
        self._plain = (
            plan.top is None
            and not (request.return_token_ids or self._each or (ours and ours.rounds))
            and not any(self._calls)
        )

    def opening(self) -> bytes:
        """See sse.Writer."""
        out = b""
        for place in range(len(self._run.texts)):
            chunk: dict[str, Any] = self._chunk | {"choices": [_choice(place, {"role": "assistant", "content": ""})]}
            if self._usage or self._each:
                chunk["usage"] = None
            if place == 0:
                chunk["specpress"] = {"seed": self._plan.seed}
            out += event(chunk)
        return out

    def delta(self, text: Progress, fresh: Fresh) -> bytes:
        """See sse.Writer."""
        place = text.place
        if self._plain and fresh.finish is None and self._begun[place]:
            if not fresh.text:
                return b""
            return f'{self._start}{place},"delta":{{"content":{json.dumps(fresh.text)}}}{self._plain_end}'.encode()
        calls = self._calls[place]
        if calls is None:
            deltas: list[dict[str, Any]] = [{"content": fresh.text}] if fresh.text else []
        else:
            deltas = calls.add(fresh.text, fresh.finish is not None)
        if fresh.scored or fresh.rounds or self._request.return_token_ids or not self._begun[place]:
            deltas = deltas or [{}]
        out = b""
        for number, delta in enumerate(deltas):
            choice = _choice(place, delta)
            if number == 0:
                choice |= self._details(text, fresh, not self._begun[place])
                self._begun[place] = True
            out += self._told(choice)
        if fresh.finish is not None:
            choice = _choice(place, {})
            choice["finish_reason"] = self._reason(place, fresh.finish)
            out += self._told(choice)
        return out

    def closing(self) -> bytes:
        """See sse.Writer."""
        last = event(self._chunk | {"choices": [], "usage": self._run.usage()}) if self._usage else b""
        return last + DONE

    def error(self, error: ApiError) -> bytes:
        """See sse.Writer."""
        return error_event(error)

    async def whole(self) -> dict[str, Any]:
        """The answer, when all texts have ended. Raises ApiError."""
        choices = []
        for text, whole in zip(self._run.texts, await self._run.whole(), strict=True):
            message = message_of(self._calls[text.place], whole.text)
            choice: dict[str, Any] = {"index": text.place, "message": message, "logprobs": None}
            choice |= self._details(text, whole, True)
            choice["finish_reason"] = self._reason(text.place, str(whole.finish))
            choices.append(choice)
        return self._head | {"choices": choices, "usage": self._run.usage(), "specpress": {"seed": self._plan.seed}}

    def _reason(self, place: int, finish: str) -> str | None:
        calls = self._calls[place]
        named = isinstance(self._request.tool_choice, NamedTool)
        return "tool_calls" if calls is not None and calls.count and finish == "stop" and not named else reason(finish)

    def _told(self, choice: dict[str, Any]) -> bytes:
        chunk: dict[str, Any] = self._chunk | {"choices": [choice]}
        if self._usage or self._each:
            chunk["usage"] = self._run.usage() if self._each else None
        return event(chunk)

    def _details(self, text: Progress, fresh: Fresh, first: bool) -> dict[str, Any]:
        plan, request = self._plan, self._request
        out: dict[str, Any] = {}
        vocabulary = plan.served.vocabulary
        if plan.top is not None:
            out["logprobs"] = {"content": chat_logprobs(vocabulary, fresh.scored, plan.top), "refusal": None}
        if request.return_token_ids:
            out["token_ids"] = fresh.tokens
            if first:
                out["prompt_token_ids"] = plan.prompts[0]
        if first and request.prompt_logprobs is not None:
            out["prompt_logprobs"] = prompt_logprobs(vocabulary, text.prompt_scored)
        if request.specpress is not None and request.specpress.rounds:
            out["specpress"] = {"rounds": [round_shown(plan, event) for event in fresh.rounds]}
        return out


def calls_of(request: ChatRequest) -> Calls | None:
    """What reads calls out of an answer; None where there can be none."""
    if not request.tools or request.tool_choice == "none":
        return None
    choice = request.tool_choice
    named = choice.function.name if isinstance(choice, NamedTool) else "" if choice == "required" else None
    return Calls(named, request.parallel_tool_calls is not False)


def message_of(calls: Calls | None, text: str) -> dict[str, Any]:
    """An answer's message."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls is None:
        return message
    content = ""
    made: dict[int, dict[str, Any]] = {}
    for delta in calls.add(text, True):
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            known = made.setdefault(
                call["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            known["id"] = call.get("id", known["id"])
            known["function"]["name"] += call["function"].get("name", "")
            known["function"]["arguments"] += call["function"]["arguments"]
    if made:
        message |= {"content": content or None, "tool_calls": list(made.values())}
    return message


def _choice(place: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": place, "delta": delta, "logprobs": None, "finish_reason": None}
