// f32 weights: 64 bytes are 16 outputs of one input.
#include "float_linear.h"

namespace SPECPRESS_PATH {

struct Float32 {
    static constexpr int STEP = 1, FETCH_ROWS = 8;
    template <int M, int HALVES>
    static inline void each(const uint8_t* codes, const float* x, int64_t stride, F16 (&acc)[M][HALVES]) {
        F16 w[HALVES];
        for (int h = 0; h < HALVES; h++) w[h] = load(reinterpret_cast<const float*>(codes) + h * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const F16 v = set(x[m * stride]);
#pragma GCC unroll 2
            for (int h = 0; h < HALVES; h++) acc[m][h] = fma(w[h], v, acc[m][h]);
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
