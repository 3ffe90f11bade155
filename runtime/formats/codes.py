"""Codes as files store them: streams of bits, nibbles, whole zero points, the order of inputs; and the layout that
compressed-tensors makes of these, `pack-quantized`, with codes of 2 to 8 bits in int32 words:

    weight_packed      int32 [N, ceil(K · bits / 32)]: code + 2^(bits − 1), along K, the first in the lowest bits
    weight_scale       [N, G]
    weight_shape       int64 [2] = [N, K]
    weight_zero_point  int32 [ceil(N · bits / 32), G]: zero + 2^(bits − 1), along N; only where groups have zero points
    weight_g_idx       int32 [K]: the group of each input; only with activation order

Codes of 3, 5, 6 or 7 bits run across the borders of words, as the library packs them since 2026.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import GRID_KINDS, KINDS, Scheme
from runtime.formats.tensors import (
    Tensors,
    check_codes,
    expect_dtype,
    expect_shape,
    fetch,
    group_width,
    read_bias,
    restore_order,
    spread,
    take,
)
from runtime.native import binding
from runtime.native.arena import large


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """(N, K) int8 codes of 2 to 8 bits to words; a ragged last word is filled up with zero bits."""
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


def stored_bits(tensors: Tensors, prefix: str, allowed: Iterable[int], named: Collection[int] = ()) -> int:
    """The one of the `allowed` bits that fits `weight_packed` and `weight_shape`; of several the one that is `named`.

    Raises UserError for none or two.
    """
    n, k = _shape(tensors, prefix)
    name = f"{prefix}.weight_packed"
    words = take(tensors, name)
    fitting = [bits for bits in allowed if tuple(words.shape) == (n, _words(k, bits))]
    if len(fitting) > 1:
        # A row of few inputs takes the same words in 2, 3 and 4 bits.
        fitting = [bits for bits in fitting if bits in named]
    if len(fitting) == 1:
        return fitting[0]
    raise UserError(
        f"tensor {name} has shape {list(words.shape)}, which does not say in how many bits it holds [{n}, {k}]"
        f" (config.json has {' and '.join(map(str, allowed)) or 'none'}; 3-bit words of compressed-tensors before 2026"
        " are not read: compress the model again)"
    )


def read_words(tensors: Tensors, prefix: str, bits: int, unpack: bool = True) -> PackedWeight:
    """A layer's codes, in groups of K over the scales of a row: int8 of 8 bits, else a grid's.

    unpack  False leaves 4-bit codes two a byte where a row is whole words and the inputs are in their own order.

    Raises UserError naming the tensor for a missing, misshapen or non-finite one, and for groups of unequal size.
    """
    n, k = _shape(tensors, prefix)
    name = f"{prefix}.weight_packed"
    words = fetch(tensors, name, torch.int32, shape=(n, _words(k, bits)))
    name = f"{prefix}.weight_scale"
    scale = fetch(tensors, name).float()
    if scale.ndim != 2 or scale.shape[0] != n or scale.shape[1] < 1 or k % scale.shape[1]:
        raise UserError(
            f"tensor {name} has shape {list(scale.shape)}, expected [{n}, groups] with groups that divide {k} inputs"
        )
    groups, offset, name = scale.shape[1], None, f"{prefix}.weight_zero_point"
    if name in tensors:
        packed = fetch(tensors, name, torch.int32, shape=(_words(n, bits), groups))
        offset = scale * unpack_words(packed.t(), n, bits).t()
    name = f"{prefix}.weight_g_idx"
    # All −1 is compressed-tensors' way of saying that there is no order.
    unordered = name in tensors and bool((expect_shape(name, tensors[name], (k,)) == -1).all())
    order = None if unordered else read_order(name, tensors, k, k // groups)
    whole = not unpack and bits == 4 and k % 8 == 0 and order is None
    codes = words.contiguous().view(torch.uint8) if whole else unpack_words(words, k, bits)
    return PackedWeight(
        Scheme(GRID_KINDS.get(bits, "int8"), bits, k // groups, offset is None, "int8-group"),
        codes if order is None else codes[:, order],
        scale.contiguous(),
        offset=offset,
        perm=order,
        bias=read_bias(tensors, prefix, n),
        nibbles="low" if whole else None,
    )


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


def pack_bits(raw: Tensor, bits: int) -> Tensor:
    """(N, K) uint8 values below 2^bits, K a multiple of 8, to (N, K · bits / 8) uint8 bytes.

    Raises ValueError for other widths than 2 to 8 bits.
    """
    _check_width(bits)
    if bits == 8:
        return raw
    if bits == 4:
        return raw[:, 0::2] | raw[:, 1::2] << 4
    # Eight codes are `bits` whole bytes.
    stream = torch.zeros(raw.shape[0], raw.shape[1] // 8, dtype=torch.int64, device=raw.device)
    for place in range(8):
        stream |= raw[:, place::8].to(torch.int64) << bits * place
    return torch.stack([(stream >> 8 * byte & 255).to(torch.uint8) for byte in range(bits)], dim=-1).flatten(1)


def unpack_bits(octets: Tensor, inputs: int, bits: int) -> Tensor:
    """(N, at least K · bits / 8) uint8 bytes to (N, K) int8 codes, 2^(bits − 1) taken off each; K = `inputs`.

    Raises ValueError for other widths than 2 to 8 bits.
    """
    _check_width(bits)
    if bits == 4:
        return unpack_nibbles(octets, minus=8)[:, :inputs].contiguous()
    if bits == 8:
        # Turning the top bit takes 128 off, modulo 256.
        return (octets[:, :inputs] ^ 128).contiguous().view(torch.int8)
    if bits > 4:
        return _by_shifts(octets, inputs, bits)
    fours = -(-inputs // 4)
    index = _fours(octets, fours, bits)
    codes = _table(bits, octets.device).index_select(0, index.flatten()).view(torch.int8)
    return codes.view(octets.shape[0], 4 * fours)[:, :inputs].contiguous()


def _check_width(bits: int) -> None:
    if not 2 <= bits <= 8:
        raise ValueError(f"codes of {bits} bits: expected 2 to 8")


def _by_shifts(octets: Tensor, inputs: int, bits: int) -> Tensor:
    """(N, K) int8 codes of 5 to 7 bits, for which a table would be too large: eight of them are `bits` bytes."""
    eights = -(-inputs // 8)
    octets = torch.nn.functional.pad(octets, (0, max(0, eights * bits - octets.shape[1])))
    stream = torch.zeros(octets.shape[0], eights, dtype=torch.int64, device=octets.device)
    for byte in range(bits):
        stream |= octets[:, byte : eights * bits : bits].to(torch.int64) << 8 * byte
    codes = torch.stack([stream >> bits * place & (1 << bits) - 1 for place in range(8)], dim=-1).flatten(1)
    return (codes[:, :inputs] - (1 << bits - 1)).to(torch.int8)


def _fours(octets: Tensor, count: int, bits: int) -> Tensor:
    """(N, count) int32: each time four codes of 2 or 3 bits, the first in the lowest bits."""
    if bits == 2:
        return octets[:, :count].to(torch.int32)
    # Three bytes are twice four codes.
    octets = torch.nn.functional.pad(octets, (0, max(0, -(-count // 2) * 3 - octets.shape[1])))
    first, middle, last = (octets[:, byte : -(-count // 2) * 3 : 3].to(torch.int32) for byte in range(3))
    return torch.stack((first | (middle & 15) << 8, middle >> 4 | last << 4), dim=-1).flatten(1)[:, :count]


def _table(bits: int, device: torch.device) -> Tensor:
    """(2^(4 · bits),) int32: the four bytes of codes that such a number stands for. A look-up beats shifts by far."""
    numbers = torch.arange(1 << 4 * bits, dtype=torch.int32, device=device).unsqueeze(1)
    places = bits * torch.arange(4, dtype=torch.int32, device=device)
    codes = (numbers >> places & (1 << bits) - 1) - (1 << bits - 1)
    return codes.to(torch.int8).view(torch.int32).squeeze(1)


def unpack_nibbles(packed: Tensor, minus: int = 0, high_first: bool = False) -> Tensor:
    """(…, n) uint8 to (…, 2n) int8 codes, `minus` taken off each; the first is in the low half, or in the high one.

    The native library does it where there is one: this is most of what loading a 4-bit model costs.
    """
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    library, _ = binding.library()
    if library is not None and packed.device.type == "cpu":
        packed = packed.contiguous()
        codes = large(2 * packed.numel()).view(torch.int8).view(shape)
        pool = binding.pool(binding.default_threads())
        library.specpress_unpack_nibbles(
            pool.handle, packed.data_ptr(), packed.numel(), high_first, minus, codes.data_ptr()
        )
        return codes
    halves = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    return torch.stack(halves, dim=-1).view(shape).to(torch.int8) - minus


def with_whole_codes(packed: PackedWeight) -> PackedWeight:
    """The same weight with its codes one a byte."""
    if packed.nibbles is None:
        return packed
    first = KINDS[packed.scheme.kind].ranges[0][0]
    return replace(packed, codes=unpack_nibbles(packed.codes, -first, packed.nibbles == "high"), nibbles=None)


def whole_zeros(packed: PackedWeight) -> Tensor | None:
    """(N, G) float32 whole numbers whose products with the scale are exactly the offset; None where there are none.

    Zeros where the weight has no offset. HQQ's offsets are no such products.
    """
    if packed.offset is None:
        return torch.zeros_like(packed.scale)
    zeros = torch.round(packed.offset / packed.scale)
    return zeros if torch.equal(zeros * packed.scale, packed.offset) else None


def dequantize_whole(packed: PackedWeight) -> Tensor:
    """(N, K) float32: (code − zero) · scale in one rounding, as compressed-tensors has it; else as `spread`.

    code · scale − offset rounds three times, which shows where a scale needs more than 16 bits.
    """
    zeros = None if packed.offset is None else whole_zeros(packed)
    if zeros is None:
        return spread(packed.codes.float(), packed)
    n, k = packed.shape
    values = packed.codes.view(n, -1, group_width(k, packed.scheme.group_size)).float() - zeros.unsqueeze(-1)
    return restore_order((values * packed.scale.unsqueeze(-1)).view(n, k), packed.perm)


def group_index(perm: Tensor, width: int) -> Tensor:
    """(K,) int32: the group of each input, where column j belongs to input perm[j] and groups are `width` columns."""
    index = torch.empty(perm.numel(), dtype=torch.int32)
    index[perm] = torch.arange(perm.numel(), dtype=torch.int32) // width
    return index


def read_order(name: str, tensors: Tensors, inputs: int, width: int) -> Tensor | None:
    """(K,) int64 that brings the columns group by group, within a group in input order; None where they lie so.

    None, too, where there is no tensor called `name`. Raises UserError for another shape or dtype, and where groups are
    not `width` columns each, the last one as many as are left.
    """
    if name not in tensors:
        return None
    index = expect_dtype(name, expect_shape(name, tensors[name], (inputs,)), torch.int32, torch.int64).long()
    groups, plain = -(-inputs // width), torch.arange(inputs) // width
    # Looked at first: counts are as many as the largest index says.
    inside = int(index.min()) >= 0 and int(index.max()) < groups
    if not inside or not torch.equal(torch.bincount(index, minlength=groups), torch.bincount(plain)):
        raise UserError(
            f"tensor {name} must put {width} of the {inputs} inputs into each of {groups} groups, and does not; the"
            " weights are damaged, so fetch them again"
        )
    order = index.argsort(stable=True)
    return None if torch.equal(order, torch.arange(inputs)) else order
