"""Which kernel runs a layer, and why. On a CPU: the fastest native path, else reference.py. On CUDA: Triton's, else
torch, and bitsandbytes for nf4 and int8."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.packed import PackedWeight
from runtime.kernels import native
from runtime.kernels.joined import Joined
from runtime.kernels.reference import float_linear, packed_linear
from runtime.kernels.triton.available import usable

Weight = PackedWeight | Tensor
NAMES: tuple[str, ...] = ("auto", *native.PATHS, "triton", "reference", "bitsandbytes")


@dataclass(frozen=True)
class Kernel:
    """One set of kernels: whether it can run here, why or why not, and whether its bits are the same at every width.

    threads  those of the native kernels; 0 for kernels that use torch's.
    """

    name: str
    usable: bool
    why: str
    exact: bool
    threads: int = 0

    @property
    def native(self) -> bool:
        """Whether this is one of the C++ paths."""
        return self.name in native.PATHS


def available(device: str = "cpu", threads: int | None = None) -> list[Kernel]:
    """What could run on a device; `auto` takes the first that is usable.

    `threads` of the native kernels; None: one per physical core.
    """
    has_bnb = find_spec("bitsandbytes") is not None
    bnb_why = "installed" if has_bnb else "not installed (pip install 'specpress[bnb]')"
    bnb = Kernel("bitsandbytes", has_bnb, f"bitsandbytes is {bnb_why}; nf4 and int8 only", exact=False)
    plain = Kernel("reference", True, "plain torch, width-independent, slow", exact=True)
    triton = Kernel("triton", *usable(device), exact=True)
    if device.startswith("cuda"):
        return [triton, bnb, plain] if has_bnb else [triton, plain, bnb]
    count = native.default_threads() if threads is None else threads
    paths = [Kernel(path, *native.usable(path), exact=True, threads=count) for path in native.PATHS]
    return [*paths, plain, *([triton] if triton.usable else []), bnb]


def choose(kernels: str, device: str, threads: int | None = None) -> Kernel:
    """The kernels to use. Raises UserError for unknown or unusable ones."""
    options = available(device, threads)
    if kernels == "auto":
        return next(option for option in options if option.usable)
    for option in options:
        if option.name == kernels:
            if not option.usable:
                raise UserError(f"kernels={kernels!r} cannot run here: {option.why}")
            return option
    if kernels in NAMES:
        raise UserError(f"kernels={kernels!r} run on a CPU, and the device is {device}")
    raise UserError(f"kernels={kernels!r} is unknown; use one of {', '.join(NAMES)}")


def linear(weight: Weight, bias: Tensor | None, kernel: Kernel) -> Callable[[Tensor], Tensor]:
    """The layer y = x Wᵀ + b on the chosen kernels; `bias` is for float weights (packed ones carry theirs)."""
    if kernel.native:
        from runtime.kernels.native.binding import pool
        from runtime.kernels.native.layers import NativeLinear
        from runtime.kernels.native.weights import native_weight

        threads = pool(kernel.threads)
        return NativeLinear(native_weight(weight, bias, threads), kernel.name, threads)
    if kernel.name == "triton":
        from runtime.kernels.triton.linear import triton_linear
        from runtime.kernels.triton.weights import gpu_weight

        codes = weight if isinstance(weight, Tensor) else weight.codes
        return triton_linear(gpu_weight(weight, bias, codes.device))
    if isinstance(weight, Tensor):
        return float_linear(weight, bias)
    if kernel.name == "bitsandbytes":
        from runtime.kernels.library import bitsandbytes_linear, has_kernel

        if has_kernel(weight):
            return bitsandbytes_linear(weight)
    return packed_linear(weight)


def join(weights: Sequence[Weight], biases: Sequence[Tensor | None], sizes: Sequence[int], kernel: Kernel) -> Joined:
    """Layers of one input as one, where they can be: all float, or packed with one scheme and input order.

    `sizes` are the outputs to split into; a layer fused on disk is one weight with several sizes.
    """
    first = weights[0]
    if kernel.native:
        # The native decoder multiplies by all parts in one call, so nothing is copied together here.
        parts = zip(share_inputs(weights), biases, strict=True)
        return Joined(tuple(linear(w, b, kernel) for w, b in parts), tuple(sizes))
    if kernel.name == "triton":
        from runtime.kernels.triton.linear import TritonJoined, triton_linear
        from runtime.kernels.triton.weights import concatenate, gpu_weight
        from runtime.kernels.triton.weights import share_inputs as share

        each = zip(weights, biases, strict=True)
        made = share([gpu_weight(w, b, (w if isinstance(w, Tensor) else w.codes).device) for w, b in each])
        whole = concatenate(made)
        return TritonJoined(tuple(triton_linear(w) for w in (made if whole is None else [whole])), tuple(sizes))
    if len(weights) == 1:
        return Joined((linear(first, biases[0], kernel),), tuple(sizes))
    if all(isinstance(w, Tensor) for w in weights):
        merged = torch.cat([w for w in weights if isinstance(w, Tensor)])
        return Joined((float_linear(merged, _join_biases(biases, weights)),), tuple(sizes))
    packed = [w for w in weights if isinstance(w, PackedWeight)]
    plain = all(w.perm is None and w.offset is None and w.input_scale is None for w in packed)
    if len(packed) == len(weights) and plain and len({w.scheme for w in packed}) == 1:
        merged_packed = PackedWeight(
            scheme=packed[0].scheme,
            codes=torch.cat([w.codes for w in packed]),
            scale=torch.cat([w.scale for w in packed]),
            bias=_join_biases([w.bias for w in packed], weights),
            planes=all(w.planes for w in packed),
        )
        return Joined((linear(merged_packed, None, kernel),), tuple(sizes))
    return Joined(tuple(linear(w, b, kernel) for w, b in zip(weights, biases, strict=True)), tuple(sizes))


def share_inputs(weights: Sequence[Weight]) -> list[Weight]:
    """The weights, equal input orders and equal static scales being one tensor: the kernels round x once for those."""
    out: list[Weight] = []
    for weight in weights:
        if isinstance(weight, PackedWeight):
            if weight.perm is not None and weight.perm.dtype == torch.int64:
                # As the kernels take it, so that they make no copies of their own.
                weight = replace(weight, perm=weight.perm.to(torch.int32))
            for other in out:
                if isinstance(other, PackedWeight) and _same(weight.perm, other.perm):
                    weight = replace(weight, perm=other.perm)
                if isinstance(other, PackedWeight) and _same(weight.input_scale, other.input_scale):
                    weight = replace(weight, input_scale=other.input_scale)
        out.append(weight)
    return out


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)


def _join_biases(biases: Sequence[Tensor | None], weights: Sequence[Weight]) -> Tensor | None:
    if all(b is None for b in biases):
        return None
    return torch.cat(
        [torch.zeros(w.shape[0]) if b is None else b.float() for b, w in zip(biases, weights, strict=True)]
    )
