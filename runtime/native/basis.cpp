// Keys and values in a basis of their own: runtime/kernels/basis.py's rules, operation by operation.
#include "cache.h"

namespace SPECPRESS_PATH {

using namespace specpress;

constexpr uint32_t TRIED = 3;     // scales of a row
constexpr int64_t WIDEST = 1024;  // dimensions of a head (model/native.py, MOST)

void turn(const float* x, const float* matrix, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i++) out[i] = 0.0f;
    for (int64_t j = 0; j < size; j++, matrix += size)
        for (int64_t i = 0; i < size; i++) out[i] = out[i] + x[j] * matrix[i];
}

// The number of largest magnitude, of two the positive one; NaN where there is one.
static float extreme_of(const float* x, int64_t size) {
    float highest = 0.0f, lowest = 0.0f;
    for (int64_t i = 0; i < size; i++) {
        highest = x[i] > highest || x[i] != x[i] ? x[i] : highest;
        lowest = x[i] < lowest || x[i] != x[i] ? x[i] : lowest;
    }
    return highest >= -lowest ? highest : lowest;
}

static float inverse_of(float scale) {
    const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    return std::isinf(inverse) ? 0.0f : inverse;
}

// The nearest code bottom..top; 0 for NaN.
static float code_of(float x, float bottom, float top) {
    const float nearest = std::nearbyint(x);
    return nearest != nearest ? 0.0f : nearest < bottom ? bottom : nearest > top ? top : nearest;
}

float round_signed(const float* x, int64_t size, float limit, int32_t half, int32_t* codes) {
    const float scale = extreme_of(x, size) / limit, inverse = inverse_of(scale);
    const float bottom = static_cast<float>(-half), top = static_cast<float>(half - 1);
    for (int64_t i = 0; i < size; i++) codes[i] = static_cast<int32_t>(code_of(x[i] * inverse, bottom, top));
    return scale;
}

// Codes by one scale, halves among them, and what they lose.
static float coded(const float* x, int64_t size, float scale, const Levels& levels, const float* feedback, float* codes) {
    float open[WIDEST], left[WIDEST], cost = 0.0f;
    const float inverse = inverse_of(scale);
    for (int64_t i = 0; i < size; i++) left[i] = open[i] = x[i] * inverse;
    for (int64_t i = size - 1; i >= 0; i--) {
        const float fine = i < HALVES ? 2.0f : 1.0f, all = static_cast<float>(levels.half) * fine, wanted = left[i];
        const float code = code_of((wanted + within(wanted, levels.knee)) * 0.5f * fine, -all, all - 1.0f);
        const float found = code / fine, nearer = (code > 0.0f ? code - 1.0f : code < 0.0f ? code + 1.0f : code) / fine;
        const float missed = wanted - level(found, levels.knee), beside = wanted - level(nearer, levels.knee);
        // Where steps change, the code before it may be the nearest.
        const bool before = std::fabs(beside) < std::fabs(missed);
        const float least = (before ? beside : missed) * fine;
        cost = cost + least * least;
        codes[i] = before ? nearer : found;
        const float lost = open[i] - level(codes[i], levels.knee);
        const float* row = feedback + i * size;
        for (int64_t j = 0; j < i; j++) left[j] = left[j] + lost * row[j];
    }
    return cost * (scale * scale);
}

float round_in_basis(const float* x, int64_t size, const Levels& levels, const float* basis, int32_t* codes) {
    constexpr uint32_t STEP = 1u << HALVES, INFINITE = 0x7f800000u;
    float turned[WIDEST], found[WIDEST], best[WIDEST], least = 0.0f;
    turn(x, basis, size, turned);
    const float longest = extreme_of(turned, size) / levels.limit;
    uint32_t first, word = 0;
    std::memcpy(&first, &longest, 4);
    // Away from zero, so that the first one cuts nothing off.
    const bool cut = first % STEP != 0 && (first & INFINITE) != INFINITE;
    first = (first + (cut ? STEP : 0)) & SCALE_BITS;
    for (uint32_t tried = 0; tried < TRIED; tried++) {
        // NaN, infinities and what would come to have another sign stay.
        const bool kept = (first & INFINITE) == INFINITE || (first & 0x7fffffffu) < tried * STEP;
        const uint32_t next = kept ? first : first - tried * STEP;
        float scale;
        std::memcpy(&scale, &next, 4);
        const float cost = coded(turned, size, scale, levels, basis + size * size, found);
        if (tried && !(cost < least)) continue;
        least = cost, word = next;
        std::memcpy(best, found, static_cast<size_t>(size) * 4);
    }
    for (int64_t i = 0; i < size; i++) {
        const float whole = std::floor(best[i]);
        codes[i] = static_cast<int32_t>(whole);
        if (i < HALVES && best[i] != whole) word |= 1u << i;
    }
    float out;
    std::memcpy(&out, &word, 4);
    return out;
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
