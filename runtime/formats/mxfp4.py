"""mxfp4: floats of four bits in blocks of 32 inputs that share a power of two (OCP Microscaling, MX 1.0), as gpt-oss
has its experts. Read only.

    NAME_blocks  uint8 [E, N, K/32, 16]: of E experts two codes a byte, the first in the low half
    NAME_scales  uint8 [E, N, K/32]: the exponents plus 127

A code is a sign, two bits of exponent and one of fraction: a weight is LEVELS[code] · 2^(scale − 127), and twice a
level is a whole number, so that products of integers lose nothing of it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.codes import unpack_nibbles
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.tensors import Tensors, fetch

BLOCK = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEVELS = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)], dtype=torch.float32)
"""What the sixteen codes stand for, before the block's scale."""

INT8_LEVELS = (2 * LEVELS).to(torch.int8)
"""The same in halves."""

_SCHEME = Scheme("mxfp4", 4, BLOCK, True, "int8-group")
_NO_NUMBER = 255


def check(config: Mapping[str, Any]) -> None:
    """Nothing of the configuration is needed: the tensors' names say which experts are stored so."""


def read(config: Mapping[str, Any], tensors: Tensors, prefix: str, unpack: bool = True) -> PackedWeight | None:
    """None: of a model's layers only fused experts are stored so (`read_experts`)."""


def holds(names: frozenset[str], name: str) -> bool:
    """Whether the fused experts `name` are stored so."""
    return f"{name}_blocks" in names


def read_experts(tensors: Tensors, name: str, unpack: bool = True) -> list[PackedWeight]:
    """The weight (N, K) of each expert; `unpack` False leaves the codes two a byte.

    Raises UserError naming the tensor that is missing, misshapen, or whose scales are no numbers.
    """
    blocks = fetch(tensors, f"{name}_blocks", torch.uint8)
    if blocks.ndim != 4 or blocks.shape[3] != BLOCK // 2 or not blocks.numel():
        raise UserError(f"tensor {name}_blocks must be (experts, outputs, blocks, 16), found {list(blocks.shape)}")
    exponents = fetch(tensors, f"{name}_scales", torch.uint8, shape=tuple(blocks.shape[:3]))
    if bool((exponents == _NO_NUMBER).any()):
        raise UserError(f"tensor {name}_scales holds {_NO_NUMBER}, which is no number; fetch the file again")
    return [_weight(codes, own, unpack) for codes, own in zip(blocks.flatten(2), exponents, strict=True)]


def _weight(codes: Tensor, exponents: Tensor, unpack: bool) -> PackedWeight:
    """An expert of codes (N, K / 2) two a byte and exponents (N, K / 32)."""
    scale = torch.ldexp(torch.ones(exponents.shape), exponents.to(torch.int32) - 127)
    if not unpack:
        return PackedWeight(_SCHEME, codes, scale, nibbles="low")
    return PackedWeight(_SCHEME, unpack_nibbles(codes), scale)
