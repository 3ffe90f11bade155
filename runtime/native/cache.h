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

// One key and value of the cache as floats: out keys with a stride of KEYS, out values adjacent.
void recall(const specpress::AttentionCall& c, const specpress::Store& s, int64_t head, int64_t slot, float* key, float* value);

// A block of int4 values as floats, whatever the width: its halves need not be whole vectors.
void widen_halves(const uint8_t* values, const float* scales, int64_t wide, float* out);

}  // namespace SPECPRESS_PATH
