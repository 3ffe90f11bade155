// int4: nibbles 0..15 that stand for 0..15 minus `zero` (8: signed codes; 0: with zero points in `offset`). 64 bytes are
// 16 outputs by 8 inputs: the low nibble of byte j is input j, the high one input 4 + j.
#include "linear.h"

namespace SPECPRESS_PATH {

struct Int4 : IntegerScheme<Int4, 8> {
    using IntegerScheme::IntegerScheme;
    static constexpr int SHORT = 32;
    static constexpr int64_t FEW_TILED = 5;
    int above(const Weights& w) const { return static_cast<int>(w.zero); }
    template <int I>
    B64 part(B64 raw) const {
        return field<4 * I>(raw, 15);
    }
    I16 dot(I16 acc, B64 w, X4 x) const { return dot_weights_unsigned(acc, w, x); }
};

void linear_int4(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
    integer_linear<Int4>(w, in, first, last, y, stride, add_to);
}

}  // namespace SPECPRESS_PATH
