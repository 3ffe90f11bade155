"""The one description of a quantised weight that every kernel takes, whatever layout it was stored in."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from runtime.formats.schemes import Activation, Kind, Scheme


@dataclass(frozen=True, eq=False)
class Tiles:
    """A trellis weight as its file has it (trellis.py): what kernels decode by themselves.

    sequences  (ceil(N / 16), ceil(K / 16), 32 · bits) uint8.
    levels     (128,) int8: of the lower half of the states.
    """

    sequences: Tensor
    levels: Tensor


@dataclass(frozen=True)
class PackedWeight:
    """A linear layer's weight: y[n] = Σ_k value(codes[n, k]) · scale[n, k // group] · x[k] − offset·Σx (+ bias).

    Unpacked in memory (one code a byte): bit layouts belong to the format files, and kernels repack when they load.

    codes   (N, K) int8: signed integers for int8/int4/ternary, of `scheme.bits` bits; for nf4 the index 0..15 of the
            level; for fp8 the values themselves, float8_e4m3fn; for a trellis the levels that its sequences give.
    scale   (N, G) float32, G = ceil(K / group_size), or 1 when `group_size` is 0. For nf4: the block's absmax
            (blocks never straddle rows here; double quantisation is already undone).
    offset  (N, G) float32 or None: subtracted as offset · Σ_{k in group} x[k] (zero points: offset = scale · zero,
            the zero counted as the codes are).
    perm    (K,) int64 or None: activation order; codes[:, j] belongs to input perm[j].
    bias    (N,) float32 or None.
    input_scale  float32 scalar tensor or None: static activation scale ("int8-tensor").
    nibbles  None; or, read so for kernels that take it: `codes` is (N, K / 2) uint8, two 4-bit codes a byte as the file
            has them (int4's plus 8), the first in the "low" or the "high" half.
    planes  of int8: kernels are to lay the codes out as two planes of nibbles, so that a draft can read the upper one
            alone (`reference.upper_codes` says what it reads then). What the weight means does not change.
    tiles   of a trellis: the sequences of bits that give `codes`; None where they are not at hand.
    """

    scheme: Scheme
    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None
    perm: Tensor | None = None
    bias: Tensor | None = None
    input_scale: Tensor | None = None
    nibbles: Literal["low", "high"] | None = None
    planes: bool = False
    tiles: Tiles | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs N, inputs K)."""
        return self.codes.shape[0], self.codes.shape[1] * (1 if self.nibbles is None else 2)

    def order(self) -> Tensor | None:
        """`perm` as kernels take it, (K,) int32. Raises ValueError where it is no permutation of the inputs."""
        perm, k = self.perm, self.shape[1]
        if perm is None:
            return None
        whole = perm.dtype in (torch.int32, torch.int64) and perm.shape == (k,)
        if not whole or not torch.equal(perm.sort().values.long(), torch.arange(k, device=perm.device)):
            raise ValueError(f"perm must be a permutation of the {k} inputs, found {perm.dtype} {list(perm.shape)}")
        return perm.to(torch.int32).contiguous()

    def static_step(self) -> Tensor | None:
        """`input_scale` as kernels take it, (1,) float32. Raises ValueError where it is not one positive number."""
        value = self.input_scale
        if value is None:
            return None
        if value.numel() != 1 or not value.is_floating_point():
            raise ValueError(f"input_scale must be one float, found {value.dtype} {list(value.shape)}")
        out = value.detach().float().reshape(1).contiguous()
        if not (torch.isfinite(out).all() and float(out[0]) > 0):
            raise ValueError(f"input_scale must be positive, found {float(out[0])}")
        return out


__all__ = ["Activation", "Kind", "PackedWeight", "Scheme", "Tiles"]
