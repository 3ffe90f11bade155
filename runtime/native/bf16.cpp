// bf16 weights, float32 inputs and sums: 64 bytes are 16 outputs of two inputs, the first in the low halves.
#include "float_linear.h"

namespace SPECPRESS_PATH {

struct Bfloat16 {
    static constexpr int STEP = 2;
    template <int M>
    static inline void each(const uint8_t* codes, const float* x, int64_t stride, F16 (&acc)[M][2]) {
        const B64 left = load64(codes), right = load64(codes + 64);
        const F16 a = even_bf16(left), b = even_bf16(right), c = odd_bf16(left), d = odd_bf16(right);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const F16 v = set(x[m * stride]), u = set(x[m * stride + 1]);
            acc[m][0] = fma(c, u, fma(a, v, acc[m][0]));
            acc[m][1] = fma(d, u, fma(b, v, acc[m][1]));
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
