"""What a text can be asked to keep to: a JSON schema, any JSON object, a regular expression, choices, a Lark grammar.

grammar.py makes of it what sampling needs. Here it is only looked at: its size, and what a grammar cannot hold.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from runtime.errors import UserError
from runtime.sampling.json_schema import checked_schema

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark"]
Whitespace = Literal["compact", "pretty"]
MAX_BYTES: Mapping[Kind, int] = {
    "json_schema": 256_000,
    "json_object": 16,
    "regex": 16_000,
    "choice": 128_000,
    "lark": 64_000,
}
# Attributes of a rule in llguidance's Lark that a mask does not follow, and a rule's name.
_ATTRIBUTE = re.compile(r"\b(temperature|max_tokens)\s{0,99}=")
_RULE = re.compile(r"\s*\w+")


@dataclass(frozen=True)
class Structure:
    """What a text must keep to; made by the functions named as the kinds, which check it.

    text        as JSON of a schema or of a list of texts, a regular expression for the whole text (Rust's regex syntax:
                no look-around, no back-references), or a grammar in llguidance's Lark.
    whitespace  of JSON: "compact" has none, "pretty" lets up to 8 characters of it stand between any two tokens.

    Raises UserError for an unknown kind or whitespace, and for a text over MAX_BYTES[kind].
    """

    kind: Kind
    text: str = ""
    whitespace: Whitespace = "compact"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UserError(f"the kind of structure must be one of {', '.join(get_args(Kind))}, not {self.kind!r}.")
        if self.whitespace not in get_args(Whitespace):
            raise UserError(f"whitespace must be compact or pretty, but is {self.whitespace!r}; choose one of them.")
        most = MAX_BYTES[self.kind]
        try:
            size = len(self.text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise UserError(f"the {self.kind} holds half of a surrogate pair, which is no character.") from error
        if size > most:
            raise UserError(f"the {self.kind} takes {size} bytes, and at most {most} are allowed; make it smaller.")

    @staticmethod
    def json_schema(schema: Any, whitespace: Whitespace = "compact") -> "Structure":
        """JSON that a schema (as Python has it: dict or bool) allows; its properties come in the schema's order.

        Raises UserError naming the first keyword that a grammar cannot hold.
        """
        try:
            # As it is given first, for its size: looking at every keyword of a large one takes long.
            Structure("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False), whitespace)
            text = json.dumps(checked_schema(schema), ensure_ascii=False, allow_nan=False)
        except ValueError as error:
            raise UserError("the JSON schema holds NaN or an infinity, which JSON does not know.") from error
        except (TypeError, RecursionError) as error:
            raise UserError(
                "the JSON schema must be JSON: objects, lists, texts, numbers, true, false, null."
            ) from error
        return Structure("json_schema", text, whitespace)

    @staticmethod
    def json_object(whitespace: Whitespace = "compact") -> "Structure":
        """Any JSON object."""
        return Structure("json_object", "", whitespace)

    @staticmethod
    def regex(pattern: str) -> "Structure":
        """A text that a regular expression matches as a whole."""
        if not pattern:
            raise UserError("the regex is empty, so that no text could be written; give one.")
        return Structure("regex", pattern)

    @staticmethod
    def choice(choices: Sequence[str]) -> "Structure":
        """One of several texts."""
        given = list(choices)
        if isinstance(choices, str) or not given or not all(isinstance(one, str) and one for one in given):
            raise UserError("choice must be a list of at least one text, none of them empty.")
        return Structure("choice", json.dumps(given, ensure_ascii=False))

    @staticmethod
    def lark(grammar: str) -> "Structure":
        """A grammar in llguidance's Lark; JSON schemas within it (%json) are held to the same rules.

        Raises UserError naming what a mask would not follow.
        """
        made = Structure("lark", grammar)  # whose size is looked at first: what follows takes longer for longer ones
        if (found := _attribute(grammar)) is not None:
            raise UserError(f"the grammar gives a rule {found}, which cannot be enforced; leave it out.")
        parts, done = [], 0
        for start in re.finditer(r"%json\b\s*", grammar):
            if start.start() < done:
                continue  # within a schema
            parts.append(grammar[done : start.end()])
            try:
                schema, done = json.JSONDecoder().raw_decode(grammar, start.end())
            except (ValueError, RecursionError) as error:
                raise UserError("what follows %json in the grammar must be a JSON schema, and is no JSON.") from error
            parts.append(json.dumps(checked_schema(schema), ensure_ascii=False))
        return Structure("lark", "".join([*parts, grammar[done:]])) if done else made


def _attribute(grammar: str) -> str | None:
    """The first attribute of a rule that cannot be enforced."""
    for found in _ATTRIBUTE.finditer(grammar):
        start = grammar.rfind("[", 0, found.start())
        if start > grammar.rfind("]", 0, found.start()):
            before = grammar[:start].rstrip()
            if _RULE.fullmatch(before, before.rfind("\n") + 1):
                return found[1]
    return None
