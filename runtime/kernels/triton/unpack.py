"""From bytes to int8 codes, in registers."""

import triton
import triton.language as tl

# Codes that are cheapest to have in the upper bits of a byte are left there, and the product's sum is too large by so
# many bits. No sum overflows by it: a byte is a byte.
LEFT = {"int4": 4, "ternary": 6}


@triton.jit
def chunk_of(packed, lower, pairs, PART: tl.constexpr, KIND: tl.constexpr, TEXTS: tl.constexpr):
    """Codes (rows, chunk) int8 of chunk number PART of a unit, times 2 ** LEFT.

    packed  (rows, chunk) int8: the unit's bytes.
    lower   of planes: the same of the lower plane.
    pairs   of nf4: 256 int16, for every byte its two levels (the first in the low half).
    TEXTS   what does it four bytes at a time (words.py); none: byte by byte, as Triton says it.
    """
    if KIND == "int8":
        codes = packed
    elif len(TEXTS) > 0:
        if KIND == "planes":
            codes = tl.inline_asm_elementwise(TEXTS[PART], "=r,r,r", [packed, lower], tl.int8, is_pure=True, pack=4)
        else:
            codes = tl.inline_asm_elementwise(TEXTS[PART], "=r,r", [packed], tl.int8, is_pure=True, pack=4)
    elif KIND == "int4":
        codes = (packed << 4) if PART == 0 else (packed & -16)
    elif KIND == "uint4":
        codes = (packed & 15) if PART == 0 else ((packed >> 4) & 15)
    elif KIND == "ternary":
        codes = (packed << (6 - 2 * PART)) & -64
    elif KIND == "nf4":
        both = tl.load(pairs + (packed.to(tl.int32) & 255))
        codes = both.to(tl.int8) if PART == 0 else (both >> 8).to(tl.int8)
    elif KIND == "planes":
        high = (packed << 4) if PART == 0 else (packed & -16)
        codes = high | ((lower & 15) if PART == 0 else ((lower >> 4) & 15))
    else:
        # The upper plane alone: of q = 16 h + l the middle, 16 h + 8.
        tl.static_assert(KIND == "upper")
        codes = ((packed << 4) if PART == 0 else (packed & -16)) | 8
    return codes
