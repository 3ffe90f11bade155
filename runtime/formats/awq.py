"""AWQ's layout "gemm": 4-bit codes with zero points, packed along the outputs.

    qweight  int32 [K, N / 8]: nibble i of word c is column 8c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
    qzeros   int32 [G, N / 8]: zero points, packed the same way
    scales   float16 (or bfloat16, float32) [G, N]
    bias     [N]

Weights are (code − zero) · scale, both counted from 0. In memory both are 8 less.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats import int4
from runtime.formats.codes import whole_zeros
from runtime.formats.configuration import WHERE
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import SCALES, Tensors, as_stored, check_codes, fetch, read_bias, with_bias

# Column of a word's eight that each nibble holds, the lowest first.
_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_PER_WORD = 8


def check(config: Mapping[str, Any]) -> None:
    """Raises UserError for a configuration that is malformed, or whose layout is not read."""
    version = config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm"
    if str(version).lower() != "gemm":
        raise UserError(f"{WHERE}: of AWQ's layouts 'gemm' is read, found {version!r}; save the model as 'gemm'")
    bits, size = config.get("bits", 4), config.get("group_size", 128)
    if bits != 4 or type(size) is not int or (size != -1 and size < 1):
        raise UserError(
            f"{WHERE}: AWQ is read with 4 bits in groups of 1 and more inputs or -1, found bits {bits!r}, group_size"
            f" {size!r}"
        )


def read(config: Mapping[str, Any], tensors: Tensors, prefix: str, unpack: bool = True) -> PackedWeight | None:
    """A layer under a configuration that has passed `check`; None where it is stored plain.

    Raises UserError naming the tensor that is missing or damaged.
    """
    name = f"{prefix}.qweight"
    if name not in tensors:
        return None
    words = fetch(tensors, name, torch.int32, matrix=True)
    k, n = words.shape[0], words.shape[1] * _PER_WORD
    wanted = config.get("group_size", 128)
    size = k if wanted == -1 else wanted
    if k % size:
        raise UserError(f"tensor {name} has {k} inputs, which groups of {size} (config.json) do not divide")
    groups = k // size
    zeros = fetch(tensors, f"{prefix}.qzeros", torch.int32, shape=(groups, words.shape[1]))
    steps = fetch(tensors, f"{prefix}.scales", *SCALES, shape=(groups, n)).float().t().contiguous()
    zero = _unpack(zeros).t().float()
    symmetric = not bool(zero.any())
    return PackedWeight(
        int4.scheme(0 if wanted == -1 else size, symmetric=symmetric),
        _unpack(words).t().contiguous(),
        steps,
        offset=None if symmetric else steps * zero,
        bias=read_bias(tensors, prefix, n),
    )


def _unpack(words: Tensor) -> Tensor:
    """[rows, N / 8] words to (rows, N) int8 codes less 8."""
    octets = words.flatten().view(torch.uint8).view(words.shape[0], -1, _PER_WORD // 2)
    nibbles = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(2).to(torch.int8) - 8
    codes = torch.empty_like(nibbles)
    codes[:, :, _COLUMNS] = nibbles
    return codes.flatten(1)


def _pack(codes: Tensor) -> Tensor:
    """(rows, N) int8 codes less 8 to [rows, N / 8] words."""
    nibbles = (codes.reshape(codes.shape[0], -1, _PER_WORD) + 8).to(torch.uint8)[:, :, _COLUMNS]
    octets = (nibbles[:, :, 0::2] | nibbles[:, :, 1::2] << 4).flatten()
    return octets.view(torch.int32).view(codes.shape[0], -1)


def to_tensors(
    packed: PackedWeight, prefix: str, dtype: torch.dtype = torch.bfloat16, *, group_size: int | None = None
) -> dict[str, Tensor]:
    """The layer's tensors for a file; `dtype` is the bias's, and scales are float16.

    group_size  of the file, where it divides the weight's own: each scale is then repeated. -1: one per row.

    Raises ValueError where the layout cannot hold the weight exactly: other than 4 bits, activation order, offsets that
    no whole zero points give, outputs that do not fill words, scales that float16 does not hold.
    """
    n, k = packed.shape
    zeros = whole_zeros(packed)
    if packed.scheme.kind not in ("int4", "ternary") or packed.perm is not None or zeros is None:
        raise ValueError(f"{prefix}: AWQ's layout holds 4-bit integers with whole zero points in input order")
    if n % _PER_WORD:
        raise ValueError(f"{prefix}: AWQ packs outputs in eights, and {n} is no multiple of 8")
    if bool((zeros < -8).any()) or bool((zeros > 7).any()):
        raise ValueError(f"{prefix}: AWQ holds zero points of 0 to 15, found others")
    own = packed.scheme.group_size or k
    size = own if group_size is None else k if group_size == -1 else group_size
    if own % size or k % size:
        raise ValueError(f"{prefix}: groups of {own} cannot be cut into groups of {size}")
    scale = as_stored(f"{prefix}.scales", packed.scale, torch.float16).repeat_interleave(own // size, dim=1)
    zeros = zeros.repeat_interleave(own // size, dim=1)
    check_codes(prefix, packed.codes, -8, 7)
    tensors = {
        f"{prefix}.qweight": _pack(packed.codes.t()),
        f"{prefix}.qzeros": _pack(zeros.to(torch.int8).t()),
        f"{prefix}.scales": scale.t().contiguous(),
    }
    return with_bias(tensors, packed, prefix, dtype)


def hf_config(group_size: int, skip: Sequence[str] = ()) -> dict[str, Any]:
    """`quantization_config` of config.json; `skip` are the linear modules that stay as they are."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(skip) or None,
    }
