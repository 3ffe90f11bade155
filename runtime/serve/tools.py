"""Calls of functions: the grammar that they are held to, and calls found in what a model writes."""

import json
import re
import secrets
from typing import Any

from runtime.errors import UserError
from runtime.serve.chat_protocol import ChatRequest, Function, NamedTool
from runtime.serve.errors import ApiError, invalid
from runtime.serve.plan import Structured, made_structure
from runtime.serve.vocabulary import Vocabulary

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ANY = {"type": "object"}
_BLANKS = "[ \\n]{1,8}"
# Keywords of which only the compiler knows whether it can hold them, and the longest schema of a function, where any
# object will do instead.
_DOUBTFUL = ("oneOf", "pattern", "patternProperties", "minProperties", "maxProperties")
_LONGEST = 8000
_MOST = 40_000  # characters of all together
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*')


def held(request: ChatRequest, vocabulary: Vocabulary) -> Structured | None:
    """The grammar of the calls that a text may or must make; None where nothing is held to. Raises ApiError.

    With `tool_choice` `auto`, texts are held to it from `<tool_call>` on, where the chat template writes calls so, and
    the tag is text (a special token would never be part of it). What stands before is free.
    """
    choice = request.tool_choice
    if not request.tools or choice == "none":
        return None
    if isinstance(choice, NamedTool):
        named = [tool.function for tool in request.tools if tool.function.name == choice.function.name]
        if not named:
            raise invalid(f"tool_choice names {choice.function.name!r}, which is none of the tools", "tool_choice")
        return made_structure("json_schema", named[0].parameters or _ANY)
    functions = [tool.function for tool in request.tools]
    if choice == "required":
        return _lark(_grammar(functions, "start: call", compact=True))
    tagged = _OPEN in str(vocabulary.tokenizer.chat_template) and _OPEN not in vocabulary.special
    form = request.response_format is not None and request.response_format.type != "text"
    if not tagged or form or request.structured_outputs is not None:
        return None
    more = "?" if request.parallel_tool_calls is False else "*"
    # Lazy: it ends with the first tag. The rest of a text has none.
    start = (
        f'start: (free_then_tag _b call _b "{_CLOSE}"){more} REST\n'
        f"free_then_tag[lazy]: /(.|\\n)*{_OPEN}/\n"
        f"REST: /(.|\\n)*/ & ~/(.|\\n)*{_OPEN}(.|\\n)*/"
    )
    grammar = _grammar(functions, start)
    return _lark(grammar if len(grammar) < _MOST else _grammar(functions, start, longest=0))


def _lark(grammar: str) -> Structured:
    """A grammar of ours, whose schemas have been looked at."""
    from runtime.sampling.structure import Structure

    try:
        made = Structure("lark", grammar)
    except UserError as error:
        raise invalid(f"tools: {error}", "tools") from None
    return made.kind, made.text, made.whitespace


def _grammar(functions: list[Function], start: str, compact: bool = False, longest: int = _LONGEST) -> str:
    """Lark of calls: {"name": …, "arguments": …}, each with arguments by its own schema.

    compact  without blanks, and every schema is held to; otherwise see `_arguments` for `longest`.
    """
    blank = "" if compact else " _b "
    options: dict[str, Any] = {"whitespace_flexible": False}
    rules = [start, "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    if not compact:
        options = {"whitespace_flexible": True, "whitespace_pattern": _BLANKS}
        rules.append(f"_b: /{_BLANKS}/?")
    for i, function in enumerate(functions):
        parts = ["{", '"name"', ":", json.dumps(function.name), ",", '"arguments"', ":"]
        text = (blank or " ").join(map(json.dumps, parts))
        schema = _arguments(function, None if compact or function.strict else longest) | {"x-guidance": options}
        rules.append(f'call_{i}: {text} {blank} arguments_{i} {blank} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps(schema, ensure_ascii=False)}")
    return "\n".join(rules)


def _arguments(function: Function, longest: int | None) -> dict[str, Any]:
    """The schema of a function's arguments as the compiler is to have it.

    longest  None: it has to be held to. Otherwise any object will do where it is longer, or where no grammar holds it,
             or perhaps none.
    """
    try:
        _, text, _ = made_structure("json_schema", function.parameters or _ANY)
    except ApiError:
        if longest is None:
            raise
        return _ANY
    doubtful = longest is not None and (len(text) > longest or any(f'"{word}"' in text for word in _DOUBTFUL))
    schema: dict[str, Any] = _ANY if doubtful else json.loads(text)
    return schema


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
