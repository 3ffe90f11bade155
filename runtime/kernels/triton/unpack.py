"""From bytes to int8 codes, in registers."""

import triton
import triton.language as tl


@triton.jit
def chunk_of(packed, lower, pairs, PART: tl.constexpr, KIND: tl.constexpr):
    """Codes (rows, chunk) int8 of chunk number PART of a unit.

    packed  (rows, chunk) int8: the unit's bytes.
    lower   of planes: the same of the lower plane.
    pairs   of nf4: 256 int16, for every byte its two levels (the first in the low half).
    """
    if KIND == "int8":
        codes = packed
    elif KIND == "int4":
        # Two's complement: an arithmetic shift brings the sign along.
        codes = ((packed << 4) >> 4) if PART == 0 else (packed >> 4)
    elif KIND == "uint4":
        codes = (packed & 15) if PART == 0 else ((packed >> 4) & 15)
    elif KIND == "ternary":
        codes = (packed << (6 - 2 * PART)) >> 6
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
