// Keys and values into the cache and back, in float32, int8, int4 or int3: runtime/kv_store.py's rules.
#include "cache.h"

namespace SPECPRESS_PATH {

using namespace specpress;

// What the extreme of a row with signed scales is rounded to (runtime/kv_store.py, SIGNED).
constexpr float INT3_LIMIT = -4.25f;

static int8_t nibble(const uint8_t* p, bool high) { return static_cast<int8_t>((high ? *p >> 4 : *p & 15) - 8); }
static void set_nibble(uint8_t* p, bool high, int32_t code) {
    const uint8_t raw = static_cast<uint8_t>(code + 8);
    *p = high ? static_cast<uint8_t>((*p & 0x0f) | raw << 4) : static_cast<uint8_t>((*p & 0xf0) | raw);
}

// Symmetric codes of one row within ±limit; the scale is absmax / limit (0 for zeros).
static float round_row(const float* x, int64_t dim, float limit, int32_t* codes) {
    float most = 0.0f;
    for (int64_t i = 0; i < dim; i++) most = std::fabs(x[i]) > most || x[i] != x[i] ? std::fabs(x[i]) : most;
    const float scale = most / limit;
    float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    if (std::isinf(inverse)) inverse = 0.0f;
    for (int64_t i = 0; i < dim; i++) {
        const float v = std::nearbyint(x[i] * inverse);
        codes[i] = v != v ? 0 : static_cast<int32_t>(v < -limit ? -limit : v > limit ? limit : v);
    }
    return scale;
}

// Codes of one row of keys or values; the basis is null where it is stored as it is.
static float round_part(const Heads& h, const float* basis, int64_t layer, int64_t head, const float* x, int64_t dim, int32_t* codes) {
    const float* own = basis ? basis_part(basis, h, layer, head, dim, 0) : nullptr;
    const bool three = h.cache_kind == CACHE_INT3;
    if (own) return round_in_basis(x, dim, three ? INT3_LEVELS : INT4_LEVELS, own, codes);
    if (three) return round_signed(x, dim, INT3_LIMIT, 4, codes);
    return round_row(x, dim, h.cache_kind == CACHE_INT4 ? 7.0f : 127.0f, codes);
}

// Bytes of a row of codes, which is 64 keys of one dimension or the padded dimensions of one value; and code `i` of it.
static int64_t row_bytes(const Heads& h, int64_t size) {
    return h.cache_kind == CACHE_INT8 ? size : h.cache_kind == CACHE_INT4 ? size / 2 : size / 16 * 6;
}
static int32_t code_at(const Heads& h, const uint8_t* row, int64_t size, int64_t i) {
    if (h.cache_kind == CACHE_INT8) return static_cast<int8_t>(row[i]);
    if (h.cache_kind == CACHE_INT3) return three_bits(row, i);
    return nibble(row + i % (size / 2), i >= size / 2);
}
static void set_code(const Heads& h, uint8_t* row, int64_t size, int64_t i, int32_t code) {
    if (h.cache_kind == CACHE_INT8)
        row[i] = static_cast<uint8_t>(code);
    else if (h.cache_kind == CACHE_INT3)
        set_three_bits(row, i, code);
    else
        set_nibble(row + i % (size / 2), i >= size / 2, code);
}

// Stores one row's keys and values, of heads first..last, at a slot. `key` and `value` are those of all heads.
void remember(const Heads& h, int64_t layer, const Store& s, int64_t slot, const float* key, const float* value, int64_t first, int64_t last) {
    const int64_t dim = h.dim, values = values_of(h), wide = padded(values);
    key += first * dim, value += first * values;
    for (int64_t head = first; head < last; head++, key += dim, value += values) {
        const Place at = place(h, s, layer, head, slot);
        if (h.cache_kind == CACHE_F32) {
            float* k = static_cast<float*>(s.keys) + at.block * dim * KEYS + at.inside;
            for (int64_t d = 0; d < dim; d++) k[d * KEYS] = key[d];
            std::memcpy(static_cast<float*>(s.values) + (at.block * KEYS + at.inside) * wide, value, static_cast<size_t>(values) * 4);
            continue;
        }
        float scaled[1024];
        int32_t codes[1024];
        const float* factor = h.key_factor ? h.key_factor + (layer * h.kv_heads + head) * dim : nullptr;
        for (int64_t d = 0; d < dim; d++) scaled[d] = factor ? key[d] / factor[d] : key[d];
        s.key_scale[at.block * KEYS + at.inside] = round_part(h, h.key_basis, layer, head, scaled, dim, codes);
        auto* k = static_cast<uint8_t*>(s.keys) + at.block * dim * row_bytes(h, KEYS);
        for (int64_t d = 0; d < dim; d++, k += row_bytes(h, KEYS)) set_code(h, k, KEYS, at.inside, codes[d]);
        s.value_scale[at.block * KEYS + at.inside] = round_part(h, h.value_basis, layer, head, value, values, codes);
        auto* v = static_cast<uint8_t*>(s.values) + (at.block * KEYS + at.inside) * row_bytes(h, wide);
        for (int64_t d = 0; d < values; d++) set_code(h, v, wide, d, codes[d]);
    }
}

void recall(const AttentionCall& c, const Store& s, int64_t head, int64_t slot, float* key, float* value) {
    const Heads& h = c.heads;
    const int64_t dim = h.dim, values = values_of(h), wide = padded(values);
    const Place at = place(h, s, c.layer, head, slot);
    for (int64_t d = values; d < wide; d++) value[d] = 0.0f;
    if (h.cache_kind == CACHE_F32) {
        const float* k = static_cast<const float*>(s.keys) + at.block * dim * KEYS + at.inside;
        for (int64_t d = 0; d < dim; d++) key[d * KEYS] = k[d * KEYS];
        std::memcpy(value, static_cast<const float*>(s.values) + (at.block * KEYS + at.inside) * wide, static_cast<size_t>(values) * 4);
        return;
    }
    const float key_word = s.key_scale[at.block * KEYS + at.inside], value_word = s.value_scale[at.block * KEYS + at.inside];
    const bool halves = h.key_basis != nullptr;
    const float knee = (h.cache_kind == CACHE_INT3 ? INT3_LEVELS : INT4_LEVELS).knee;
    const float ks = halves ? short_scale(key_word) : key_word, vs = halves ? short_scale(value_word) : value_word;
    const float* factor = h.key_factor ? h.key_factor + (c.layer * h.kv_heads + head) * dim : nullptr;
    const auto* k = static_cast<const uint8_t*>(s.keys) + at.block * dim * row_bytes(h, KEYS);
    const auto* v = static_cast<const uint8_t*>(s.values) + (at.block * KEYS + at.inside) * row_bytes(h, wide);
    for (int64_t d = 0; d < dim; d++, k += row_bytes(h, KEYS)) {
        const float code = static_cast<float>(code_at(h, k, KEYS, at.inside));
        const float x = (halves ? level(code + half_at(key_word, d), knee) : code) * ks;
        key[d * KEYS] = factor ? x * factor[d] : x;
    }
    for (int64_t d = 0; d < values; d++) {
        const float code = static_cast<float>(code_at(h, v, wide, d));
        value[d] = (halves ? level(code + half_at(value_word, d), knee) : code) * vs;
    }
}

void widen_nibbles(const uint8_t* values, const float* scales, int64_t wide, bool halves, float* out) {
    const int64_t half = wide / 2;
    for (int64_t j = 0; j < KEYS; j++, values += half, out += wide) {
        const float scale = halves ? short_scale(scales[j]) : scales[j];
        for (int64_t d = 0; d < wide; d++) {
            const float code = static_cast<float>((d < half ? values[d] & 15 : values[d - half] >> 4) - 8);
            out[d] = (halves ? level(code + half_at(scales[j], d), INT4_LEVELS.knee) : code) * scale;
        }
    }
}

}  // namespace SPECPRESS_PATH
