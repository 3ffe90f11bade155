"""Which kernel runs a layer, and why. On a CPU: reference.py. On CUDA: torch, and bitsandbytes for nf4 and int8."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.packed import PackedWeight
from runtime.kernels.reference import float_linear, packed_linear

Kernels = Literal["auto", "reference", "bitsandbytes"]
Weight = PackedWeight | Tensor
NAMES: tuple[Kernels, ...] = ("auto", "reference", "bitsandbytes")


@dataclass(frozen=True)
class Kernel:
    """One set of kernels: whether it can run here, why or why not, and whether its bits are the same at every width."""

    name: Kernels
    usable: bool
    why: str
    exact: bool


def available(device: str = "cpu") -> list[Kernel]:
    """What could run on a device, the one `auto` takes first."""
    has_bnb = find_spec("bitsandbytes") is not None
    bnb_why = "installed" if has_bnb else "not installed (pip install 'specpress[bnb]')"
    bnb = Kernel("bitsandbytes", has_bnb, f"bitsandbytes is {bnb_why}; nf4 and int8 only", exact=False)
    plain = Kernel("reference", True, "plain torch, width-independent", exact=True)
    return [bnb, plain] if device.startswith("cuda") and has_bnb else [plain, bnb]


def choose(kernels: Kernels, device: str) -> Kernel:
    """The kernels to use. Raises UserError for unknown or unusable ones."""
    options = available(device)
    if kernels == "auto":
        return options[0]
    for option in options:
        if option.name == kernels:
            if not option.usable:
                raise UserError(f"kernels={kernels!r} cannot run here: {option.why}")
            return option
    raise UserError(f"kernels={kernels!r} is unknown; use one of {', '.join(NAMES)}")


@dataclass(frozen=True)
class Joined:
    """Layers that read the same input, in one product where their schemes agree: `split` returns each one's output."""

    parts: tuple[Callable[[Tensor], Tensor], ...]
    sizes: tuple[int, ...]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """One (T, N_i) tensor per joined layer."""
        whole = self.parts[0](x) if len(self.parts) == 1 else torch.cat([part(x) for part in self.parts], dim=1)
        return whole.split(self.sizes, dim=1)


def linear(weight: Weight, bias: Tensor | None, kernel: Kernel) -> Callable[[Tensor], Tensor]:
    """The layer y = x Wᵀ + b on the chosen kernels; `bias` is for float weights (packed ones carry theirs)."""
    if isinstance(weight, Tensor):
        return float_linear(weight, bias)
    if kernel.name == "bitsandbytes" and weight.scheme.kind in ("nf4", "int8"):
        from runtime.kernels.library import bitsandbytes_linear

        return bitsandbytes_linear(weight)
    return packed_linear(weight)


def join(weights: Sequence[Weight], biases: Sequence[Tensor | None], sizes: Sequence[int], kernel: Kernel) -> Joined:
    """Layers of one input as one, where they can be: all float, or packed with one scheme and input order.

    `sizes` are the outputs to split into; a layer fused on disk is one weight with several sizes.
    """
    first = weights[0]
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
        )
        return Joined((linear(merged_packed, None, kernel),), tuple(sizes))
    return Joined(tuple(linear(w, b, kernel) for w, b in zip(weights, biases, strict=True)), tuple(sizes))


def _join_biases(biases: Sequence[Tensor | None], weights: Sequence[Weight]) -> Tensor | None:
    if all(b is None for b in biases):
        return None
    return torch.cat(
        [torch.zeros(w.shape[0]) if b is None else b.float() for b, w in zip(biases, weights, strict=True)]
    )
