// Where keys and values lie in the cache (kernels.h, Store), and their way back to floats.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace SPECPRESS_PATH {

// Floats that a value takes: head dimensions are stored in whole vectors.
inline int64_t padded(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }

struct Place {
    int64_t block, inside;
};
inline Place place(const specpress::Heads& h, const specpress::Store& s, int64_t layer, int64_t head, int64_t slot) {
    const int64_t own = slot / specpress::KEYS, block = s.table ? s.table[own] : own;
    return {(layer * s.blocks + block) * h.kv_heads + head, slot % specpress::KEYS};
}

// One key and value of the cache as floats (in the cache's basis, if it has one): out keys with a stride of KEYS, out values adjacent.
void recall(const specpress::AttentionCall& c, const specpress::Store& s, int64_t head, int64_t slot, float* key, float* value);

// A block of int4 values as floats, whatever the width: its halves need not be whole vectors.
void widen_halves(const uint8_t* values, const float* scales, int64_t wide, float* out);

// The part of a basis of a layer's head: 0 into it, 1 the feedback of rounding, 2 back (runtime/kernels/basis.py).
inline const float* basis_part(const float* basis, const specpress::Heads& h, int64_t layer, int64_t head, int64_t size, int64_t part) {
    return basis + ((layer * h.kv_heads + head) * 3 + part) * size * size;
}

// Codes −half..half − 1 of one row, and its scale, which may be negative: the row's extreme is `limit` of it. With `into`
// the row is brought into a basis first, and each code makes up for the errors of those behind it, by `feedback`.
float round_signed(const float* x, int64_t size, float limit, int32_t half, const float* into, const float* feedback, int32_t* codes);

// Code `i` of a row of three-bit codes, −4..3.
int32_t three_bits(const uint8_t* row, int64_t i);
void set_three_bits(uint8_t* row, int64_t i, int32_t code);

}  // namespace SPECPRESS_PATH
