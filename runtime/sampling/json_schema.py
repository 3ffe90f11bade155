"""Which JSON schemas a grammar can hold: every keyword is one that is enforced or only describes, or it is refused.

A grammar compiler passes over keywords that it does not know; a text that breaks them would look as if it kept to them.
The keywords are those of drafts 6 to 2020-12.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from runtime.errors import UserError

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
MAX_DEPTH = 50
# They say nothing of which values are valid.
_DESCRIPTIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
_DIALECT = re.compile(r"https?://json-schema\.org/(draft/2020-12|draft/2019-09|draft-07|draft-06)/schema#?")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _type(value: Any) -> bool:
    return value in TYPES if _text(value) else _list(value) and all(one in TYPES for one in value)


def _list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


_WHOLE: tuple[Callable[[Any], bool], str] = (_whole, "a whole number of at least 0")
_NUMBER: tuple[Callable[[Any], bool], str] = (_number, "a number")
# What a keyword's value must be. Subschemas are looked at by themselves.
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_type, f"one of {', '.join(TYPES)}, or a list of these"),
    "enum": (_list, "a list of at least one value"),
    "const": (lambda value: True, "a value"),
    "required": (_names, "a list of texts"),
    "minProperties": _WHOLE,
    "maxProperties": _WHOLE,
    "minItems": _WHOLE,
    "maxItems": _WHOLE,
    "minLength": _WHOLE,
    "maxLength": _WHOLE,
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _NUMBER,
    "exclusiveMaximum": _NUMBER,
    "multipleOf": (lambda value: _number(value) and value > 0, "a number above 0"),
    "pattern": (_text, "a regular expression"),
    "format": (lambda value: _text(value) and value in FORMATS, f"one of {', '.join(FORMATS)}"),
    "uniqueItems": (lambda value: value is False, "false, as a grammar cannot tell items apart"),
    "$ref": (lambda value: _text(value) and value.startswith("#"), "a reference within the schema, from # on"),
    "$schema": (lambda value: _text(value) and _DIALECT.fullmatch(value) is not None, "draft 6 or a later one"),
    "$id": (_text, "a text"),
    "discriminator": (lambda value: isinstance(value, dict), "an object"),
}
# Keywords whose values are schemas: one, a list, or an object of them.
_ONE = frozenset({"additionalProperties", "additionalItems"})
_SOME = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def checked_schema(schema: Any) -> Any:
    """The schema as the compiler is to have it. Raises UserError naming the first keyword that no grammar can hold."""
    seen: set[str] = set()
    references: list[tuple[str, str]] = []
    out = _checked(schema, "#", 0, seen, references)
    for place, reference in references:
        if reference.rstrip("/") not in seen:
            raise refused(place, "$ref", f"{reference} is no schema of this one that may be referred to")
    return out


def refused(place: str, keyword: str, why: str) -> UserError:
    """What to raise for a keyword of a schema."""
    return UserError(f"the JSON schema's keyword {keyword} (at {place}) cannot be held to: {why}; leave it out.")


def _checked(schema: Any, place: str, depth: int, seen: set[str], references: list[tuple[str, str]]) -> Any:
    seen.add(place)
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise UserError(f"a JSON schema must be an object, true or false, but is {str(schema)[:40]!r} at {place}.")
    if depth > MAX_DEPTH:
        raise UserError(f"a JSON schema may be nested at most {MAX_DEPTH} deep, and is deeper at {place[:60]}…")
    out: dict[str, Any] = {}

    def below(value: Any, *path: str) -> Any:
        inner = "/".join([place, *(part.replace("~", "~0").replace("/", "~1") for part in path)])
        return _checked(value, inner, depth + 1, seen, references)

    for keyword, value in schema.items():
        if keyword in _DESCRIPTIONS:
            continue
        if keyword in _ONE or (keyword == "items" and not isinstance(value, list)):
            out[keyword] = below(value, keyword)
        elif keyword in _SOME or keyword == "items":
            if not _list(value):
                raise refused(place, keyword, "it must be a list of at least one schema")
            out[keyword] = [below(one, keyword, str(i)) for i, one in enumerate(value)]
        elif keyword in _NAMED:
            if not isinstance(value, dict):
                raise refused(place, keyword, "it must be an object of schemas")
            out[keyword] = {name: below(one, keyword, name) for name, one in value.items()}
        elif keyword not in _VALUES:
            raise refused(place, keyword, "a grammar does not know it")
        else:
            holds, expected = _VALUES[keyword]
            if not holds(value):
                raise refused(place, keyword, f"it must be {expected}, but is {str(value)[:60]!r}")
            if keyword == "$id" and place != "#":
                raise refused(place, keyword, "only the whole schema may have one")
            if keyword == "discriminator" and not {"oneOf", "anyOf"} & schema.keys():
                raise refused(place, keyword, "it means something beside oneOf or anyOf only")
            if keyword == "$ref":
                references.append((place, value))
            if keyword not in ("$id", "$schema", "discriminator", "uniqueItems"):
                out[keyword] = value
    return out
