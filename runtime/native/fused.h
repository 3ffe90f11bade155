// A fused multiply-add, rounded once, on sixteen lanes: for processors that have no instruction for it, or that a path may
// not rely on. Included by vec.h's portable half.
//
// The product of two floats is exact in double, so only the sum is rounded twice, to double and then to float. That gives
// another float than one rounding in two cases: the double lies halfway between two floats although the exact sum does not,
// or floats are so small that they hold fewer bits. Both are seen in the result, are rare, and are then done with care.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace SPECPRESS_PATH {

// One lane: a double whose last bit tells of what was cut off rounds to the right float (round to odd; Boldo and Melquiond,
// "Emulation of a FMA and correctly rounded sums").
inline float fused_lane(float a, float b, float c) {
    const double product = static_cast<double>(a) * static_cast<double>(b), other = static_cast<double>(c);
    double sum = product + other;
    // What was cut off (Knuth's TwoSum). Infinities make it a NaN, which is neither below nor above 0.
    const double part = sum - product, rest = (product - (sum - part)) + (other - part);
    if (rest < 0.0 || rest > 0.0) {
        uint64_t bits;
        std::memcpy(&bits, &sum, 8);
        if (bits % 2 == 0) bits += (rest > 0.0) == (sum > 0.0) ? uint64_t(1) : ~uint64_t(0);
        std::memcpy(&sum, &bits, 8);
    }
    return static_cast<float>(sum);
}

#if defined(__GNUC__)
__attribute__((noinline, cold))
#endif
static void mend(const float* a, const float* b, const float* c, float* out, int lanes) {
    for (int i = 0; i < 16; i++)
        if (lanes >> i & 1) out[i] = fused_lane(a[i], b[i], c[i]);
}

// out = a · b + c; `out` is none of the others.
inline void fused(const float* a, const float* b, const float* c, float* out) {
#if defined(__FP_FAST_FMAF)
    for (int i = 0; i < 16; i++) out[i] = std::fma(a[i], b[i], c[i]);
#elif defined(__SSE2__)
    __m128i careful[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m128 x = _mm_loadu_ps(a + 4 * i), y = _mm_loadu_ps(b + 4 * i), z = _mm_loadu_ps(c + 4 * i);
        auto sums = [](__m128 p, __m128 q, __m128 r) {
            return _mm_add_pd(_mm_mul_pd(_mm_cvtps_pd(p), _mm_cvtps_pd(q)), _mm_cvtps_pd(r));
        };
        const __m128d low = sums(x, y, z), high = sums(_mm_movehl_ps(x, x), _mm_movehl_ps(y, y), _mm_movehl_ps(z, z));
        const __m128 found = _mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high));
        _mm_storeu_ps(out + 4 * i, found);
        // Halfway: of the 29 bits that a float has not, all in a double's lower word, the first one alone.
        const __m128i words = _mm_castps_si128(_mm_shuffle_ps(_mm_castpd_ps(low), _mm_castpd_ps(high), 0x88));
        const __m128i halfway = _mm_cmpeq_epi32(_mm_slli_epi32(words, 3), _mm_set1_epi32(INT32_MIN));
        // Small: not 0, and at most the least normal number. One less, without the sign, has no bits of an exponent.
        const __m128i less = _mm_add_epi32(_mm_slli_epi32(_mm_castps_si128(found), 1), _mm_set1_epi32(-2));
        const __m128i small = _mm_cmpeq_epi32(_mm_srli_epi32(less, 24), _mm_setzero_si128());
        careful[i] = _mm_or_si128(halfway, small);
    }
    const __m128i half = _mm_packs_epi32(careful[0], careful[1]), rest = _mm_packs_epi32(careful[2], careful[3]);
    const int lanes = _mm_movemask_epi8(_mm_packs_epi16(half, rest));
    if (__builtin_expect(lanes, 0)) {
        // Copies: whose address is handed out is read and written anew at every step.
        float own[4][16];
        std::memcpy(own[0], a, 64), std::memcpy(own[1], b, 64), std::memcpy(own[2], c, 64), std::memcpy(own[3], out, 64);
        mend(own[0], own[1], own[2], own[3], lanes);
        std::memcpy(out, own[3], 64);
    }
#else
    for (int i = 0; i < 16; i++) out[i] = fused_lane(a[i], b[i], c[i]);
#endif
}

}  // namespace SPECPRESS_PATH
