"""What a forward costs: products timed alone for each shape, scheme and width, and all else from whole forwards.

T(width) = share · Σ products(width) + rest(width). The rest (attention, norms, the head, what a forward costs whatever
it multiplies) is what the original's forwards take beyond its products; once a compressed model was timed, share and
rest are what both say together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from compress.best.space import KEEP, Assignment, Option, Unit
from compress.errors import UserError
from compress.progress import Progress
from runtime.bench.measure import CPU, cache_bytes, interleaved
from runtime.contract import HasDecoder
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import round_scale
from runtime.kernels.dispatch import linear
from runtime.kernels.joined import Linear
from runtime.kernels.native_linear import NativeLinear
from runtime.speculative.costs import measure_costs

WIDTHS = (1, 2, 3, 5, 9)
_ROUNDS, _SECONDS = 7, 4.0
# A pass over the copies of a layer reads as much as a forward does of all layers, at most so many times the caches.
_CACHES = 2
# How far the products in a forward may be from products alone, for a fit to be believed.
_LEAST_SHARE, _MOST_SHARE = 0.5, 2.0

Key = tuple[int, int, str]
"""Outputs, inputs, and how the kernels hold a weight: layers that agree in these take the same time."""


@dataclass(frozen=True)
class Costs:
    """Times in milliseconds, and bytes in memory.

    products  by key: for each of WIDTHS what the layer's product takes.
    held      by key: bytes of the layer as the kernels hold it.
    rest      for each of WIDTHS what a forward takes beyond its products.
    share     what a product in a forward takes over one alone.
    other     bytes of all weights that are no unit's, as the kernels hold them.
    """

    products: Mapping[Key, tuple[float, ...]]
    held: Mapping[Key, int]
    rest: tuple[float, ...]
    other: int
    share: float = 1.0

    def product(self, unit: Unit, option: Option, width: int) -> float:
        """Milliseconds of a unit's product at one of WIDTHS."""
        return self.share * self.products[key_of(unit, option)][WIDTHS.index(width)]

    def memory(self, unit: Unit, option: Option) -> int:
        """Bytes of a unit's weights in memory."""
        return self.held[key_of(unit, option)]

    def forward(self, units: Sequence[Unit], assignment: Assignment) -> dict[int, float]:
        """Milliseconds of a forward at each of WIDTHS."""
        return {
            width: rest + sum(self.product(unit, assignment[unit.name], width) for unit in units)
            for width, rest in zip(WIDTHS, self.rest, strict=True)
        }

    def refitted(self, units: Sequence[Unit], timed: Sequence[tuple[Assignment, Mapping[int, float]]]) -> "Costs":
        """The costs whose share and rest fit whole forwards best (least squares over all widths).

        timed  assignments, the original's among them, with milliseconds of a forward by width.
        """
        plain = replace(self, share=1.0)
        sums = [[sum(plain.product(u, a[u.name], width) for u in units) for width in WIDTHS] for a, _ in timed]
        took = [[times[width] for width in WIDTHS] for _, times in timed]
        x, y = torch.tensor(sums, dtype=torch.float64), torch.tensor(took, dtype=torch.float64)
        dx, dy = x - x.mean(0), y - y.mean(0)
        spread = float((dx * dx).sum())
        slope = float((dx * dy).sum()) / spread if spread > 0 else 1.0
        share = min(max(slope, _LEAST_SHARE), _MOST_SHARE)
        rest = (y - share * x).mean(0).clamp(min=0.0)
        return replace(plain, share=share, rest=tuple(map(float, rest)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it."""
        rows = [[*key, self.held[key], list(times)] for key, times in self.products.items()]
        return {"products": rows, "rest": list(self.rest), "other": self.other, "share": self.share}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Costs":
        keys = [(int(n), int(k), str(how)) for n, k, how, *_ in data["products"]]
        products = {key: tuple(map(float, row[4])) for key, row in zip(keys, data["products"], strict=True)}
        held = {key: int(row[3]) for key, row in zip(keys, data["products"], strict=True)}
        return cls(products, held, tuple(map(float, data["rest"])), int(data["other"]), float(data["share"]))


def key_of(unit: Unit, option: Option) -> Key:
    """What the time of a unit depends on. Codes of 3 and 2 bits run in the container of 4, so their scheme is that."""
    how = "keep" if option.keeps else f"{option.stored_as.kind} {option.group_size}"
    return (sum(n for n, _ in unit.shapes), unit.shapes[0][1], how)


def measure(
    original: Any, units: Sequence[Unit], dtype: torch.dtype, text: Sequence[int], weights: int, progress: Progress
) -> Costs:
    """Times every product that an assignment may need, and whole forwards of the original.

    original  a loaded model that the own decoder runs; `dtype` is of its weights, `weights` what all of them take.
    text      tokens to time forwards after.

    Raises UserError where no kernel takes a layer, or the model runs through another library.
    """
    parts = getattr(original.decoder, "parts", None)
    if parts is None:
        raise UserError("compress.best plans models that the own decoder runs, and this one runs through transformers")
    kernel = original.decoder.kernel
    wanted: dict[Key, tuple[Unit, Option]] = {}
    for unit in units:
        for option in unit.options:
            wanted.setdefault(key_of(unit, option), (unit, option))
    whole: dict[str, int] = {}
    made: dict[Key, list[Linear]] = {}
    for key, (_, option) in wanted.items():
        first = linear(random_weight(key, option, dtype), None, kernel)
        made[key] = [first]
    for unit in units:
        for how in {key_of(unit, option) for option in unit.options}:
            whole[how[2]] = whole.get(how[2], 0) + made[how][0].nbytes
    held = {key: one[0].nbytes for key, one in made.items()}
    times: dict[Key, list[float]] = {key: [] for key in made}
    done, total = 0, len(WIDTHS)
    for key, (_, option) in wanted.items():
        read = min(whole[key[2]], _CACHES * cache_bytes())
        more = -(-read // held[key]) - 1
        weight = random_weight(key, option, dtype)
        made[key] += [linear(weight, None, kernel) for _ in range(more)]
    with torch.inference_mode():
        for width in WIDTHS:
            progress("products", done, total)
            tasks = {key: _task(products, width, key[1]) for key, products in made.items()}
            samples = interleaved(tasks, _ROUNDS, lambda: None)
            for key, found in samples.items():
                times[key].append(1e3 * median(sample.seconds for sample in found))
            done += 1
    del made
    progress("products", total, total)
    forwards = whole_forward(original, text)
    kept = {key: tuple(found) for key, found in times.items()}
    sums = [sum(kept[key_of(unit, KEEP)][i] for unit in units) for i in range(len(WIDTHS))]
    rest = tuple(max(0.0, forwards[width] - spent) for width, spent in zip(WIDTHS, sums, strict=True))
    return Costs(kept, held, rest, weights - sum(held[key_of(unit, KEEP)] for unit in units))


def whole_forward(model: HasDecoder, text: Sequence[int]) -> dict[int, float]:
    """Milliseconds of a model's forwards at each of WIDTHS, after the text."""
    found = measure_costs(model, text, WIDTHS[-1] - 1, _SECONDS).target_ms
    return {width: found[width] for width in WIDTHS}


def random_weight(key: Key, option: Option, dtype: torch.dtype) -> PackedWeight | torch.Tensor:
    """A weight of a key's shape (N, K): what is in it changes no product's time."""
    n, k, _ = key
    drawn = torch.Generator().manual_seed(0)
    if option.keeps:
        return torch.randn(n, k, generator=drawn).mul_(k**-0.5).to(dtype)
    scheme = option.stored_as
    half = 1 << scheme.bits - 1
    codes = torch.randint(1 - half, half, (n, k), dtype=torch.int8, generator=drawn)
    scale = torch.rand(n, k // (scheme.group_size or k), generator=drawn).add_(0.5).div_(half * k**0.5)
    return PackedWeight(scheme, codes, round_scale(scale, torch.bfloat16))


def _task(products: Sequence[Linear], width: int, inputs: int) -> Callable[[], float]:
    x = torch.randn(width, inputs)
    calls = [one.on(x) if isinstance(one, NativeLinear) else partial(one, x) for one in products]
    return CPU.task(lambda: [call() for call in calls], calls=len(calls))
