"""Calls of functions: the form that a forced call must have, and calls found in what a model writes."""

import json
import re
import secrets
from typing import Any

from runtime.serve.chat_protocol import ChatRequest, NamedTool
from runtime.serve.plan import Structured, made_structure

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*')


def forced(request: ChatRequest) -> Structured | None:
    """The grammar of the call that `tool_choice` demands; None where it demands none. Raises ApiError."""
    tools = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in request.tools or []}
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        if choice.function.name not in tools:
            from runtime.serve.errors import invalid

            raise invalid(f"tool_choice names {choice.function.name!r}, which is none of the tools", "tool_choice")
        return made_structure("json_schema", tools[choice.function.name])
    if choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, parameters in tools.items()
    ]
    return made_structure("json_schema", calls[0] if len(calls) == 1 else {"anyOf": calls})


class Calls:
    """Reads one text as it comes, and tells what of it is content and what are calls: OpenAI's deltas.

    named     the function whose arguments the text is; "" where the text is one call (`required`); None: calls stand
              between <tool_call> tags in the text, as Qwen's and Hermes' models write them.
    parallel  whether there may be several.
    """

    def __init__(self, named: str | None, parallel: bool = True) -> None:
        self._named, self._parallel = named, parallel
        self._held = ""
        self._open = False
        self._quiet = True  # no content since the beginning, or since a call
        self.count = 0

    def add(self, text: str, last: bool) -> list[dict[str, Any]]:
        """Deltas of content and of calls."""
        if self._named:
            out = [] if self.count else [self._began(self._named)]
            return out + ([self._more(text)] if text else [])
        self._held += text
        return self._whole(last) if self._named == "" else self._tagged(last)

    def _began(self, name: str, arguments: str = "") -> dict[str, Any]:
        self.count += 1
        call = {"index": self.count - 1, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
        return {"tool_calls": [call | {"function": {"name": name, "arguments": arguments}}]}

    def _more(self, arguments: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": self.count - 1, "function": {"arguments": arguments}}]}

    def _whole(self, last: bool) -> list[dict[str, Any]]:
        """The text is {"name": …, "arguments": …}: all but its last brace is passed on."""
        out = []
        if self.count == 0:
            head = _HEAD.match(self._held)
            if head is None:
                return []
            out.append(self._began(head[1]))
            self._held = self._held[head.end() :]
        kept = 0 if last else max(1, len(self._held) - len(self._held.rstrip(" \n\t}")))
        ready = self._held[: len(self._held) - kept] if kept else self._held.rstrip()[:-1].rstrip()
        self._held = self._held[len(self._held) - kept :] if kept else ""
        return [*out, self._more(ready)] if ready else out

    def _tagged(self, last: bool) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        while True:
            if self._open:
                before, tag, after = self._held.partition(_CLOSE)
                if not tag and not last:
                    return out
                self._open, self._held, self._quiet = False, after, True
                out.append(self._read(before))
                continue
            before, tag, after = self._held.partition(_OPEN)
            if tag and (self._parallel or self.count == 0):
                self._open, self._held = True, after
            else:
                held = 0 if last else _doubtful(self._held)
                before, self._held = self._held[: len(self._held) - held], self._held[len(self._held) - held :]
            if before.strip() or (before and not self._quiet):
                self._quiet = False
                out.append({"content": before})
            elif before and not tag:
                # Blanks before and between calls are no content; whether these are is not known yet.
                if not last:
                    self._held = before + self._held
                elif not self.count:
                    out.append({"content": before})
            if not self._open:
                return out

    def _read(self, inside: str) -> dict[str, Any]:
        """A call between tags; what is none stays content."""
        try:
            said = json.loads(inside)
            arguments = said.get("arguments", said.get("parameters", {}))
            shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            return self._began(str(said["name"]), shown)
        except (ValueError, KeyError, AttributeError, RecursionError):
            return {"content": f"{_OPEN}{inside}{_CLOSE}"}


def _doubtful(text: str) -> int:
    """How many of the last characters may begin a tag."""
    return max((size for size in range(1, len(_OPEN)) if text.endswith(_OPEN[:size])), default=0)
