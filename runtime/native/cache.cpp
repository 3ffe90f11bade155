// Keys and values into the cache and back, in float32, int8 or int4: runtime/kv_store.py's rules.
#include "cache.h"

namespace SPECPRESS_PATH {

using namespace specpress;

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

// Stores one row's keys and values, all heads, at a slot.
void remember(const Heads& h, int64_t layer, const Store& s, int64_t slot, const float* key, const float* value) {
    const int64_t dim = h.dim, values = values_of(h), wide = padded(values);
    for (int64_t head = 0; head < h.kv_heads; head++, key += dim, value += values) {
        const Place at = place(h, s, layer, head, slot);
        if (h.cache_kind == CACHE_F32) {
            float* k = static_cast<float*>(s.keys) + at.block * dim * KEYS + at.inside;
            for (int64_t d = 0; d < dim; d++) k[d * KEYS] = key[d];
            std::memcpy(static_cast<float*>(s.values) + (at.block * KEYS + at.inside) * wide, value, static_cast<size_t>(values) * 4);
            continue;
        }
        const bool four_bits = h.cache_kind == CACHE_INT4;
        const float limit = four_bits ? 7.0f : 127.0f;
        float scaled[1024];
        int32_t codes[1024];
        const float* factor = h.key_factor ? h.key_factor + (layer * h.kv_heads + head) * dim : nullptr;
        for (int64_t d = 0; d < dim; d++) scaled[d] = factor ? key[d] / factor[d] : key[d];
        s.key_scale[at.block * KEYS + at.inside] = round_row(scaled, dim, limit, codes);
        uint8_t* k = static_cast<uint8_t*>(s.keys);
        if (four_bits) {
            k += at.block * dim * (KEYS / 2) + at.inside % (KEYS / 2);
            for (int64_t d = 0; d < dim; d++) set_nibble(k + d * (KEYS / 2), at.inside >= KEYS / 2, codes[d]);
        } else {
            k += at.block * dim * KEYS + at.inside;
            for (int64_t d = 0; d < dim; d++) k[d * KEYS] = static_cast<uint8_t>(codes[d]);
        }
        s.value_scale[at.block * KEYS + at.inside] = round_row(value, values, limit, codes);
        uint8_t* v = static_cast<uint8_t*>(s.values);
        if (four_bits) {
            v += (at.block * KEYS + at.inside) * (wide / 2);
            for (int64_t d = 0; d < values; d++) set_nibble(v + d % (wide / 2), d >= wide / 2, codes[d]);
        } else {
            v += (at.block * KEYS + at.inside) * wide;
            for (int64_t d = 0; d < values; d++) v[d] = static_cast<uint8_t>(codes[d]);
        }
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
    const float ks = s.key_scale[at.block * KEYS + at.inside], vs = s.value_scale[at.block * KEYS + at.inside];
    const float* factor = h.key_factor ? h.key_factor + (c.layer * h.kv_heads + head) * dim : nullptr;
    const auto* k = static_cast<const uint8_t*>(s.keys);
    const auto* v = static_cast<const uint8_t*>(s.values);
    const bool four_bits = h.cache_kind == CACHE_INT4;
    for (int64_t d = 0; d < dim; d++) {
        const uint8_t* code = k + (at.block * dim + d) * (four_bits ? KEYS / 2 : KEYS) + (four_bits ? at.inside % (KEYS / 2) : at.inside);
        const float x = static_cast<float>(four_bits ? nibble(code, at.inside >= KEYS / 2) : static_cast<int8_t>(*code)) * ks;
        key[d * KEYS] = factor ? x * factor[d] : x;
    }
    v += (at.block * KEYS + at.inside) * (four_bits ? wide / 2 : wide);
    for (int64_t d = 0; d < values; d++)
        value[d] = static_cast<float>(four_bits ? nibble(v + d % (wide / 2), d >= wide / 2) : static_cast<int8_t>(v[d])) * vs;
}

void widen_halves(const uint8_t* values, const float* scales, int64_t wide, float* out) {
    const int64_t half = wide / 2;
    for (int64_t j = 0; j < KEYS; j++, values += half, out += wide)
        for (int64_t d = 0; d < half; d++) {
            out[d] = static_cast<float>((values[d] & 15) - 8) * scales[j];
            out[half + d] = static_cast<float>((values[d] >> 4) - 8) * scales[j];
        }
}

}  // namespace SPECPRESS_PATH
