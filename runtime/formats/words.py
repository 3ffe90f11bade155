"""compressed-tensors' `pack-quantized` layout: codes of 2, 3, 4 or 8 bits in int32 words.

    weight_packed      int32 [N, ceil(K · bits / 32)]: code + 2^(bits − 1), along K, the first in the lowest bits
    weight_scale       [N, G]
    weight_shape       int64 [2] = [N, K]
    weight_zero_point  int32 [ceil(N · bits / 32), G]: zero + 2^(bits − 1), along N; only where groups have zero points
    weight_g_idx       int32 [K]: the group of each input; only with activation order

Codes of 3 bits run across the borders of words, as the library packs them since 2026.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.activation_order import group_index, read_order
from runtime.formats.bits import pack_bits, unpack_bits
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import Tensors, check_codes, check_finite, expect_dtype, expect_shape, take
from runtime.formats.zero_points import whole_zeros


@dataclass(frozen=True)
class Words:
    """A layer as it was read: `words` as stored, `scale` and `offset` (N, G) float32, and the input order.

    offset  scale · zero, or None for a symmetric layer.
    order   (K,) int64, by which the columns are to be taken so that groups are whole; None where they are.
    """

    words: Tensor
    inputs: int
    scale: Tensor
    offset: Tensor | None
    order: Tensor | None


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """(N, K) int8 codes of 2, 3, 4 or 8 bits to words; a ragged last word is filled up with zero bits."""
    raw = (_by_rows(codes).to(torch.int16) + (1 << bits - 1)).to(torch.uint8)
    octets = pack_bits(torch.nn.functional.pad(raw, (0, -codes.shape[1] % 32)), bits)
    # Four bytes are a word: the file's words are little-endian, as is every host that safetensors runs on.
    return _by_rows(octets).view(torch.int32)[:, : _words(codes.shape[1], bits)].contiguous()


def unpack_words(words: Tensor, inputs: int, bits: int) -> Tensor:
    """Words [N, ceil(K · bits / 32)] to (N, K) int8 codes; K = `inputs`."""
    return unpack_bits(_by_rows(words).view(torch.uint8), inputs, bits)


def write_words(prefix: str, packed: PackedWeight, scale: Tensor) -> dict[str, Tensor]:
    """The layer's tensors but for its bias; `scale` as it is to be stored.

    Codes go back to the order of the inputs, with `weight_g_idx` to say which groups they are of. Raises ValueError for
    codes out of the scheme's range, and for an offset that no whole zero points of that range give.
    """
    bits, codes = packed.scheme.bits, packed.codes
    half = 1 << bits - 1
    check_codes(prefix, codes, -half, half - 1)
    tensors: dict[str, Tensor] = {}
    if packed.perm is not None:
        codes = codes[:, packed.perm.argsort()]
        tensors[f"{prefix}.weight_g_idx"] = group_index(packed.perm, codes.shape[1] // scale.shape[1])
    if not packed.scheme.symmetric:
        zeros = whole_zeros(packed)
        if zeros is None:
            raise ValueError(f"{prefix}: pack-quantized holds whole zero points, and this offset is none times scale")
        check_codes(f"{prefix} (zero points)", zeros, -half, half - 1)
        tensors[f"{prefix}.weight_zero_point"] = pack_words(zeros.to(torch.int8).t(), bits).t().contiguous()
    return tensors | {
        f"{prefix}.weight_packed": pack_words(codes, bits),
        f"{prefix}.weight_scale": scale,
        f"{prefix}.weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }


def stored_bits(tensors: Tensors, prefix: str, allowed: Iterable[int]) -> int:
    """The one of the `allowed` bits that fits `weight_packed` and `weight_shape`. Raises UserError for none or two."""
    n, k = _shape(tensors, prefix)
    name = f"{prefix}.weight_packed"
    words = take(tensors, name)
    fitting = [bits for bits in allowed if tuple(words.shape) == (n, _words(k, bits))]
    if len(fitting) == 1:
        return fitting[0]
    raise UserError(
        f"tensor {name} has shape {list(words.shape)}, which does not say in how many bits it holds [{n}, {k}]"
        f" (config.json has {' and '.join(map(str, allowed)) or 'none'}; 3-bit words of compressed-tensors before 2026"
        " are not read: compress the model again)"
    )


def read_words(tensors: Tensors, prefix: str, bits: int) -> Words:
    """A layer's words and what belongs to its groups.

    Raises UserError naming the tensor for a missing, misshapen or non-finite one, and for groups of unequal size.
    """
    n, k = _shape(tensors, prefix)
    name = f"{prefix}.weight_packed"
    words = expect_shape(name, expect_dtype(name, take(tensors, name), torch.int32), (n, _words(k, bits)))
    name = f"{prefix}.weight_scale"
    scale = check_finite(name, take(tensors, name)).float()
    if scale.ndim != 2 or scale.shape[0] != n or scale.shape[1] < 1 or k % scale.shape[1]:
        raise UserError(
            f"tensor {name} has shape {list(scale.shape)}, expected [{n}, groups] with groups that divide {k} inputs"
        )
    groups, offset, name = scale.shape[1], None, f"{prefix}.weight_zero_point"
    if name in tensors:
        packed = expect_shape(name, expect_dtype(name, tensors[name], torch.int32), (_words(n, bits), groups))
        offset = scale * unpack_words(packed.t(), n, bits).t()
    name = f"{prefix}.weight_g_idx"
    order = read_order(name, tensors[name], k, groups) if name in tensors else None
    return Words(words, k, scale.contiguous(), offset, order)


def _by_rows(tensor: Tensor) -> Tensor:
    """The same values row by row in memory. `contiguous` leaves a single row or column the strides that it has."""
    return tensor.flatten().view(tensor.shape)


def _words(codes: int, bits: int) -> int:
    return -(-codes * bits // 32)


def _shape(tensors: Tensors, prefix: str) -> tuple[int, int]:
    name = f"{prefix}.weight_shape"
    n, k = (int(size) for size in expect_shape(name, take(tensors, name), (2,)))
    if n < 1 or k < 1:
        raise UserError(f"tensor {name} must hold two positive sizes, found {n} and {k}")
    return n, k
