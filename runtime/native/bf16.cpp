// bf16 weights, float32 inputs and sums: 64 bytes are 16 outputs of two inputs, the first in the low halves.
#include "float_linear.h"

namespace SPECPRESS_PATH {

struct Bfloat16 {
    static constexpr int STEP = 2, FETCH_ROWS = 3;
    template <int M, int HALVES>
    static inline void each(const uint8_t* codes, const float* x, int64_t stride, F16 (&acc)[M][HALVES]) {
        F16 first[HALVES], second[HALVES];
        for (int h = 0; h < HALVES; h++) {
            const B64 pairs = load64(codes + h * 64);
            first[h] = even_bf16(pairs), second[h] = odd_bf16(pairs);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const F16 v = set(x[m * stride]), u = set(x[m * stride + 1]);
#pragma GCC unroll 2
            for (int h = 0; h < HALVES; h++) acc[m][h] = fma(second[h], u, fma(first[h], v, acc[m][h]));
        }
    }
    template <int M>
    static inline void product(const Weights& w, const Inputs& in, int64_t row, int64_t block, float* tile) {
        float_product<Bfloat16, M>(w, in, row, block, tile);
    }
};

void linear_bf16(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
    linear<Bfloat16>(w, in, first, last, y, stride, add_to);
}

}  // namespace SPECPRESS_PATH
