"""What `bench gpu kernels` measured as a table of choices: the entries of runtime/kernels/choices.json."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from runtime.kernels.choices import IMPLEMENTATIONS, Capability, Choice

# A library must be so much quicker: less is within the noise of such medians.
_MARGIN = 1.03
_Rows = Sequence[Mapping[str, Any]]


def winners(rows: _Rows, capability: Capability, measured_on: str) -> list[Choice]:
    """The entries that `kernels`' rows (`time_layers`, each with its shape) justify; none where Triton is quickest.

    Times are summed over all layers of all shapes, so an implementation must have run each of them. A width that was
    timed stands for the numbers of rows after the width before it, and the widest for all after it. Where the quickest
    does not keep its bits, the quickest that does has an entry for the same rows: `auto` takes that one.
    """
    found: list[Choice] = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        mine = [row for row in rows if row["scheme"] == scheme]
        same = {
            name: all(row["same_bits"] is True for row in mine if row["implementation"] == name)
            for name in IMPLEMENTATIONS
        }
        kept = {name for name, about in IMPLEMENTATIONS.items() if about.exact and same[name]}
        spans = _spans(mine, set(IMPLEMENTATIONS))
        # A library that has bits of its own keeps them only where it runs all rows.
        alone = [one for one in spans if one.first == 1 and one.last is None and same[one.name]]
        free = [one for one in spans if one not in alone and one.name not in kept]
        exact = alone or _spans(mine, kept)
        found += [
            Choice(capability, scheme, one.first, one.last, one.name, bits, round(one.gain, 3), measured_on)
            for bits, several in ((True, exact), (False, free))
            for one in several
        ]
    return found


@dataclass(frozen=True)
class _Span:
    """Rows, whose they are, and Triton's time over its."""

    first: int
    last: int | None
    name: str
    gain: float


def _spans(rows: _Rows, names: Set[str]) -> list[_Span]:
    """The quickest of some libraries by rows, where it is quicker than Triton."""
    widths = sorted({row["width"] for row in rows})
    spans: list[_Span] = []
    for number, width in enumerate(widths):
        name, gain = _quickest(rows, width, names)
        first = widths[number - 1] + 1 if number else 1
        last = width if number + 1 < len(widths) else None
        if name is None:
            continue
        if spans and spans[-1].last == first - 1 and spans[-1].name == name:
            before = spans.pop()
            # Of several widths the least gain.
            first, gain = before.first, min(gain, before.gain)
        spans.append(_Span(first, last, name, gain))
    return spans


def _quickest(rows: _Rows, width: int, names: Set[str]) -> tuple[str | None, float]:
    """The quickest library at a width and Triton's time over its; None where that is too little."""
    times: dict[str | None, dict[tuple[str, str], float]] = {}
    for row in rows:
        if row["width"] == width:
            times.setdefault(row["implementation"], {})[row["shape"], row["layer"]] = row["ms_median"]
    ours = times.pop(None, {})
    totals = {name: sum(taken.values()) for name, taken in times.items() if name in names and set(taken) == set(ours)}
    if not totals:
        return None, 1.0
    name = min(totals, key=lambda one: totals[one])
    gain = sum(ours.values()) / totals[name]
    return (name, gain) if gain >= _MARGIN else (None, gain)
