"""Layers of a shape on each implementation that could run them: ours, and the libraries' (kernels/libraries.py).

All are made as a decoder makes them, float32 in and out, on equal weights: what is timed is what would be gained.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from runtime.bench.layers import Layer, layers
from runtime.bench.measure import Bench, Place, Row, row
from runtime.bench.random_models import random_weight
from runtime.errors import UserError
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight
from runtime.kernels.dispatch import NAMES, Kernel, choose, linear
from runtime.kernels.library_choice import IMPLEMENTATIONS, Capability, Choice, wanted

# A pass reads at least so many bytes, beyond every GPU's caches, so that each weight comes from memory.
_PASS_BYTES = 1 << 28
# Rounding errors lie far below, layouts that a device's kernel does not take far above.
_WRONG = 0.1
# A library must be so much quicker: less is within the noise of such medians.
_MARGIN = 1.03


def time_layers(bench: Bench, shape: str, schemes: Sequence[str], widths: Sequence[int]) -> list[Row]:
    """A row for each layer, engine and width of a shape.

    A row's time is that of one product, the mean of a pass over copies of the layer that together exceed the caches,
    in one CUDA graph where it can be captured ("eager" where not), so that no launch from the host is counted.
    relative_error is ‖y − ŷ‖ / ‖ŷ‖ against the float64 product of the dequantised weight: a wrong layout would show.
    same_bits: whether a row's bits were the same at all widths that are tried (with_libraries.keeps_bits).
    implementation: as library_choice.py has it; None: our own kernels. Raises UserError for unusable kernels of ours.
    """
    found: list[Row] = []
    place = bench.place
    # Ours alone: what a table of choices says is what is to be measured.
    ours = choose(bench.kernels, str(place.device), table=())
    for scheme in dict.fromkeys(schemes):
        libraries = [name for name, about in IMPLEMENTATIONS.items() if scheme in about.schemes]
        for layer in layers(shape, scheme, "keep")[:-1]:
            tasks: dict[tuple[str, int], Callable[[], float]] = {}
            notes: dict[tuple[str, int], dict[str, Any]] = {}
            for name in (None, *libraries):
                engine = f"specpress ({ours.name})" if name is None else name
                try:
                    kernel = ours if name is None else _asked(name, str(place.device))
                    for width, task, note in _tasks(place, layer, kernel, name, widths):
                        tasks[engine, width], notes[engine, width] = task, note | {"engine": engine}
                except Exception as error:  # of many classes: a missing library, a shape it does not take, …
                    bench.leave_out(error, engine=engine, scheme=scheme, layer=layer.name)
            samples = bench.samples(tasks)
            sizes = {"layer": layer.name, "outputs": layer.outputs, "inputs": layer.inputs, "shape": shape}
            for (engine, width), taken in samples.items():
                note, base = notes[engine, width], samples.get((engine, 1))
                found.append(row(layer.name, scheme, width, taken, note["bytes_read"], base) | sizes | note)
            del tasks
            place.release()
    return found


def _asked(name: str, device: str) -> Kernel:
    """The kernels of an implementation by name. Raises UserError where they cannot run."""
    if name in NAMES and name != "bitsandbytes":
        return choose(name, device)
    # Beside Triton's kernels, as a table would have it.
    choose("triton", device)
    choose(name, device)
    return Kernel("library", True, "", exact=False, table=wanted(name))


def _tasks(
    place: Place, layer: Layer, kernel: Kernel, name: str | None, widths: Sequence[int]
) -> Iterator[tuple[int, Callable[[], float], dict[str, Any]]]:
    """Each width with its task and what a row says besides times. Raises an error of any class where it cannot run."""
    from runtime.kernels.triton.with_libraries import keeps_bits

    weight = random_weight(layer.scheme, layer.outputs, layer.inputs, torch.Generator(place.device).manual_seed(0))
    first: Any = linear(weight, None, kernel)
    if name is not None and name not in getattr(first, "libraries", ()):
        raise UserError(f"{name} does not take this layer: its sizes, or what comes with the weight")
    # None where an interpreter would take too long, and says nothing about a GPU.
    same = keeps_bits(first, layer.inputs, place.device) if place.is_gpu else None
    made = [first, *(linear(weight, None, kernel) for _ in range(copies_of(place, first.nbytes) - 1))]
    exact = (dequantize(weight) if isinstance(weight, PackedWeight) else weight).double()
    for width in widths:
        draws = torch.Generator(place.device).manual_seed(width)
        x = torch.randn(width, layer.inputs, device=place.device, generator=draws)
        ideal = x.double() @ exact.t()
        error = float((first(x).double() - ideal).norm() / ideal.norm())
        if not error < _WRONG:
            raise ValueError(f"its product is wrong by {error:.2g} of itself on this device, so it was not timed")
        work = partial(each, made, x)
        try:
            run, how = place.repeated(work), "graph" if place.is_gpu else "eager"
        except RuntimeError:
            run, how = work, "eager"
        about = {"implementation": name, "bytes_read": first.nbytes, "copies": len(made)}
        yield width, place.task(run, calls=len(made)), about | {"how": how, "relative_error": error, "same_bits": same}


def copies_of(place: Place, size: int) -> int:
    """Equal weights of `size` bytes that one pass goes through."""
    return -(-_PASS_BYTES // size) if place.is_gpu else 2


def each(products: Sequence[Callable[[Any], Any]], x: Any) -> None:
    """All products of the same inputs."""
    for product in products:
        product(x)


def winners(rows: Sequence[Row], capability: Capability, measured_on: str) -> list[Choice]:
    """The entries that `kernels`' rows (`time_layers`, each with its shape) justify; none where Triton is quickest.

    Times are summed over all layers of all shapes, so an implementation must have run each of them. A width that was
    timed stands for the numbers of rows after the width before it, and the widest for all after it. Where the quickest
    does not keep its bits, the quickest that does has an entry for the same rows: `auto` takes that one.
    """
    found: list[Choice] = []
    for scheme in dict.fromkeys(one["scheme"] for one in rows):
        mine = [one for one in rows if one["scheme"] == scheme]
        same = {
            name: all(one["same_bits"] is True for one in mine if one["implementation"] == name)
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


def _spans(rows: Sequence[Row], names: Set[str]) -> list[_Span]:
    """The quickest of some libraries by rows, where it is quicker than Triton."""
    widths = sorted({one["width"] for one in rows})
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


def _quickest(rows: Sequence[Row], width: int, names: Set[str]) -> tuple[str | None, float]:
    """The quickest library at a width and Triton's time over its; None where that is too little."""
    times: dict[str | None, dict[tuple[str, str], float]] = {}
    for one in rows:
        if one["width"] == width:
            times.setdefault(one["implementation"], {})[one["shape"], one["layer"]] = one["ms_median"]
    ours = times.pop(None, {})
    totals = {name: sum(taken.values()) for name, taken in times.items() if name in names and set(taken) == set(ours)}
    if not totals:
        return None, 1.0
    name = min(totals, key=lambda one: totals[one])
    gain = sum(ours.values()) / totals[name]
    return (name, gain) if gain >= _MARGIN else (None, gain)
