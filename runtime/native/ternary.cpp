// ternary: 2 bits hold w + 1. 64 bytes are 16 outputs by 16 inputs: bits 2i of byte j are input 4i + j.
#include "linear.h"

namespace SPECPRESS_PATH {

struct Ternary : IntegerScheme<Ternary, 16> {
    using IntegerScheme::IntegerScheme;
    static constexpr int SHORT = 256;
    static constexpr int64_t FEW_TILED = 5;
    int above(const Weights&) const { return 1; }
    template <int I>
    B64 part(B64 raw) const {
        return field<2 * I>(raw, 3);
    }
    I16 dot(I16 acc, B64 w, X4 x) const { return dot_weights_unsigned(acc, w, x); }
};

void linear_ternary(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
    integer_linear<Ternary>(w, in, first, last, y, stride, add_to);
}

}  // namespace SPECPRESS_PATH
