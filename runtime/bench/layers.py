"""The linear layers of a shape alone: how near their products come to the memory's speed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import torch

from runtime.bench.measure import CPU, Row, cache_bytes, interleaved, row
from runtime.bench.random_models import random_weight
from runtime.bench.shapes import SHAPES
from runtime.errors import UserError
from runtime.kernels.dispatch import Kernel, linear
from runtime.kernels.joined import Linear
from runtime.kernels.native_linear import NativeLinear

# A pass over one kind of layer reads this many times the largest cache, so that every weight comes from memory.
_CACHES = 2


@dataclass(frozen=True)
class Layer:
    """A kind of linear layer of a shape, layers of one input joined; `count` of them in one forward."""

    name: str
    scheme: str
    outputs: int
    inputs: int
    count: int


def layers(shape: str, scheme: str, head: str) -> list[Layer]:
    """The distinct linear layers of a forward, in its order. Raises UserError where blocks differ from each other."""
    about = SHAPES[shape]
    a = about.architecture
    if a.experts is not None or a.latent is not None or a.mixers:
        raise UserError(f"--shape: the blocks of {shape} are not all alike; time it whole, with decode")
    block = a.names.block.format(0)
    joined = {"qkv": a.names.qkv, "o": (a.names.out,), "gate_up": a.names.gate_up, "down": (a.names.down,)}
    found = []
    for name, parts in joined.items():
        sizes = [about.linear[f"{block}.{part}"] for part in dict.fromkeys(parts)]
        found.append(Layer(name, scheme, sum(outputs for outputs, _ in sizes), sizes[0][1], a.layers))
    kept = "f32" if scheme == "f32" else "bf16"
    return [*found, Layer("head", "int8" if head == "int8" else kept, a.vocab, a.hidden, 1)]


def copies(layer: Layer, kernel: Kernel) -> Iterator[Linear]:
    """Copies of a layer without end: equal random weights, each in memory of its own."""
    weight = random_weight(layer.scheme, layer.outputs, layer.inputs, torch.Generator().manual_seed(0))
    while True:
        yield linear(weight, None, kernel)


def time_layers(
    shape: str,
    scheme: str,
    head: str,
    kernel: Kernel,
    widths: Sequence[int],
    rounds: int,
    memory: Callable[[], float | None],
) -> list[Row]:
    """Each kind of layer alone, and "all" of a forward one after the other, at each width.

    A row's time is that of one layer (or of the layers of one forward), the mean of a pass over copies that together
    exceed the caches. `memory` measures the memory's speed.
    """
    kinds = layers(shape, scheme, head)
    needed = _CACHES * cache_bytes()
    made: dict[str, list[Linear]] = {}
    read: dict[str, int] = {}
    for kind in kinds:
        supply = copies(kind, kernel)
        first = next(supply)
        count = max(kind.count, -(-needed // first.nbytes))
        made[kind.name], read[kind.name] = [first, *islice(supply, count - 1)], first.nbytes
    read["all"] = sum(read[kind.name] * kind.count for kind in kinds)
    units = {name: len(found) for name, found in made.items()} | {"all": -(-needed // read["all"])}
    passes = {name: [(name, product) for product in found] for name, found in made.items()}
    passes["all"] = _forwards(kinds, made, units["all"])
    inputs = {(kind.name, width): torch.randn(width, kind.inputs) for kind in kinds for width in widths}

    def task(name: str, width: int) -> Callable[[], float]:
        parts = [(product, inputs[kind, width]) for kind, product in passes[name]]
        # As a decoder calls its layers: with nothing to check or to allocate.
        calls = [each.on(x) if isinstance(each, NativeLinear) else partial(each, x) for each, x in parts]
        return CPU.task(lambda: [call() for call in calls], calls=units[name])

    with torch.inference_mode():
        tasks = {(name, width): task(name, width) for name in passes for width in widths}
        samples = interleaved(tasks, rounds, memory)
    return [
        row(name, scheme, width, taken, read[name], samples.get((name, 1))) for (name, width), taken in samples.items()
    ]


def _forwards(kinds: Sequence[Layer], made: dict[str, list[Linear]], count: int) -> list[tuple[str, Linear]]:
    """The layers of `count` forwards in their order; a copy comes again as late as can be."""
    supplies = {name: cycle(found) for name, found in made.items()}
    *blocks, head = kinds
    found: list[tuple[str, Linear]] = []
    for _ in range(count):
        for _ in range(blocks[0].count):
            found += [(kind.name, next(supplies[kind.name])) for kind in blocks]
        found.append((head.name, next(supplies[head.name])))
    return found
