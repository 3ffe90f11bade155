"""The blocks of GGUF's quantised types as codes, scales and offsets: weight = code · scale − offset, group by group.

Every type that is read here fits a grid of ours exactly, so nothing is rounded:

    Q4_0             int4, groups of 32           Q4_1, Q4_K  int4, groups of 32, with offsets (the negated minima)
    Q5_0, Q8_0       int8, groups of 32           Q5_1, Q5_K  int8, groups of 32, with offsets
    Q3_K, Q6_K       int8, groups of 16           Q2_K        int8, groups of 16, with offsets
    IQ4_NL, IQ4_XS   int8, groups of 32: sixteen levels, all whole numbers
    TQ1_0, TQ2_0     ternary; groups of 256 where the scales differ
    MXFP4            mxfp4: codes of levels, and powers of two

A K-quant's scales are products of a float16 and a 6-bit or 8-bit number, which float32 holds. The layouts are those of
ggml-quants.c (github.com/ggml-org/llama.cpp); all arrays below are (rows, blocks, …).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.checkpoints.gguf.reader import BlockType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_LOW = np.uint8(15)
_PAIRS = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], np.uint8)


@dataclass(frozen=True)
class Groups:
    """codes (N, K) int8; scale and offset (N, G) float32, K / G codes sharing one (offset None: all 0)."""

    codes: NDArray[np.int8]
    scale: Floats
    offset: Floats | None


def unpack(kind: BlockType, rows: Bytes) -> Groups:
    """The rows (N, bytes of a row) of a tensor of a quantised type. Raises KeyError for plain ones."""
    n = rows.shape[0]
    codes, scale, offset = _UNPACK[kind.name](rows.reshape(n, -1, kind.bytes))
    return Groups(
        np.ascontiguousarray(codes, np.int8).reshape(n, -1),
        scale.reshape(n, -1),
        None if offset is None else offset.reshape(n, -1),
    )


_Parts = tuple[NDArray[np.int8] | Bytes, Floats, Floats | None]


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, (rows, blocks, 1)."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """The low halves of all bytes, then the high ones."""
    return np.concatenate((packed & _LOW, packed >> 4), axis=-1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """32 bits from byte `at`, the first lowest, as 0 or 16."""
    bits: Bytes = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
    return bits << np.uint8(4)


def _minus(codes: Bytes, zero: int) -> NDArray[np.int8]:
    return codes.view(np.int8) - np.int8(zero)


def _k_scales(b: Bytes) -> tuple[Floats, Floats]:
    """Scales and offsets of the eight groups of a Q4_K or Q5_K block: 6-bit numbers times two float16.

    Of twelve bytes the first four hold the scales of groups 0..3 and the next four their minima, in six bits each; the
    last four hold the low halves of groups 4..7's, whose upper two bits are those that the first eight bytes spare.
    """
    first, second, rest = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = np.concatenate((first & 63, rest & _LOW | first >> 6 << 4), axis=-1)
    minima = np.concatenate((second & 63, rest >> 4 | second >> 6 << 4), axis=-1)
    return _half(b, 0) * scales.astype(np.float32), _half(b, 2) * minima.astype(np.float32)


def _k_nibbles(packed: Bytes) -> Bytes:
    """(…, 8, 32): of every 32 bytes the low halves are one group and the high halves the next."""
    quarters = packed.reshape(*packed.shape[:-1], 4, 1, 32)
    return np.concatenate((quarters & _LOW, quarters >> 4), axis=-2).reshape(*packed.shape[:-1], 8, 32)


def _quarters(packed: Bytes) -> Bytes:
    """(…, 8, 32): of every 32 bytes the lowest two bits are a group, then the next two, and so on."""
    return (packed.reshape(*packed.shape[:-1], 2, 1, 32) >> _PAIRS & np.uint8(3)).reshape(*packed.shape[:-1], 8, 32)


def _q2_k(b: Bytes) -> _Parts:
    """Of a byte for each group of 16 the low half is its scale, the high half its minimum."""
    scale = _half(b, 80) * (b[..., :16] & _LOW).astype(np.float32)
    return _quarters(b[..., 16:80]), scale, _half(b, 82) * (b[..., :16] >> 4).astype(np.float32)


def _q3_k(b: Bytes) -> _Parts:
    """The third bits of eight groups of 32 share 32 bytes. Scales have six bits: halves of eight bytes, and two bits of
    four bytes more."""
    high = b[..., :32].reshape(*b.shape[:-1], 1, 32) >> np.arange(8, dtype=np.uint8).reshape(8, 1) & np.uint8(1)
    four = _nibbles(b[..., 96:104])
    two = (b[..., 104:108].reshape(*b.shape[:-1], 1, 4) >> _PAIRS & np.uint8(3)).reshape(four.shape)
    scale = _minus(four | two << np.uint8(4), 32).astype(np.float32)
    return _minus(_quarters(b[..., 32:96]) | high << np.uint8(2), 4), _half(b, 108) * scale, None


def _iq4_xs(b: Bytes) -> _Parts:
    """Eight groups of 32: four bits of each scale are halves of four bytes, and two bits those of a 16-bit number."""
    low = np.stack((b[..., 4:8] & _LOW, b[..., 4:8] >> 4), axis=-1).reshape(*b.shape[:-1], 8)
    two = (b[..., 2:4].reshape(*b.shape[:-1], 2, 1) >> _PAIRS.reshape(4) & np.uint8(3)).reshape(low.shape)
    scale = _minus(low | two << np.uint8(4), 32).astype(np.float32)
    return _LEVELS[_nibbles(b[..., 8:].reshape(*b.shape[:-1], 8, 16))], _half(b, 0) * scale, None


def _q5_k(b: Bytes) -> _Parts:
    groups = np.arange(8, dtype=np.uint8).reshape(8, 1)
    fifth = (b[..., 16:48].reshape(*b.shape[:-1], 1, 32) >> groups & 1) << 4
    return _k_nibbles(b[..., 48:]) | fifth, *_k_scales(b)


def _q6_k(b: Bytes) -> _Parts:
    """Halves of 128: four bits of code j are in byte j mod 64, and two in byte j mod 32 of the next part."""
    low = b[..., :128].reshape(*b.shape[:-1], 2, 64)
    four = np.concatenate((low & _LOW, low >> 4), axis=-1)
    high = b[..., 128:192].reshape(*b.shape[:-1], 2, 1, 32)
    two: Bytes = (high >> _PAIRS & np.uint8(3)).reshape(four.shape)
    scales = b[..., 192:208].view(np.int8).astype(np.float32)
    return _minus(four | two << np.uint8(4), 32), _half(b, 208) * scales, None


def _tq1_0(b: Bytes) -> _Parts:
    """Five digits to base 3 a byte, as a fraction of 256: the digit after k of them is the top of 3 · (byte · 3^k)."""
    parts = []
    for first, last, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        shifted = b[..., None, first:last] * _POWERS_OF_3[:digits, None]
        parts.append((shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(*b.shape[:-1], -1))
    return _minus(np.concatenate(parts, axis=-1), 1), _half(b, 52), None


def _tq2_0(b: Bytes) -> _Parts:
    fields = b[..., :64].reshape(*b.shape[:-1], 2, 1, 32) >> _PAIRS & np.uint8(3)
    return _minus(fields, 1), _half(b, 64), None


def _mxfp4(b: Bytes) -> _Parts:
    """An exponent plus 127, and codes of levels; a scale that is no number is infinite."""
    scale = np.ldexp(np.float32(1), b[..., :1].astype(np.int32) - 127).astype(np.float32)
    return _nibbles(b[..., 1:]), np.where(b[..., :1] == 255, np.float32(np.inf), scale), None


_UNPACK: dict[str, Callable[[Bytes], _Parts]] = {
    "Q4_0": lambda b: (_minus(_nibbles(b[..., 2:]), 8), _half(b, 0), None),
    "Q4_1": lambda b: (_nibbles(b[..., 4:]), _half(b, 0), -_half(b, 2)),
    "Q5_0": lambda b: (_minus(_nibbles(b[..., 6:]) | _fifth_bits(b, 2), 16), _half(b, 0), None),
    "Q5_1": lambda b: (_nibbles(b[..., 8:]) | _fifth_bits(b, 4), _half(b, 0), -_half(b, 2)),
    "Q8_0": lambda b: (b[..., 2:].view(np.int8), _half(b, 0), None),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": lambda b: (_LEVELS[_nibbles(b[..., 2:])], _half(b, 0), None),
    "IQ4_XS": _iq4_xs,
    "Q4_K": lambda b: (_k_nibbles(b[..., 16:]), *_k_scales(b)),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
}
