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

// A block of int4 values as floats, whatever the width: half of it need not be whole vectors. `halves`: in a basis.
void widen_nibbles(const uint8_t* values, const float* scales, int64_t wide, bool halves, float* out);

// The part of a basis of a layer's head: 0 into it, 1 the feedback of rounding, 2 back (runtime/kernels/basis.py).
inline const float* basis_part(const float* basis, const specpress::Heads& h, int64_t layer, int64_t head, int64_t size, int64_t part) {
    return basis + ((layer * h.kv_heads + head) * 3 + part) * size * size;
}

// Codes −half..half − 1 of one row, and its scale, which may be negative: the row's extreme is `limit` of it.
float round_signed(const float* x, int64_t size, float limit, int32_t half, int32_t* codes);

// What rows in a basis are rounded to (runtime/kv_store.py, Levels): codes beyond ± knee count double.
struct Levels {
    float limit;
    int32_t half;
    float knee;
};
constexpr Levels INT4_LEVELS = {-10.0f, 8, 5.5f}, INT3_LEVELS = {-5.25f, 4, 2.5f};
inline float within(float x, float knee) { return x < -knee ? -knee : x > knee ? knee : x; }
// What a code, a half more or not, stands for: exact.
inline float level(float code, float knee) { return code + (code - within(code, knee)); }

// The same in a basis, whose first dimensions have halves: what codes lack of them is in the scale's lower bits.
float round_in_basis(const float* x, int64_t size, const Levels& levels, const float* basis, int32_t* codes);

// Dimensions of a basis whose codes have halves, and what of a scale's 32 bits is the scale then (runtime/kv_store.py).
constexpr int64_t HALVES = 20;
constexpr uint32_t SCALE_BITS = ~0u << HALVES;

inline uint32_t word_of(float scale) {
    uint32_t word;
    std::memcpy(&word, &scale, 4);
    return word;
}
inline float short_scale(float scale) {
    const uint32_t word = word_of(scale) & SCALE_BITS;
    std::memcpy(&scale, &word, 4);
    return scale;
}
// What the code of dimension `d` is more than is stored of it: 0 or 0.5.
inline float half_at(float scale, int64_t d) { return d < HALVES && word_of(scale) >> d & 1 ? 0.5f : 0.0f; }

// Code `i` of a row of three-bit codes, −4..3.
int32_t three_bits(const uint8_t* row, int64_t i);
void set_three_bits(uint8_t* row, int64_t i, int32_t code);

}  // namespace SPECPRESS_PATH
