#pragma once

#include "kernels.h"
#include "pool.h"

namespace specpress {

// Bytes of a layer's codes in blocks.
int64_t packed_bytes(const Weights& w);

// How rows of codes are stored: a byte each; or nibbles as they go into the blocks (int4's plus 8), two a byte, the first
// in the low or the high half, where inputs and groups are whole vectors.
enum Rows : int64_t { PLAIN = 0, LOW_FIRST = 1, HIGH_FIRST = 2 };

// Lays out rows of codes [outputs][inputs] (int8 codes; float bits for f32 and bf16; of a trellis the sequences) in w's blocks, at `codes`; for int8
// `sums` gets −128 Σ codes per block, group and output. False: a code is not one of the scheme's.
bool pack(Pool& pool, const Weights& w, const void* rows, uint8_t* codes, int32_t* sums, Rows stored = PLAIN);

// Two 4-bit codes a byte to one a byte, `minus` taken off each; the first is in the low half, or in the high one.
void unpack_nibbles(Pool& pool, const uint8_t* packed, int64_t bytes, bool high_first, int8_t minus, int8_t* codes);

// One input row of a float layer's transpose: the `inputs` weights of output n, as floats (a tied embedding).
void unpack_row(const Weights& w, int64_t n, float* out);

}  // namespace specpress
