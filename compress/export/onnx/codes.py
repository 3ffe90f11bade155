"""Our codes as ONNX Runtime's contrib operators hold them: repacked, never rounded again.

MatMulNBits (com.microsoft): `B` uint8 (N, blocks, block · bits / 8), codes from 0 up and the first in the lowest bits;
scales (N, blocks); zero points either packed like the codes, (N, ceil(blocks · bits / 8)), or floats (N, blocks), and
2^(bits − 1) where there are none. Blocks are powers of two from 16 on, and the last of a row may be cut short.
MatMulBnb4: bitsandbytes' own bytes, (N · K / 2,), the first code in the high half, and one absmax per block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import UserError
from runtime.formats.codes import pack_bits, whole_zeros
from runtime.formats.packed import PackedWeight

# The operator's least block, and the largest for which ONNX Runtime has quick kernels on CPUs.
LEAST, MOST = 16, 128


@dataclass(frozen=True)
class Blocks:
    """A weight (N, K) = (`outputs`, `inputs`) as MatMulNBits takes it.

    codes   (N, blocks, block · bits / 8) uint8.
    scales  (N, blocks) float32.
    zeros   (N, ceil(blocks · bits / 8)) uint8, (N, blocks) float32, or None: 2^(bits − 1).
    """

    bits: int
    block: int
    inputs: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    @property
    def outputs(self) -> int:
        """N."""
        return self.codes.shape[0]


def container(packed: PackedWeight) -> int:
    """Bits that a code takes: 3-bit codes lie in 4, those of 5 and 6 in 8."""
    return {2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 8: 8}[packed.scheme.bits]


def block_size(name: str, packed: PackedWeight) -> int:
    """Inputs of a block: the largest power of two that divides the weight's groups, at most 128.

    Where a row has one scale any block will do: one that divides the row, if there is any.

    Raises UserError naming the layer where no block of 16, the operator's least, divides a group.
    """
    inputs, group = packed.shape[1], packed.scheme.group_size
    if group == 0:
        whole = min(inputs & -inputs, MOST)
        return whole if whole >= LEAST else min(MOST, max(LEAST, 1 << (inputs - 1).bit_length()))
    size = min(group & -group, MOST)
    if size < LEAST:
        raise UserError(
            f"{name}: expected groups of a multiple of {LEAST} inputs, as MatMulNBits has them, found {group}:"
            f" compress it with group_size 32, 64 or 128"
        )
    return size


def to_blocks(name: str, packed: PackedWeight, bits: int | None = None) -> Blocks:
    """Integers of 2 to 8 bits and ternary codes as MatMulNBits; codes in activation order stay in it.

    bits  of the container (None: the least that holds the codes). Raises UserError as `block_size` does.
    """
    bits = container(packed) if bits is None else bits
    block, half = block_size(name, packed), 1 << bits - 1
    n, k = packed.shape
    count = -(-k // block)
    raw = (packed.codes.to(torch.int16) + half).to(torch.uint8)
    # What lies behind the row meets inputs that are 0; the code for 0 keeps it harmless to any reader.
    raw = torch.nn.functional.pad(raw, (0, count * block - k), value=half)
    # Blocks that share one of our scales.
    repeats = packed.scheme.group_size // block or count
    scales = packed.scale.repeat_interleave(repeats, dim=1)
    zeros = None
    if packed.offset is not None:
        whole = whole_zeros(packed)
        if whole is None:
            zeros = (packed.offset / packed.scale + half).repeat_interleave(repeats, dim=1)
        else:
            octets = (whole + half).repeat_interleave(repeats, dim=1).to(torch.uint8)
            zeros = pack_bits(torch.nn.functional.pad(octets, (0, -count % 8)), bits)[:, : -(-count * bits // 8)]
    codes = pack_bits(raw, bits).view(n, count, block * bits // 8)
    return Blocks(bits, block, k, codes.contiguous(), scales.float().contiguous(), zeros)
