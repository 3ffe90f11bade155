"""ternary-1.25: codes −1, 0, 1, of every four inputs exactly one 0: five bits for four; docs/ternary.md specifies it.

    weight_patterns  uint8 [N, ceil(5 · ceil(K / 4) / 8)]: a row's patterns of five bits, the first in the lowest bits
    weight_scale     [N, 1], 16 or 32 bit
    weight_shape     int64 [2] = [N, K]

A pattern's bits 3 and 4 say where the 0 is. Bits 0 to 2 are set where the first three codes are negative, and the
fourth is the product of their signs. One of the four signs is that of the 0, whose bit is free to make the product
right: so three bits hold any three signs, and kernels have signs and places from two small tables. Of a last four
that is cut short only the codes that there are count: all of them may be ±1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.codes import pack_bits, unpack_bits
from runtime.formats.configuration import WHERE, check_version, our_own
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.schemes import SCHEMES
from runtime.formats.tensors import (
    SCALES,
    Tensors,
    as_stored,
    expect_shape,
    fetch,
    read_bias,
    round_scale,
    stored_scale_dtype,
    with_bias,
)

FOUR, BITS = 4, 5
METHOD = "specpress-ternary"


def scheme() -> Scheme:
    """ternary-1.25, a scale per output row; activations per token."""
    return SCHEMES["ternary-1.25"].scheme()


@cache
def table() -> Tensor:
    """(32, 4) int8: the four codes of each pattern."""
    patterns = torch.arange(1 << BITS)
    signs = 1 - 2 * (patterns.unsqueeze(1) >> torch.arange(3) & 1)
    codes = torch.cat([signs, signs.prod(1, keepdim=True)], dim=1)
    codes[patterns, patterns >> 3] = 0
    return codes.to(torch.int8)


def nearest(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (N, K) int8 and scales (N, 1) float32 of least squared error, for a weight (N, K) of any float dtype.

    Of every four weights the smallest magnitude becomes 0 (of equal ones the first), the others their signs, 0 counting
    as positive; of a short last four none need. The scale is the mean magnitude of a row's other weights.
    """
    (n, k), values = weight.shape, weight.float()
    fours = torch.nn.functional.pad(values, (0, -k % FOUR)).view(n, -1, FOUR)
    places = fours.abs().argmin(-1, keepdim=True)
    codes = torch.where(fours < 0, -1, 1).to(torch.int8).scatter_(-1, places, 0).view(n, -1)[:, :k].contiguous()
    # Summed in float64, so that the order of a threaded sum does not reach the file.
    size = (values * codes).sum(1, keepdim=True, dtype=torch.float64)
    return codes, (size / codes.abs().sum(1, keepdim=True).clamp(min=1)).float()


def pack(
    weight: Tensor, group_size: int = 0, *, bias: Tensor | None = None, scale_dtype: torch.dtype | None = None
) -> PackedWeight:
    """Rounds (N, K) of any float dtype as `nearest` has it.

    `scale_dtype` is what scales will be stored in (None: `stored_scale_dtype` of the weight's). Raises ValueError for a
    `group_size` other than 0, and for a weight that is not finite.
    """
    if group_size:
        raise ValueError(f"ternary-1.25 has one scale per output row (group_size 0), found {group_size}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the weight has values that are NaN or infinite")
    codes, scale = nearest(weight)
    scale = round_scale(scale, scale_dtype or stored_scale_dtype(weight.dtype))
    return PackedWeight(scheme(), codes, scale, bias=None if bias is None else bias.float())


def random_weight(shape: tuple[int, int], generator: torch.Generator) -> PackedWeight:
    """Random patterns for a layer (N, K), of variance 1 / K; scales lie within a quarter of one another."""
    n, k = shape
    where = generator.device
    patterns = torch.randint(0, 1 << BITS, (n, -(-k // FOUR)), dtype=torch.uint8, device=where, generator=generator)
    # Three of four weights are ±1.
    varied = torch.empty(n, 1, device=where).uniform_(0.75, 1.25, generator=generator) / (0.75 * k) ** 0.5
    return PackedWeight(scheme(), decode(patterns, k), round_scale(varied, torch.bfloat16))


def encode(codes: Tensor) -> Tensor:
    """(N, ceil(K / 4)) uint8 patterns of codes (N, K) int8.

    Raises ValueError for codes other than −1, 0 and 1, and where a four has not one 0 (a short last one: more).
    """
    n, k = codes.shape
    fours = torch.nn.functional.pad(codes, (0, -k % FOUR), value=1).view(n, -1, FOUR)
    if k % FOUR:
        last = fours[:, -1]
        last[:, k % FOUR] = (last[:, : k % FOUR] == 0).any(1)
    zeros = fours == 0
    if bool((fours.abs() > 1).any()) or bool((zeros.sum(-1) != 1).any()):
        raise ValueError("ternary-1.25 holds codes -1, 0 and 1, of every four of a row exactly one 0; found others")
    places, negative = zeros.to(torch.uint8).argmax(-1), (fours < 0).to(torch.uint8)
    # The sign of the 0 makes up for the product of the others.
    odd = negative.sum(-1) & 1
    free = torch.where(places < 3, odd << places, 0)
    signs = negative[..., 0] | negative[..., 1] << 1 | negative[..., 2] << 2
    return (signs | free | places << 3).to(torch.uint8)


def decode(patterns: Tensor, inputs: int) -> Tensor:
    """Codes (N, K) int8 of patterns (N, ceil(K / 4)) uint8; K = `inputs`."""
    codes = table().to(patterns.device)[patterns.long()]
    return codes.flatten(1)[:, :inputs].contiguous()


def to_tensors(
    packed: PackedWeight, prefix: str, dtype: torch.dtype = torch.bfloat16, scale_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The layer's tensors for a file; `dtype` is the model's, which the bias has; scales have `scale_dtype`.

    Raises ValueError for codes that `encode` refuses, an offset or a permutation, and a scale or bias that its dtype
    would round.
    """
    if packed.scheme != scheme() or packed.offset is not None or packed.perm is not None:
        raise ValueError(f"{prefix}: ternary-1.25 is written of such codes in input order, found {packed.scheme}")
    patterns = encode(packed.codes)
    octets = pack_bits(torch.nn.functional.pad(patterns, (0, -patterns.shape[1] % 8)), BITS)
    name = f"{prefix}.weight_scale"
    tensors = {
        f"{prefix}.weight_patterns": octets[:, : row_bytes(packed.shape[1])].contiguous(),
        name: as_stored(name, packed.scale, scale_dtype or stored_scale_dtype(dtype)),
        f"{prefix}.weight_shape": torch.tensor(packed.shape, dtype=torch.int64),
    }
    return with_bias(tensors, packed, prefix, dtype)


def row_bytes(inputs: int) -> int:
    """Bytes of a row's patterns."""
    return -(-BITS * -(-inputs // FOUR) // 8)


def unpack_patterns(octets: Tensor, inputs: int) -> Tensor:
    """(N, ceil(K / 4)) uint8 patterns of a file's rows (N, `row_bytes`); K = `inputs`."""
    half = 1 << BITS - 1
    return (unpack_bits(octets, -(-inputs // FOUR), BITS) + half).to(torch.uint8)


def holds(tensors: Tensors, prefix: str) -> bool:
    """Whether the layer is stored so."""
    return f"{prefix}.weight_patterns" in tensors


def from_tensors(tensors: Tensors, prefix: str) -> PackedWeight:
    """Reads a layer. Raises UserError naming the tensor that is missing, misshapen or not finite."""
    name = f"{prefix}.weight_shape"
    n, k = (int(size) for size in fetch(tensors, name, torch.int64, shape=(2,)))
    if n < 1 or k < 1:
        raise UserError(f"tensor {name} must hold two positive sizes, found {n} and {k}; fetch the file again")
    name = f"{prefix}.weight_patterns"
    octets = expect_shape(name, fetch(tensors, name, torch.uint8), (n, row_bytes(k)))
    scale = fetch(tensors, f"{prefix}.weight_scale", *SCALES, shape=(n, 1)).float()
    return PackedWeight(scheme(), decode(unpack_patterns(octets, k), k), scale, bias=read_bias(tensors, prefix, n))


def read(config: Mapping[str, Any], tensors: Tensors, prefix: str, unpack: bool = True) -> PackedWeight | None:
    """A layer under a configuration that has passed `check`; None where it is stored otherwise."""
    return from_tensors(tensors, prefix) if holds(tensors, prefix) else None


def check(config: Mapping[str, Any]) -> None:
    """Raises UserError for a configuration of a later version, or one that is malformed."""
    check_version(config)
    layers = config.get("layers")
    if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
        raise UserError(f"{WHERE}.layers must list the modules that are stored so, found {str(layers)[:80]}")


def hf_config(layers: Mapping[str, Scheme], skip: Sequence[str] = ()) -> dict[str, Any]:
    """`quantization_config` of config.json: the layers by module, and the linear modules that stay."""
    return our_own(METHOD, skip, layers=sorted(layers))


def as_ternary(packed: PackedWeight) -> PackedWeight:
    """Exactly the same weight as ternary codes of two bits, each row with its own scale.

    Raises ValueError for another kind.
    """
    if packed.scheme != scheme():
        raise ValueError(f"expected ternary-1.25, found {packed.scheme.kind}")
    return replace(packed, scheme=SCHEMES["ternary"].scheme())
