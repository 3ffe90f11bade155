"""What is wrong with a recipe, in one sentence with the nearest name that is right."""

import difflib
import re
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

# Keys and values that the format reserves and this version cannot do yet.
NOT_BUILT = {
    "draft": "drafts are made by a stage: write the key under stages, or name a draft with --draft",
}
_SCHEMES_NOT_BUILT = ("nested",)
# Our own validators put the key that they speak of in front.
_KEYED = re.compile(
    r"(scheme|group_size|symmetric|method|order|damping|search|bits_per_weight|head|sparsity|pattern|share|"
    r"kl|minutes|joint): "
)

Fields = Callable[[tuple[int | str, ...]], list[str]]


def sentence(error: ValidationError, fields: Fields) -> str:
    """The first thing that is wrong, unknown keys first: a misspelt key also shows up as a missing one.

    fields  gives the keys that the mapping at a location may have.
    """
    problems = sorted(error.errors(include_url=False), key=lambda p: p["type"] != "extra_forbidden")
    first: Any = problems[0]
    location = first["loc"]
    key = ".".join(map(str, location))
    found = first["input"]
    shown = repr(found) if len(repr(found)) <= 60 else repr(found)[:57] + "..."
    kind = first["type"]
    if kind == "extra_forbidden":
        return _unknown(key, location, fields)
    if kind == "missing":
        return f"{key}: expected this key, found none: add it"
    if kind == "literal_error":
        return _not_allowed(key, found, shown, str(first["ctx"]["expected"]).replace("'", ""))
    if kind == "value_error":
        message = str(first["ctx"]["error"])
        join = "" if not key else "." if _KEYED.match(message) else ": "
        return f"{key}{join}{message}{'' if 'found' in message else f', found {shown}'}: correct it"
    if kind == "model_type":
        return f"{key}: expected a mapping, found {shown}: correct it"
    message = (
        first["msg"]
        .replace("Input should be", "expected", 1)
        .replace("a valid integer", "a whole number")
        .replace("a valid ", "a ")
    )
    return f"{key}: {message}, found {shown}: correct it"


def _unknown(key: str, location: tuple[int | str, ...], fields: Fields) -> str:
    last = str(location[-1])
    allowed = fields(location[:-1])
    near = difflib.get_close_matches(last, allowed, n=1)
    hint = f"did you mean {near[0]}?" if near else "remove it"
    return f"{key}: unknown key, expected one of {', '.join(allowed)}: {hint}"


def _not_allowed(key: str, found: Any, shown: str, expected: str) -> str:
    if found in _SCHEMES_NOT_BUILT:
        return f"{key}: {found} is not built yet, expected {expected}: change it"
    near = difflib.get_close_matches(str(found), re.split(", | or ", expected), n=1)
    return f"{key}: expected {expected}, found {shown}: " + (f"did you mean {near[0]}?" if near else "change it")
