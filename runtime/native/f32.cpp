// f32 weights: 64 bytes are 16 outputs of one input.
#include "float_linear.h"

namespace SPECPRESS_PATH {

struct Float32 {
    static constexpr int STEP = 1;
    template <int M>
    static inline void each(const uint8_t* codes, const float* x, int64_t stride, F16 (&acc)[M][2]) {
        const float* w = reinterpret_cast<const float*>(codes);
        const F16 left = load(w), right = load(w + LANES);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const F16 v = set(x[m * stride]);
            acc[m][0] = fma(left, v, acc[m][0]);
            acc[m][1] = fma(right, v, acc[m][1]);
        }
    }
    template <int M>
    static inline void product(const Weights& w, const Inputs& in, int64_t row, int64_t block, float* tile) {
        float_product<Float32, M>(w, in, row, block, tile);
    }
};

void linear_f32(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
    linear<Float32>(w, in, first, last, y, stride, add_to);
}

}  // namespace SPECPRESS_PATH
