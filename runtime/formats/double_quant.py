"""bitsandbytes' double quantisation: the absmax of nf4's blocks, itself stored in 8 bits (Dettmers et al. 2023, QLoRA).

The mean of all absmax is subtracted, and blocks of 256 differences are stored as indices into the signed dynamic map
(Dettmers et al. 2021) with one float32 absmax each.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

NESTED_BLOCK = 256
# The library's CPU kernel looks the nearest entry up in a table of this many equal bins over −1..1.
_BINS = 65536


@dataclass(frozen=True)
class NestedAbsmax:
    """Doubly quantised absmax of n blocks.

    codes   (n,) uint8: indices into `table`.
    absmax  (ceil(n / 256),) float32.
    table   (256,) float32, rising.
    offset  what was subtracted: a float32 value as a Python float.
    """

    codes: Tensor
    absmax: Tensor
    table: Tensor
    offset: float
    block: int = NESTED_BLOCK

    def undo(self) -> Tensor:
        """The n absmax as every reader sees them, float32: table[code] · absmax + offset."""
        scale = self.absmax.repeat_interleave(self.block)[: self.codes.numel()]
        return self.table[self.codes.long()] * scale + torch.tensor(self.offset, dtype=torch.float32)


@cache
def dynamic_map() -> Tensor:
    """The signed 8-bit dynamic map, (256,) float32 rising from −0.993 to 1.

    Exponents 10^−6 … 1; the i-th has 2^i fractions, the midpoints of equal parts of 0.1..1, with both signs; and 0, 1.
    """
    entries = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        # The product is in float32, as the library has it: another rounding would be another table.
        middles = (10 ** (exponent - 6)) * ((bounds[:-1] + bounds[1:]) / 2.0)
        entries += middles.tolist() + (-middles).tolist()
    return torch.tensor(sorted(entries), dtype=torch.float32)


@cache
def _nearest_by_bin() -> Tensor:
    table = dynamic_map()
    values = -1.0 + 2.0 * torch.arange(_BINS, dtype=torch.float32) / (_BINS - 1)
    return torch.bucketize(values, 0.5 * (table[:-1] + table[1:]), out_int32=True).to(torch.uint8)


def double_quantize(absmax: Tensor) -> NestedAbsmax:
    """Compresses (n,) float32 to the bytes that bitsandbytes 0.50 writes on x86 CPUs.

    Its CUDA kernel searches the exact nearest entry, so a file written there can differ by one index where a value lies
    near the middle of two. Blocks of zero differences get index 0, which is right: they are multiplied by 0.
    Raises ValueError where the mean of `absmax` is not finite.
    """
    offset = absmax.mean()
    if not bool(torch.isfinite(offset)):
        raise ValueError("the mean absmax is not finite: the weights are, or add up to more than float32 holds")
    rest = absmax - offset
    blocks = torch.nn.functional.pad(rest, (0, -rest.numel() % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    largest = blocks.abs().amax(dim=1)
    # 0 · inf of an empty (or subnormal) block is NaN, which the library's cast turns into bin 0.
    unit = (blocks * (1.0 / largest).unsqueeze(1)).nan_to_num(nan=-1.0).clamp(-1.0, 1.0)
    bins = ((unit + 1.0) * 0.5 * (_BINS - 1) + 0.5).to(torch.int32)
    codes = _nearest_by_bin()[bins.long()].flatten()[: rest.numel()].contiguous()
    return NestedAbsmax(codes, largest, dynamic_map().clone(), float(offset))
