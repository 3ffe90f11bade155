// Products of float weights: y[n] = Σ_k x[k] · w[n, k], one fused multiply-add after the other, first input to last.
#pragma once

#include "linear.h"

namespace SPECPRESS_PATH {

template <class Scheme, int M>
inline void float_product(const Weights& w, const Inputs& in, int64_t row, int64_t block, float* tile) {
    constexpr int STEP = Scheme::STEP;
    const uint8_t* codes = w.codes + block * (w.group / STEP) * 128;
    const float* x = in.values + row * in.stride;
    F16 acc[M][2];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = zero();
    for (int64_t k = 0; k < w.group; k += STEP, codes += 128) {
        prefetch(codes + AHEAD);
        prefetch(codes + AHEAD + 64);
        Scheme::template each<M>(codes, x + k, in.stride, acc);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        store(tile + m * BLOCK, acc[m][0]);
        store(tile + m * BLOCK + LANES, acc[m][1]);
    }
}

}  // namespace SPECPRESS_PATH
