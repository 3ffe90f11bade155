"""Which JSON schemas a grammar can hold: every keyword is one that is enforced or only describes, or it is refused.

A grammar compiler passes over keywords that it does not know; a text that breaks them would look as if it kept to them.
And it reads numbers and dates as they are written, validators as what Python makes of them: where the two differ, the
compiler gets a narrower schema. The keywords are those of drafts 6 to 2020-12.
"""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any
from urllib.parse import quote, unquote

from runtime.errors import UserError

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
MAX_DEPTH = 50
# Of a schema in a schema: the keys that lead to it.
Place = tuple[str, ...]
_SHOWN = 200  # characters of a place or a name, in a sentence
# They say nothing of which values are valid.
_DESCRIPTIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
# What the compiler lets through and validators do not: the year 0, 29 February of any year, leap seconds, hosts' names
# that are too long.
_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
_LEAP = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"(?:{_YEAR}-(?:0[13-9]|1[0-2])-\d\d|{_YEAR}-02-(?:[01]\d|2[0-8])|{_LEAP}-02-29)"
_TIME = r"\d\d:\d\d:[0-5]"
_NARROWER: Mapping[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}"},
    "time": {"pattern": f"^{_TIME}"},
    "date-time": {"pattern": f"^{_DATE}[Tt]{_TIME}"},
    "hostname": {"maxLength": 253},
}
# 0.99…9 is read as 1: numbers stay this far from a bound that they must not reach, and from one above 1 by this share.
_CLEAR = 1e-9
_DIALECT = re.compile(r"https?://json-schema\.org/(draft/2020-12|draft/2019-09|draft-07|draft-06)/schema#?")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -(2**63) < value < 2**63


def _step(value: Any) -> bool:
    """Whether multiples are still multiples once they are floats: those of 0.01, 0.07 among them, are not."""
    return _number(value) and value > 0 and (isinstance(value, int) or Fraction(repr(value)) == Fraction(value))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _type(value: Any) -> bool:
    return value in TYPES if _text(value) else _list(value) and all(one in TYPES for one in value)


def _list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


_WHOLE: tuple[Callable[[Any], bool], str] = (_whole, "a whole number of at least 0")
_NUMBER: tuple[Callable[[Any], bool], str] = (_number, "a number that 64 bits hold")
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
    "multipleOf": (_step, "a number above 0 that floats can hold, as 5 or 0.25"),
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
    seen: set[Place] = set()
    references: list[tuple[Place, dict[str, Any]]] = []
    out = _checked(schema, (), 0, seen, references)
    for place, referring in references:
        # Often written as it reads, though it is a URI's part; the compiler wants the URI's spelling.
        reference: str = referring["$ref"]
        pointers = [_pointer(unquote(reference)), _pointer(reference)]
        named = next((one for one in pointers if one in seen), None)
        if named is None:
            why = f"{reference[:_SHOWN]} is no schema of this one that may be referred to"
            raise refused(place, "$ref", why)
        referring["$ref"] = "#" + quote("".join(f"/{_escaped(part)}" for part in named), safe="/~!$&'()*+,;=:@")
    return out


def refused(place: Place, keyword: str, why: str) -> UserError:
    """What to raise for a keyword of a schema."""
    return UserError(
        f"the JSON schema's keyword {keyword[:_SHOWN]} (at {_shown(place)}) cannot be enforced: {why}; leave it out."
    )


def _pointer(reference: str) -> Place | None:
    """The place that `#/…` names; None for an anchor."""
    inner = reference[1:].rstrip("/")
    if inner and not inner.startswith("/"):
        return None
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in inner.split("/")[1:])


def _escaped(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")


def _shown(place: Place) -> str:
    return "/".join(["#", *(_escaped(part[:_SHOWN]) for part in place)])[:_SHOWN]


def _checked(
    schema: Any, place: Place, depth: int, seen: set[Place], references: list[tuple[Place, dict[str, Any]]]
) -> Any:
    seen.add(place)
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise UserError(
            f"a JSON schema must be an object, true or false, but is {str(schema)[:40]!r} at {_shown(place)}."
        )
    if depth > MAX_DEPTH:
        raise UserError(f"a JSON schema may be nested at most {MAX_DEPTH} deep, and is deeper at {_shown(place)[:60]}…")
    out: dict[str, Any] = {}

    def below(value: Any, *path: str) -> Any:
        return _checked(value, (*place, *path), depth + 1, seen, references)

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
            if keyword == "$id" and place:
                raise refused(place, keyword, "only the whole schema may have one")
            if keyword == "discriminator" and not {"oneOf", "anyOf"} & schema.keys():
                raise refused(place, keyword, "it means something beside oneOf or anyOf only")
            if keyword == "$ref":
                references.append((place, out))
            if keyword not in ("$id", "$schema", "discriminator", "uniqueItems"):
                out[keyword] = value
    return _narrowed(out, place)


def _narrowed(schema: dict[str, Any], place: Place) -> dict[str, Any]:
    """The schema without what the compiler lets through, and validators do not."""
    least = schema.get("minProperties", 0)
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if not closed and least > len(set(schema.get("required", ()))) + 1:
        # {"a": 1, "a": 2} has one property.
        raise refused(place, "minProperties", "a grammar cannot tell whether a name was there before")
    if "number" in schema.get("type", ("number",)):
        for keyword, inclusive, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
            if keyword in schema:
                bound = schema.pop(keyword)
                bound += sign * _CLEAR * max(1, abs(bound))
                known = schema.get(inclusive, bound)
                schema[inclusive] = max(bound, known) if sign > 0 else min(bound, known)
    if (more := _NARROWER.get(schema.get("format", ""))) is not None:
        schema["allOf"] = [*schema.get("allOf", ()), dict(more)]
    return schema
