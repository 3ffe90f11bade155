"""PTX that unpacks four bytes at a time, laid out as weight_layout.py says.

Triton takes words apart: seven instructions a weight, where a GPU's memory leaves time for four (of 4-bit codes) or two
(of 2-bit ones).

Each text takes words of four bytes (`$1`; of planes `$2` is the lower one) to words of four int8 codes (`$0`), as
`unpack.chunk_of` says of single bytes: part 0 is in the lowest bits.
"""

from dataclasses import dataclass
from functools import cache

import triton
import triton.language as tl

from runtime.formats.nf4 import INT8_LEVELS


def _upper(part: int) -> str:
    return f"{_shifted('a', '$1', 4 - 4 * part)} and.b32 b, a, 0xF0F0F0F0; or.b32 $0, b, 0x08080808;"


def _planes(part: int) -> str:
    high = f"{_shifted('a', '$1', 4 - 4 * part)} and.b32 b, a, 0xF0F0F0F0;"
    return f"{high} {_shifted('c', '$2', -4 * part)} and.b32 d, c, 0x0F0F0F0F; or.b32 $0, b, d;"


def _nf4(part: int) -> str:
    """Sixteen levels in four registers, looked up by byte permutation, which takes three bits of an index at a time. A
    half of a word is four codes of one part: the permutation's own form."""
    levels = [sum((int(v) & 255) << 8 * i for i, v in enumerate(INT8_LEVELS[j : j + 4])) for j in (0, 4, 8, 12)]
    t0, t1, t2, t3 = (f"0x{level:08X}" for level in levels)
    half = 16 * part
    return " ".join(
        (
            _shifted("a", "$1", -half),
            # The level of the lower three bits from either half of the table, then the half that the fourth says.
            "and.b32 a, a, 0x7777;",
            f"mov.b32 c, {t0}; mov.b32 d, {t1}; prmt.b32 c, c, d, a;",
            f"mov.b32 d, {t2}; mov.b32 e, {t3}; prmt.b32 d, d, e, a;",
            f"shr.u32 b, $1, {half + 1}; and.b32 b, b, 0x4444; or.b32 b, b, 0x3210;",
            "prmt.b32 $0, c, d, b;",
        )
    )


def _shifted(to: str, word: str, left: int) -> str:
    """`to` is the word, shifted to the left, or to the right where that is negative."""
    if left == 0:
        return f"mov.b32 {to}, {word};"
    return f"shl.b32 {to}, {word}, {left};" if left > 0 else f"shr.u32 {to}, {word}, {-left};"


# Codes that a shift and a mask leave where they are wanted: how far part 0 goes to the left, bits of a code, the mask.
_MASKED = {"int4": (4, 4, "0xF0F0F0F0"), "uint4": (0, 4, "0x0F0F0F0F"), "ternary": (6, 2, "0xC0C0C0C0")}
_TEXTS = {"upper": _upper, "planes": _planes, "nf4": _nf4}


@cache
def texts(kind: str, parts: int) -> tuple[str, ...]:
    """The PTX of each part of a kind of codes; none for int8, which is not packed."""
    if kind in _MASKED:
        left, bits, mask = _MASKED[kind]
        found = [f"{_shifted('a', '$1', left - bits * part)} and.b32 $0, a, {mask};" for part in range(parts)]
    else:
        found = [_TEXTS[kind](part) for part in range(parts)] if kind in _TEXTS else []
    return tuple(f"{{ .reg .b32 a, b, c, d, e; {text} }}" for text in found)


# Codes that are cheapest to have in the upper bits of a byte are left there, and the product's sum is too large by so
# many bits. No sum overflows by it: a byte is a byte.
LEFT = {"int4": 4, "ternary": 6}


@dataclass(frozen=True)
class Codes:
    """How a kernel reads codes: `per_byte` chunks of `chunk` inputs in a unit, sums that are too large by `left` bits.

    texts  PTX that unpacks four bytes at a time, for each chunk; none: byte by byte, as Triton says it.
    """

    kind: str
    chunk: int
    per_byte: int
    left: int
    texts: tuple[str, ...]


@triton.jit
def chunk_of(packed, lower, levels, PART: tl.constexpr, CODES: tl.constexpr):
    """Codes (rows, chunk) int8 of chunk number PART of a unit, times 2 ** left.

    packed  (rows, chunk) int8: the unit's bytes.
    lower   of planes: the same of the lower plane.
    levels  of nf4: 16 int8.
    """
    if CODES.kind == "int8":
        codes = packed
    elif len(CODES.texts) > 0:
        if CODES.kind == "planes":
            codes = tl.inline_asm_elementwise(
                CODES.texts[PART], "=r,r,r", [packed, lower], tl.int8, is_pure=True, pack=4
            )
        else:
            codes = tl.inline_asm_elementwise(CODES.texts[PART], "=r,r", [packed], tl.int8, is_pure=True, pack=4)
    elif CODES.kind == "int4":
        codes = (packed << 4) if PART == 0 else (packed & -16)
    elif CODES.kind == "uint4":
        codes = (packed & 15) if PART == 0 else ((packed >> 4) & 15)
    elif CODES.kind == "ternary":
        codes = (packed << (6 - 2 * PART)) & -64
    elif CODES.kind == "nf4":
        codes = tl.load(levels + half_words(packed, PART))
    elif CODES.kind == "planes":
        high = (packed << 4) if PART == 0 else (packed & -16)
        codes = high | ((lower & 15) if PART == 0 else ((lower >> 4) & 15))
    else:
        # The upper plane alone: of q = 16 h + l the middle, 16 h + 8.
        tl.static_assert(CODES.kind == "upper")
        codes = ((packed << 4) if PART == 0 else (packed & -16)) | 8
    return codes


@triton.jit
def half_words(packed, PART: tl.constexpr):
    """Codes 0..15 int32 of part PART of bytes (…, chunk): those of half a word of four bytes, the first the lowest."""
    words: tl.constexpr = packed.numel // 4
    first, second = tl.split(tl.permute(tl.reshape(packed, (words, 2, 2)), (0, 2, 1)))
    half = (first if PART == 0 else second).to(tl.int32)
    return tl.reshape(tl.join(half & 15, (half >> 4) & 15), packed.shape)
