"""4-bit layers of a shape: our kernels beside torch's int4 product and bitsandbytes' GEMV, on equal weights."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.bench.gpu.models import random_weight
from runtime.bench.gpu.output import reason
from runtime.bench.gpu.place import Copies, Place
from runtime.bench.layers import layers
from runtime.bench.rounds import Row, interleaved, row
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight
from runtime.kernels.dispatch import choose, linear

Product = Callable[[Tensor], Tensor]
# A pass reads at least so many bytes, beyond every GPU's caches, so that each weight comes from memory.
_PASS_BYTES = 1 << 28
_INNER_TILES = 8
# Rounding errors lie far below, layouts that a device's kernel does not take far above.
_WRONG = 0.1


@dataclass(frozen=True)
class Contender:
    """One engine's product: how to make it of a weight, the inputs' type, and the most rows that it takes."""

    engine: str
    scheme: str
    make: Callable[[PackedWeight], tuple[Product, int]]
    dtype: torch.dtype
    most: int = 1 << 20


def contenders(place: Place, kernels: str) -> list[Contender]:
    """What is compared, by scheme: ours first."""
    kernel = choose(kernels, str(place.device))

    def ours(weight: PackedWeight) -> tuple[Product, int]:
        made: Any = linear(weight, None, kernel)
        nbytes = getattr(made, "nbytes", None)
        return made, weight.codes.nbytes if nbytes is None else nbytes

    return [
        Contender(f"specpress ({kernel.name})", "int4", ours, torch.float32),
        Contender("torch _weight_int4pack_mm", "int4", torch_int4, torch.bfloat16),
        Contender(f"specpress ({kernel.name})", "nf4", ours, torch.float32),
        Contender("bitsandbytes gemv_4bit", "nf4", bitsandbytes_nf4, torch.bfloat16, most=1),
    ]


def torch_int4(weight: PackedWeight) -> tuple[Product, int]:
    """torch's own int4 product for GPUs: bfloat16 in and out, w = (q − 8) · scale with a zero of 0."""
    codes = (weight.codes + 8).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(codes[:, 0::2] << 4 | codes[:, 1::2], _INNER_TILES)
    scale = weight.scale.t().to(torch.bfloat16)
    both = torch.stack((scale, torch.zeros_like(scale)), dim=2).contiguous()
    group = weight.shape[1] // weight.scale.shape[1]
    return lambda x: torch._weight_int4pack_mm(x, packed, group, both), packed.nbytes + both.nbytes


def bitsandbytes_nf4(weight: PackedWeight) -> tuple[Product, int]:
    """bitsandbytes' product of one row in bfloat16; its scales in float32, not quantised again."""
    import bitsandbytes.functional as bnb

    codes = weight.codes.to(torch.uint8)
    packed = (codes[:, 0::2] << 4 | codes[:, 1::2]).reshape(-1, 1)
    state = bnb.QuantState(
        absmax=weight.scale.flatten(),
        shape=torch.Size(weight.shape),
        code=bnb.get_4bit_type("nf4", device=codes.device),
        blocksize=weight.scheme.group_size,
        quant_type="nf4",
        dtype=torch.bfloat16,
    )
    return partial(_gemv, bnb.gemv_4bit, packed.t(), state), packed.nbytes + weight.scale.nbytes


def _gemv(product: Callable[..., Tensor], packed: Tensor, state: Any, x: Tensor) -> Tensor:
    return product(x, packed, state=state)


def time_layers(
    place: Place, shape: str, schemes: Sequence[str], widths: Sequence[int], rounds: int, kernels: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[float]]:
    """Rows, what was left out and why, readings of the memory's speed.

    A row's time is that of one product, the mean of a pass over copies of the layer that together exceed the caches,
    in one CUDA graph where it can be captured ("eager" where not), so that no launch from the host is counted.
    relative_error is ‖y − ŷ‖ / ‖ŷ‖ against the float64 product of the dequantised weight: a wrong layout would show.
    """
    found: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    copies = Copies(place)
    entrants = [one for one in contenders(place, kernels) if one.scheme in schemes]
    for scheme in dict.fromkeys(one.scheme for one in entrants):
        for layer in layers(shape, scheme, "keep")[:-1]:
            tasks: dict[tuple[str, int], Callable[[], float]] = {}
            notes: dict[tuple[str, int], dict[str, Any]] = {}
            for one in (entrant for entrant in entrants if entrant.scheme == scheme):
                try:
                    _enter(place, one, layer.outputs, layer.inputs, widths, tasks, notes)
                except Exception as error:  # of many classes: a missing library, a shape it does not take, …
                    about = {"engine": one.engine, "scheme": scheme, "layer": layer.name}
                    left_out.append(about | {"why": reason(error)})
            samples = interleaved(tasks, rounds, copies)
            for (engine, width), taken in samples.items():
                note = notes[engine, width]
                timed: Row = row(layer.name, scheme, width, taken, note["bytes_read"], samples.get((engine, 1)))
                sizes = {"layer": layer.name, "outputs": layer.outputs, "inputs": layer.inputs}
                found.append(asdict(timed) | sizes | note | {"engine": engine})
            del tasks
            place.release()
    return found, left_out, copies.readings


def _enter(
    place: Place,
    one: Contender,
    outputs: int,
    inputs: int,
    widths: Sequence[int],
    tasks: dict[tuple[str, int], Callable[[], float]],
    notes: dict[tuple[str, int], dict[str, Any]],
) -> None:
    weight = random_weight(one.scheme, outputs, inputs, torch.Generator(place.device).manual_seed(0))
    assert isinstance(weight, PackedWeight)
    first, size = one.make(weight)
    made = [first, *(one.make(weight)[0] for _ in range(copies_of(place, size) - 1))]
    exact = dequantize(weight).double()
    for width in (width for width in widths if width <= one.most):
        draws = torch.Generator(place.device).manual_seed(width)
        x = torch.randn(width, inputs, device=place.device, generator=draws).to(one.dtype)
        wanted = x.double() @ exact.t()
        error = float((first(x).double() - wanted).norm() / wanted.norm())
        if not error < _WRONG:
            raise ValueError(f"its product is wrong by {error:.2g} of itself on this device, so it was not timed")
        work = partial(_all, made, x)
        try:
            run, how = place.repeated(work), "graph" if place.is_gpu else "eager"
        except RuntimeError:
            run, how = work, "eager"
        tasks[one.engine, width] = _per_call(place.task(run), len(made))
        notes[one.engine, width] = {"bytes_read": size, "copies": len(made), "how": how, "relative_error": error}


def copies_of(place: Place, size: int) -> int:
    """Equal weights of `size` bytes that one pass goes through."""
    return -(-_PASS_BYTES // size) if place.is_gpu else 2


def _all(products: Sequence[Product], x: Tensor) -> None:
    for product in products:
        product(x)


def _per_call(task: Callable[[], float], calls: int) -> Callable[[], float]:
    return lambda: task() / calls
