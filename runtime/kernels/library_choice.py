"""Which implementation runs a layer on a GPU: what was measured there, as data, and what may be named instead.

`choices.json` holds the measurements, per GPU generation, scheme and rows of one product. Where it says nothing,
Triton's kernels run. **It is empty: nothing has been measured yet, for no GPU was at hand.** What was measured on one
generation says nothing of another, so only entries of the GPU's own compute capability count. `python -m runtime.bench
gpu kernels --choices FILE` writes a file of this form.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from runtime.errors import UserError

Capability = tuple[int, int]


@dataclass(frozen=True)
class Implementation:
    """A library's product that can stand in for Triton's.

    schemes     of the weights that it takes; least: the compute capability that it needs.
    exact       its results have the reference's bits, whatever the rows: integer sums, scaled in the reference's order.
    inputs      what it makes of the float32 inputs.
    coarser     that is less than the scheme promises: never unasked, whatever its bits do.
    """

    schemes: tuple[str, ...]
    least: Capability
    exact: bool
    inputs: str
    coarser: bool = False


IMPLEMENTATIONS: dict[str, Implementation] = {
    "torch-int-mm": Implementation(("int8",), (8, 0), True, "int8 per token or static, as the reference"),
    "torch-int4": Implementation(("int4",), (8, 0), False, "bfloat16"),
    "torch-scaled-mm": Implementation(("fp8",), (8, 9), False, "fp8 (E4M3) per token", coarser=True),
    "torch": Implementation(("bf16", "fp16", "f32"), (8, 0), False, "the weight's type"),
    "bitsandbytes": Implementation(("nf4", "int8"), (8, 0), False, "bfloat16 (nf4), int8 per token (int8)"),
}


@dataclass(frozen=True)
class Choice:
    """One entry: on GPUs of `capability`, products of `first_row` to `last_row` rows run on `implementation`.

    The same rows may have one entry that keeps its bits and one that does not, which is for those who asked for speed.

    last_row     None: without end.
    same_bits    as measured, a row's bits did not change with the rows beside it, at widths 1 to 16 and some more, nor
                 would they where Triton's kernels run the other rows.
    over_triton  Triton's time over this one's, as measured; None where the entry is a user's wish.
    measured_on  GPU and versions of what measured it.
    """

    capability: Capability | None
    scheme: str
    first_row: int
    last_row: int | None
    implementation: str
    same_bits: bool
    over_triton: float | None = None
    measured_on: str = ""

    def holds(self, rows: int) -> bool:
        """Whether so many rows are its."""
        return self.first_row <= rows and (self.last_row is None or rows <= self.last_row)


def wanted(name: str) -> tuple[Choice, ...]:
    """Entries for a user who asks for an implementation by its name: all that it takes, at all rows."""
    about = IMPLEMENTATIONS[name]
    return tuple(Choice(None, scheme, 1, None, name, about.exact) for scheme in about.schemes)


def packaged() -> tuple[Choice, ...]:
    """The measurements that come with Specpress. Raises UserError where the file is damaged."""
    text = files("runtime.kernels").joinpath("choices.json").read_text(encoding="utf-8")
    return parse(text, "choices.json")


def parse(text: str, name: str) -> tuple[Choice, ...]:
    """The entries of a file's text; `name` is said in errors.

    Raises UserError for what is no list of entries, unknown keys, implementations and schemes, a capability that the
    implementation does not run on, and entries whose rows overlap.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"{name} is no JSON ({error}); write it with `python -m runtime.bench gpu kernels`") from error
    if not isinstance(found, list):
        raise UserError(f"{name} must be a list of entries, found {type(found).__name__}")
    choices = tuple(_entry(entry, f"{name}, entry {number}") for number, entry in enumerate(found, 1))
    for number, one in enumerate(choices, 1):
        for other in choices[: number - 1]:
            same = (one.capability, one.scheme, one.same_bits) == (other.capability, other.scheme, other.same_bits)
            if same and (other.holds(one.first_row) or one.holds(other.first_row)):
                raise UserError(
                    f"{name}, entry {number}: rows from {one.first_row} of {one.scheme} are those of an entry before"
                    " it; leave one of the two"
                )
    return choices


def shown(choices: Sequence[Choice]) -> str:
    """The file's text of entries: one a line, which `parse` reads."""
    lines = []
    for choice in choices:
        values = asdict(choice)
        values["capability"] = ".".join(map(str, choice.capability or ()))
        lines.append("  " + json.dumps(values))
    return "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"


def counting(table: Sequence[Choice], capability: Capability | None, exact: bool) -> tuple[Choice, ...]:
    """The entries for a device of this capability (None: no GPU) whose library is installed.

    exact  only those that kept their bits and round inputs no more than the scheme says.
    """
    return tuple(
        one
        for one in table
        if one.capability == capability
        and (one.implementation != "bitsandbytes" or find_spec("bitsandbytes") is not None)
        and (not exact or (one.same_bits and not IMPLEMENTATIONS[one.implementation].coarser))
    )


def _entry(entry: Any, where: str) -> Choice:
    keys = {field.name for field in fields(Choice)}
    if not isinstance(entry, dict) or set(entry) != keys:
        found = ", ".join(sorted(map(str, entry))) if isinstance(entry, dict) else type(entry).__name__
        raise UserError(f"{where} must have the keys {', '.join(sorted(keys))}, found {found}")
    name, scheme = entry["implementation"], entry["scheme"]
    if name not in IMPLEMENTATIONS:
        raise UserError(f"{where}: implementation {name!r} is unknown; use one of {', '.join(IMPLEMENTATIONS)}")
    about = IMPLEMENTATIONS[name]
    if scheme not in about.schemes:
        raise UserError(f"{where}: {name} runs {', '.join(about.schemes)}, found scheme {scheme!r}")
    capability = _capability(entry["capability"], where)
    if capability < about.least:
        raise UserError(f"{where}: {name} needs compute capability {_dotted(about.least)}, found {_dotted(capability)}")
    first, last = entry["first_row"], entry["last_row"]
    whole = type(first) is int and first >= 1 and (last is None or (type(last) is int and last >= first))
    if not whole:
        raise UserError(f"{where}: expected rows from 1 up to some number or null, found {first!r} to {last!r}")
    if not isinstance(entry["same_bits"], bool):
        raise UserError(f"{where}: same_bits must be true or false, found {entry['same_bits']!r}")
    gain, device = entry["over_triton"], entry["measured_on"]
    if isinstance(gain, bool) or not isinstance(gain, int | float) or not gain > 0 or not (device and str(device)):
        raise UserError(
            f"{where}: over_triton and measured_on must say what was measured where, found {gain!r}, {device!r}"
        )
    return Choice(**(entry | {"capability": capability}))


def _capability(value: Any, where: str) -> Capability:
    parts = value.split(".") if isinstance(value, str) else []
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise UserError(f"{where}: expected a compute capability as '9.0', found {value!r}")
    return int(parts[0]), int(parts[1])


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))
