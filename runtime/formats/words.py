"""compressed-tensors' `pack-quantized` layout: 4 or 8 bit codes in int32 words.

weight_packed  int32 [N, ceil(K · bits / 32)]: code + 2^(bits − 1), along K, the first in the lowest bits
weight_scale   [N, G]
weight_shape   int64 [2] = [N, K]
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.nibbles import unpack_nibbles
from runtime.formats.tensors import Tensors, check_codes, check_finite, expect_dtype, expect_shape, take


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """(N, K) int8 codes of 4 or 8 bits to words; a ragged last word is filled up with zero bits."""
    raw = (codes.to(torch.int16) + (1 << bits - 1)).to(torch.uint8)
    raw = torch.nn.functional.pad(raw, (0, -codes.shape[1] % (32 // bits)))
    octets = raw if bits == 8 else raw[:, 0::2] | raw[:, 1::2] << 4
    # Four bytes are a word: the file's words are little-endian, as is every host that safetensors runs on.
    return octets.contiguous().view(torch.int32)


def unpack_words(words: Tensor, inputs: int, bits: int) -> Tensor:
    """Words [N, ceil(K · bits / 32)] to (N, K) int8 codes; K = `inputs`."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 4:
        return unpack_nibbles(octets, minus=8)[:, :inputs].contiguous()
    # Turning the top bit takes 128 off, modulo 256.
    return (octets[:, :inputs] ^ 128).contiguous().view(torch.int8)


def write_words(prefix: str, codes: Tensor, scale: Tensor, bits: int) -> dict[str, Tensor]:
    """The three tensors of a layer; `scale` as it is to be stored. Raises ValueError for codes out of range."""
    half = 1 << bits - 1
    return {
        f"{prefix}.weight_packed": pack_words(check_codes(prefix, codes, -half, half - 1), bits),
        f"{prefix}.weight_scale": scale,
        f"{prefix}.weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }


def stored_bits(tensors: Tensors, prefix: str, allowed: Iterable[int]) -> int:
    """The one of the `allowed` bits that fits `weight_packed` and `weight_shape`. Raises UserError for none or two."""
    n, k = _shape(tensors, prefix)
    name = f"{prefix}.weight_packed"
    words = take(tensors, name)
    fitting = [bits for bits in allowed if tuple(words.shape) == (n, -(-k * bits // 32))]
    if len(fitting) != 1:
        raise UserError(
            f"tensor {name} has shape {list(words.shape)}, which does not say in how many bits it holds [{n}, {k}]"
            f" (config.json has {' and '.join(map(str, allowed)) or 'none'})"
        )
    return fitting[0]


def read_words(tensors: Tensors, prefix: str, bits: int) -> tuple[Tensor, Tensor, int]:
    """Words, scale (N, G) float32 and inputs K of a symmetric layer in its own input order.

    Raises UserError naming the tensor for a missing, misshapen, non-finite, asymmetric or reordered one.
    """
    for name in (f"{prefix}.weight_zero_point", f"{prefix}.weight_g_idx"):
        if name in tensors:
            raise UserError(f"tensor {name}: asymmetric and reordered packed weights are not read yet")
    n, k = _shape(tensors, prefix)
    name = f"{prefix}.weight_packed"
    words = expect_shape(name, expect_dtype(name, take(tensors, name), torch.int32), (n, -(-k * bits // 32)))
    name = f"{prefix}.weight_scale"
    scale = check_finite(name, take(tensors, name)).float()
    if scale.ndim != 2 or scale.shape[0] != n or scale.shape[1] < 1 or k % scale.shape[1]:
        raise UserError(
            f"tensor {name} has shape {list(scale.shape)}, expected [{n}, groups] with groups that divide {k} inputs"
        )
    return words, scale.contiguous(), k


def _shape(tensors: Tensors, prefix: str) -> tuple[int, int]:
    name = f"{prefix}.weight_shape"
    n, k = (int(size) for size in expect_shape(name, take(tensors, name), (2,)))
    if n < 1 or k < 1:
        raise UserError(f"tensor {name} must hold two positive sizes, found {n} and {k}")
    return n, k
