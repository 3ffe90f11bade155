"""What a forward costs: products timed alone for each shape, scheme and width, and all else from whole forwards.

T(width) = Σ factor(how, width) · product(shape, how, width) + rest(width), where `how` is how the kernels hold a layer.
Whole forwards of the original, and of stand-ins all of whose layers are held alike, tell factors and rest: in a forward
a product takes more or less than alone (caches and threads are in another state), and attention, norms and the head
take what they take whatever the layers are. So a forward of layers that are held alike is what was measured, and one of
mixed layers lies between.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from compress.best.space import KEEP, Assignment, Option, Unit
from compress.best.stand_in import random_weight
from compress.progress import Progress
from runtime.bench.measure import CPU, cache_bytes, interleaved
from runtime.kernels.dispatch import Kernel, linear
from runtime.kernels.joined import Linear
from runtime.kernels.native_linear import NativeLinear

WIDTHS = (1, 2, 3, 4, 5, 8, 9)
_ROUNDS = 7
# A pass over the copies of a layer reads as much as a forward does of all layers, at most so many times the caches.
_CACHES = 2
# How far the products in a forward may be from products alone, for a fit to be believed.
_LEAST_SHARE, _MOST_SHARE = 0.5, 2.0

KEPT = "keep"
Key = tuple[int, int, str]
"""Outputs, inputs, and how the kernels hold a weight: layers that agree in these take the same time."""


@dataclass(frozen=True)
class Costs:
    """Times in milliseconds, and bytes in memory.

    products  by key: for each of WIDTHS what the layer's product takes.
    held      by key: bytes of the layer as the kernels hold it.
    rest      for each of WIDTHS what a forward takes beyond its products.
    other     bytes of all weights that are no unit's, as the kernels hold them.
    beyond    for each of WIDTHS what a round takes beyond its forward and its draft.
    """

    products: Mapping[Key, tuple[float, ...]]
    held: Mapping[Key, int]
    rest: tuple[float, ...]
    other: int
    beyond: tuple[float, ...] = (0.0,) * len(WIDTHS)

    def product(self, unit: Unit, option: Option, width: int) -> float:
        """Milliseconds of a unit's product at one of WIDTHS."""
        return self.products[key_of(unit, option)][WIDTHS.index(width)]

    def memory(self, unit: Unit, option: Option) -> int:
        """Bytes of a unit's weights in memory."""
        return self.held[key_of(unit, option)]

    def forward(self, units: Sequence[Unit], assignment: Assignment) -> dict[int, float]:
        """Milliseconds of a forward at each of WIDTHS."""
        return {
            width: rest + sum(self.product(unit, assignment[unit.name], width) for unit in units)
            for width, rest in zip(WIDTHS, self.rest, strict=True)
        }

    def round(self, units: Sequence[Unit], assignment: Assignment) -> dict[int, float]:
        """Milliseconds of a round but for its draft, at each of WIDTHS."""
        forward = self.forward(units, assignment)
        return {width: forward[width] + more for width, more in zip(WIDTHS, self.beyond, strict=True)}

    def fitted(self, units: Sequence[Unit], wholes: Sequence[tuple[str, Mapping[int, float]]]) -> "Costs":
        """The costs in whole forwards, from those of products alone.

        wholes  of the original (KEPT) and of `alike` models: how their layers are held, and milliseconds of a forward
                by width.

        One share for all products and a rest for each width come from least squares over all of them; then each way of
        holding layers gets the factor that makes its own forward what was measured.
        """
        kept = torch.tensor([self._sums(units, how, KEPT) for how, _ in wholes], dtype=torch.float64)
        mine = torch.tensor([self._sums(units, how, how) for how, _ in wholes], dtype=torch.float64)
        mine[[how == KEPT for how, _ in wholes]] = 0.0
        x, y = kept + mine, torch.tensor([[t[width] for width in WIDTHS] for _, t in wholes], dtype=torch.float64)
        dx, dy = x - x.mean(0), y - y.mean(0)
        spread = float((dx * dx).sum())
        slope = float((dx * dy).sum()) / spread if spread > 0 else 1.0
        share = min(max(slope, _LEAST_SHARE), _MOST_SHARE)
        # Never all of a forward: a short one may take less than its products alone.
        rest = torch.minimum((y - share * x).mean(0).clamp(min=0.0), 0.9 * y.min(0).values)
        factors = {KEPT: torch.full((len(WIDTHS),), share, dtype=torch.float64)}
        for (how, _), took, stayed, other in sorted(
            zip(wholes, y, kept, mine, strict=True), key=lambda one: one[0][0] != KEPT
        ):
            left = took - rest - (0.0 if how == KEPT else factors[KEPT] * stayed)
            factors[how] = left.clamp(min=0.0) / (stayed if how == KEPT else other).clamp(min=1e-12)
        products = {
            key: tuple(float(f) * ms for f, ms in zip(factors.get(key[2], factors[KEPT]), alone, strict=True))
            for key, alone in self.products.items()
        }
        return replace(self, products=products, rest=tuple(map(float, rest)))

    def _sums(self, units: Sequence[Unit], how: str, of: str) -> list[float]:
        """Milliseconds by width of those products, in a model whose layers are `alike`, that are held as `of` says."""
        keys = [key for unit, option in alike(units, how).items() if (key := key_of(unit, option))[2] == of]
        return [sum(self.products[key][at] for key in keys) for at in range(len(WIDTHS))]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it."""
        rows = [[*key, self.held[key], list(times)] for key, times in self.products.items()]
        return {"products": rows, "rest": list(self.rest), "other": self.other, "beyond": list(self.beyond)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Costs":
        keys = [(int(n), int(k), str(how)) for n, k, how, *_ in data["products"]]
        products = {key: tuple(map(float, row[4])) for key, row in zip(keys, data["products"], strict=True)}
        held = {key: int(row[3]) for key, row in zip(keys, data["products"], strict=True)}
        return cls(
            products, held, tuple(map(float, data["rest"])), int(data["other"]), tuple(map(float, data["beyond"]))
        )


def key_of(unit: Unit, option: Option) -> Key:
    """What the time of a unit depends on. Codes of 3 and 2 bits run in the container of 4, so their scheme is that."""
    if option.keeps:
        how = KEPT
    else:
        how = f"{option.scheme if option.has_tiles else option.stored_as.kind} {option.group_size}"
    return (sum(n for n, _ in unit.shapes), unit.shapes[0][1], how)


def keys_of(unit: Unit) -> set[Key]:
    """Of all that the unit may become."""
    return {key_of(unit, option) for option in unit.options}


def alike(units: Sequence[Unit], how: str) -> dict[Unit, Option]:
    """The assignment whose units are all held in one way, but that those stay as they are that cannot be."""
    return {unit: next((one for one in unit.options if key_of(unit, one)[2] == how), KEEP) for unit in units}


def products_alone(
    kernel: Kernel, units: Sequence[Unit], dtype: torch.dtype, weights: int, progress: Progress
) -> Costs:
    """Times every product that an assignment may need, alone; there is no rest yet.

    kernel, dtype  that run the model, and of its plain weights; `weights`: bytes of all its weights in memory.

    Raises UserError where no kernel takes a layer.
    """
    wanted: dict[Key, Option] = {}
    for unit in units:
        for option in unit.options:
            wanted.setdefault(key_of(unit, option), option)
    whole: dict[str, int] = {}
    made: dict[Key, list[Linear]] = {}
    for key, option in wanted.items():
        made[key] = [linear(random_weight(key[:2], option, dtype), None, kernel)]
    held = {key: one[0].nbytes for key, one in made.items()}
    for unit in units:
        for key in keys_of(unit):
            whole[key[2]] = whole.get(key[2], 0) + held[key]
    for key, option in wanted.items():
        read = min(whole[key[2]], _CACHES * cache_bytes())
        weight = random_weight(key[:2], option, dtype)
        made[key] += [linear(weight, None, kernel) for _ in range(-(-read // held[key]) - 1)]
    times: dict[Key, list[float]] = {key: [] for key in made}
    with torch.inference_mode():
        for done, width in enumerate(WIDTHS):
            progress("products", done, len(WIDTHS))
            tasks = {key: _task(products, width, key[1]) for key, products in made.items()}
            for key, found in interleaved(tasks, _ROUNDS, lambda: None).items():
                times[key].append(1e3 * median(sample.seconds for sample in found))
    progress("products", len(WIDTHS), len(WIDTHS))
    other = weights - sum(held[key_of(unit, KEEP)] for unit in units)
    return Costs({key: tuple(found) for key, found in times.items()}, held, (0.0,) * len(WIDTHS), other)


def _task(products: Sequence[Linear], width: int, inputs: int) -> Callable[[], float]:
    x = torch.randn(width, inputs)
    calls = [one.on(x) if isinstance(one, NativeLinear) else partial(one, x) for one in products]
    return CPU.task(lambda: [call() for call in calls], calls=len(calls))
