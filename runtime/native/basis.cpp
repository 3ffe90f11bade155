// Keys and values in a basis of their own: runtime/kernels/basis.py's rules, operation by operation.
#include "cache.h"

namespace SPECPRESS_PATH {

using namespace specpress;

constexpr int64_t WIDEST = 1024;  // dimensions of a head (model/native.py, MOST)

void turn(const float* x, const float* matrix, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i++) out[i] = 0.0f;
    for (int64_t j = 0; j < size; j++, matrix += size)
        for (int64_t i = 0; i < size; i++) out[i] = out[i] + x[j] * matrix[i];
}

float round_signed(const float* x, int64_t size, float limit, int32_t half, const float* into, const float* feedback, int32_t* codes) {
    float open[WIDEST], left[WIDEST];
    if (into) turn(x, into, size, open);
    float highest = 0.0f, lowest = 0.0f;
    for (int64_t i = 0; i < size; i++) {
        const float v = into ? open[i] : x[i];
        highest = v > highest || v != v ? v : highest;
        lowest = v < lowest || v != v ? v : lowest;
    }
    const float scale = (highest >= -lowest ? highest : lowest) / limit;
    float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    if (std::isinf(inverse)) inverse = 0.0f;
    for (int64_t i = 0; i < size; i++) left[i] = open[i] = (into ? open[i] : x[i]) * inverse;
    for (int64_t i = size - 1; i >= 0; i--) {
        const float nearest = std::nearbyint(left[i]), top = static_cast<float>(half - 1), bottom = static_cast<float>(-half);
        const float code = nearest != nearest ? 0.0f : nearest < bottom ? bottom : nearest > top ? top : nearest;
        codes[i] = static_cast<int32_t>(code);
        if (!feedback) continue;
        const float lost = open[i] - code;
        const float* row = feedback + i * size;
        for (int64_t j = 0; j < i; j++) left[j] = left[j] + lost * row[j];
    }
    return scale;
}

int32_t three_bits(const uint8_t* row, int64_t i) {
    row += i / 16 * 6, i %= 16;
    return ((row[i / 4] >> (i % 4 * 2) & 3) | (row[4 + i / 8] >> (i % 8) & 1) << 2) - 4;
}

void set_three_bits(uint8_t* row, int64_t i, int32_t code) {
    const int32_t raw = code + 4;
    row += i / 16 * 6, i %= 16;
    uint8_t &low = row[i / 4], &high = row[4 + i / 8];
    low = static_cast<uint8_t>((low & ~(3 << (i % 4 * 2))) | (raw & 3) << (i % 4 * 2));
    high = static_cast<uint8_t>((high & ~(1 << (i % 8))) | (raw >> 2) << (i % 8));
}

}  // namespace SPECPRESS_PATH
