// Products of float weights: y[n] = Σ_k x[k] · w[n, k], one fused multiply-add after the other, first input to last.
#pragma once

#include "linear.h"

namespace SPECPRESS_PATH {

template <class Scheme, int M, int HALVES>
inline void float_sums(const uint8_t* codes, const float* x, int64_t inputs, int64_t stride, bool more, float* tile) {
    F16 acc[M][HALVES];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) acc[m][h] = more ? load(tile + m * BLOCK + h * LANES) : zero();
    for (int64_t k = 0; k < inputs; k += Scheme::STEP, codes += 128) {
        if (fetches_ahead<Scheme, M>()) {
            prefetch(codes + AHEAD);
            if constexpr (HALVES == 2) prefetch(codes + AHEAD + 64);
        }
        Scheme::template each<M, HALVES>(codes, x + k, stride, acc);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) store(tile + m * BLOCK + h * LANES, acc[m][h]);
}

template <class Scheme, int M>
inline void float_product(const Weights& w, const Inputs& in, int64_t row, int64_t block, float* tile) {
    constexpr int64_t STEP = Scheme::STEP;
    const uint8_t* codes = w.codes + block * (w.group / STEP) * 128;
    const float* x = in.values + row * in.stride;
    if constexpr (!NARROW || M <= 2) {
        float_sums<Scheme, M, 2>(codes, x, w.group, in.stride, false, tile);
    } else {
        // 16 outputs at a time, of so few inputs that both halves come from the cache of the first level.
        constexpr int64_t CHUNK = 32 * STEP;
        for (int64_t k = 0; k < w.group; k += CHUNK, codes += 32 * 128) {
            const int64_t inputs = w.group - k < CHUNK ? w.group - k : CHUNK;
            float_sums<Scheme, M, 1>(codes, x + k, inputs, in.stride, k > 0, tile);
            float_sums<Scheme, M, 1>(codes + 64, x + k, inputs, in.stride, k > 0, tile + LANES);
        }
    }
}

}  // namespace SPECPRESS_PATH
