"""From the bytes of a request to the fields that its endpoint knows, or to a sentence that says what is wrong."""

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from runtime.serve.errors import ApiError, invalid

Model = TypeVar("Model", bound=BaseModel)

DEEPEST = 400  # lists and objects in one another
_FORMS = ("str", "constrained-str", "bool", "NamedTool", "ResponseToolChoice")
SHOWN = 80  # characters of what was found, in a sentence


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises ApiError for what is no UTF-8, no JSON, no object, nested too deeply, or holds NaN or Infinity.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: byte {error.start} cannot be decoded") from None
    try:
        found = json.loads(text, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise invalid(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise invalid(f"the body nests lists and objects more than {DEEPEST} deep") from None
    except ValueError:
        raise invalid("the body holds a number of more than 4,300 digits") from None
    if not isinstance(found, dict):
        raise invalid('the body must be a JSON object, such as {"prompt": "Hello"}')
    if text.count("[") + text.count("{") > DEEPEST and _depth(found) > DEEPEST:
        raise invalid(f"the body nests lists and objects more than {DEEPEST} deep")
    return found


def read(kind: type[Model], data: bytes, lenient: bool) -> Model:
    """The body as an endpoint's request.

    lenient  ignore fields that the endpoint does not know; otherwise they are named.

    Raises ApiError.
    """
    found = parse(data)
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
    unknown = [one["loc"] for one in wrong if one["type"] == "extra_forbidden"]
    if unknown and lenient:
        for place in unknown:
            _remove(found, place)
        try:
            return kind.model_validate(found)
        except ValidationError as error:
            wrong = error.errors(include_url=False)
            unknown = []
    if unknown:
        names = sorted({_name(place) for place in unknown})
        are = "is no field" if len(names) == 1 else "are no fields"
        raise invalid(
            f"{', '.join(names)[:500]} {are} of this endpoint: leave out what it does not know", names[0][:200]
        )
    raise _sentence(wrong)


def _no_number(name: str) -> Any:
    raise invalid(f"the body holds {name}, which is no JSON: give a finite number")


def _depth(value: Any) -> int:
    """How deep lists and objects stand in one another, without recursion."""
    deepest, left = 0, [(value, 1)]
    while left:
        one, depth = left.pop()
        deepest = max(deepest, depth)
        inner = one.values() if isinstance(one, dict) else one
        left += [(part, depth + 1) for part in inner if isinstance(part, dict | list)]
    return deepest


def _remove(found: Any, place: tuple[int | str, ...]) -> None:
    """Takes out the value at a place; steps of it that name no key (the kind of a union) are passed over."""
    for step in place[:-1]:
        if (isinstance(found, dict) and step in found) or (isinstance(found, list) and isinstance(step, int)):
            found = found[step]  # type: ignore[index]
    if isinstance(found, dict):
        found.pop(place[-1], None)


def _name(place: tuple[int | str, ...]) -> str:
    """A place as a client would write it: without pydantic's steps that say which form of a field was tried."""
    inner = [step for step in place if isinstance(step, int) or not (step in _FORMS or "[" in step)]
    return ".".join(map(str, inner))


def _sentence(wrong: list[Any]) -> ApiError:
    """What is wrong with the field that the most telling of pydantic's errors is about."""
    one = max(wrong, key=lambda error: (error["type"] != "missing" or len(wrong) == 1, len(error["loc"])))
    place, said = one["loc"], one["msg"]
    param = str(place[0])[:200] if place else None
    if one["type"] == "missing":
        return invalid(f"{_name(place)} is missing: the request needs it", param)
    if one["type"] == "value_error":
        return invalid(said.removeprefix("Value error, "), param)
    if one["type"] == "string_unicode":
        where = f" in {_name(place)}" if _name(place).isascii() and place else ""
        return invalid(f"a text{where} holds half a character (a lone surrogate), which is no Unicode", param)
    found = repr(one["input"]) if isinstance(one["input"], str | int | float | bool | None) else ""
    found = found.encode("ascii", "backslashreplace").decode()
    shown = f", found {found[:SHOWN]}" if found else ""
    same = [error for error in wrong if error["loc"][:1] == place[:1]]
    if len(same) > 1 and len({error["loc"] for error in same}) > 1:
        # A field of several forms, none of which fits: what the nearest one lacks, and the others in short.
        name, said = str(place[0]), f"none of the accepted types fits ({_name(place)}: {said[:1].lower()}{said[1:]})"
    else:
        name = _name(place)
    return invalid(f"{name[:200]}: {said[:1].lower()}{said[1:]}{shown}", param)
