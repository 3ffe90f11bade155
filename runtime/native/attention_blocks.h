// Blocks of the cache as attention reads them: 64 keys and values, floats or codes, which are widened in registers by the
// operations of `recall` (cache.h).
#pragma once

#include "cache.h"
#include "vec.h"

namespace SPECPRESS_PATH {

using namespace specpress;

// 64 keys and values, each of a CacheKind: floats, or codes with a scale a key.
struct Block {
    int64_t key_kind, value_kind;
    const void *keys, *values;
    const float *key_scale, *value_scale;
    bool halves = false;  // of codes: in a basis
};

// How sixteen keys at dimension d, or sixteen dimensions of value j, are read. What a reader multiplies by is loaded once.
struct FloatBlock {
    static constexpr bool CODES = false;
    const float *keys, *values;
    int64_t wide;
    FloatBlock(const Block& b, int64_t width)
        : keys(static_cast<const float*>(b.keys)), values(static_cast<const float*>(b.values)), wide(width) {}
    F16 key(int64_t d, int v) const { return load(keys + d * KEYS + v * LANES); }
    F16 value(int64_t j, int64_t d, F16) const { return load(values + j * wide + d); }
    F16 key_scale(int) const { return zero(); }
    F16 value_scale(int64_t) const { return zero(); }
    static F16 scaled(F16 x, F16) { return x; }
};

struct Int8Block {
    static constexpr bool CODES = true;
    const int8_t *keys, *values;
    const float *key_scales, *value_scales;
    int64_t wide;
    Int8Block(const Block& b, int64_t width)
        : keys(static_cast<const int8_t*>(b.keys)), values(static_cast<const int8_t*>(b.values)), key_scales(b.key_scale),
          value_scales(b.value_scale), wide(width) {}
    F16 key(int64_t d, int v) const { return load_bytes(keys + d * KEYS + v * LANES); }
    F16 value(int64_t j, int64_t d, F16 scale) const { return mul(load_bytes(values + j * wide + d), scale); }
    F16 key_scale(int v) const { return load(key_scales + v * LANES); }
    F16 value_scale(int64_t j) const { return set(value_scales[j]); }
    static F16 scaled(F16 code, F16 scale) { return mul(code, scale); }
};

// What codes in a basis have beside what is stored of them (cache.h): sixteen scales without it; the halves of sixteen keys
// at dimension d; those of sixteen dimensions of a value; what codes stand for. All of it is exact.
static inline F16 short_scales(const float* words) { return as_float(andi(bits(load(words)), static_cast<int32_t>(SCALE_BITS))); }
static inline F16 key_halves(const float* words, int64_t d) {
    return mul(to_float(andi(bits(load(words)), 1 << d)), set(0.5f / static_cast<float>(1 << d)));
}
struct HalfLanes {
    int32_t bit[2 * LANES] = {};
    float half[2 * LANES] = {};
    constexpr HalfLanes() {
        for (int64_t d = 0; d < HALVES; d++) bit[d] = 1 << d, half[d] = 0.5f / static_cast<float>(1 << d);
    }
};
static constexpr HalfLanes HALF_LANES;
static inline F16 value_halves(float word, int64_t d) {
    const F16 found = to_float(andi(loadi(HALF_LANES.bit + d), static_cast<int32_t>(word_of(word))));
    return mul(found, load(HALF_LANES.half + d));
}
static inline F16 level(F16 codes, F16 knee) { return add(codes, sub(codes, min(max(codes, sub(zero(), knee)), knee))); }

// Key j beside key j + 32, dimension i beside i + wide / 2, which is whole vectors here.
struct Nibbles {
    static constexpr float KNEE = INT4_LEVELS.knee;
    const uint8_t *keys, *values;
    int64_t half;
    Nibbles(const Block& b, int64_t width)
        : keys(static_cast<const uint8_t*>(b.keys)), values(static_cast<const uint8_t*>(b.values)), half(width / 2) {}
    F16 key(int64_t d, int v) const {
        constexpr int HALF = KEYS / LANES / 2;
        return load_nibbles(keys + d * (KEYS / 2) + v % HALF * LANES, v < HALF ? 0 : 4);
    }
    F16 code(int64_t j, int64_t d) const { return load_nibbles(values + j * half + (d < half ? d : d - half), d < half ? 0 : 4); }
    F16 value(int64_t j, int64_t d, F16 table) const {
        return scaled_nibbles(values + j * half + (d < half ? d : d - half), d < half ? 0 : 4, table);
    }
    static F16 table(float scale) { return nibble_table(scale); }
};

// Groups of sixteen codes, six bytes each: of keys at one dimension, of dimensions of one value.
struct Threes {
    static constexpr float KNEE = INT3_LEVELS.knee;
    const uint8_t *keys, *values;
    int64_t row;
    Threes(const Block& b, int64_t width)
        : keys(static_cast<const uint8_t*>(b.keys)), values(static_cast<const uint8_t*>(b.values)), row(width / LANES * THREE_BITS) {}
    F16 key(int64_t d, int v) const { return load_three_bits(keys + (d * (KEYS / LANES) + v) * THREE_BITS); }
    F16 code(int64_t j, int64_t d) const { return load_three_bits(values + j * row + d / LANES * THREE_BITS); }
    F16 value(int64_t j, int64_t d, F16 table) const {
        return scaled_three_bits(values + j * row + d / LANES * THREE_BITS, table);
    }
    static F16 table(float scale) { return three_bit_table(scale); }
};

// Codes that share bytes, as they are or in a basis.
template <class Codes, bool IN_BASIS>
struct PackedBlock {
    static constexpr bool CODES = true;
    Codes codes;
    const float *key_scales, *value_scales;
    PackedBlock(const Block& b, int64_t width) : codes(b, width), key_scales(b.key_scale), value_scales(b.value_scale) {}
    F16 key(int64_t d, int v) const {
        const F16 x = codes.key(d, v);
        if constexpr (IN_BASIS) return level(d < HALVES ? add(x, key_halves(key_scales + v * LANES, d)) : x, set(Codes::KNEE));
        return x;
    }
    F16 value(int64_t j, int64_t d, F16 scale) const {
        if constexpr (IN_BASIS) {
            const F16 x = codes.code(j, d);
            return mul(level(d < HALVES ? add(x, value_halves(value_scales[j], d)) : x, set(Codes::KNEE)), scale);
        }
        return codes.value(j, d, scale);
    }
    F16 key_scale(int v) const {
        return IN_BASIS ? short_scales(key_scales + v * LANES) : load(key_scales + v * LANES);
    }
    F16 value_scale(int64_t j) const { return IN_BASIS ? set(short_scale(value_scales[j])) : Codes::table(value_scales[j]); }
    static F16 scaled(F16 code, F16 scale) { return mul(code, scale); }
};

}  // namespace SPECPRESS_PATH
