"""The one description of a quantised weight that every kernel takes, whatever layout it was stored in."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from runtime.formats.schemes import Activation, Kind, Scheme


@dataclass(frozen=True)
class PackedWeight:
    """A linear layer's weight: y[n] = Σ_k value(codes[n, k]) · scale[n, k // group] · x[k] − offset·Σx (+ bias).

    Unpacked in memory (one code a byte): bit layouts belong to the format files, and kernels repack when they load.

    codes   (N, K) int8: signed integers for int8/int4/ternary, of `scheme.bits` bits; for nf4 the index 0..15 of the
            level; for fp8 the values themselves, float8_e4m3fn.
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

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs N, inputs K)."""
        return self.codes.shape[0], self.codes.shape[1] * (1 if self.nibbles is None else 2)


__all__ = ["Activation", "Kind", "PackedWeight", "Scheme"]
