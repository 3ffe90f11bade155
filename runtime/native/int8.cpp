// int8: codes −128..127 times codes ±127. 64 bytes are 16 outputs by 4 inputs.
#include "linear.h"

namespace SPECPRESS_PATH {

struct Int8 : IntegerScheme<Int8, 4> {
    using IntegerScheme::IntegerScheme;
    // With an unsigned operand the inputs are stored as x + 128, which adds 128 Σ q.
    static constexpr bool UNSIGNED_INPUTS = UNSIGNED_DOT;
    I16 start(const Weights& w, int64_t at, int32_t) const {
        if constexpr (!UNSIGNED_DOT) return seti(0);
        return loadi(w.sums + at);
    }
    template <int I>
    B64 part(B64 raw) const {
        return raw;
    }
    I16 dot(I16 acc, B64 w, X4 x) const {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
        return dot_activations_unsigned(acc, w, x);
#else
        return dot_signed(acc, w, x);
#endif
    }
};

void linear_int8(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
    integer_linear<Int8>(w, in, first, last, y, stride, add_to);
}

}  // namespace SPECPRESS_PATH
