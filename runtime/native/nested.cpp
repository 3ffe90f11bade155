// int8 in two planes of nibbles: a code is 16 h + l, h in −8..7 stored plus 8, l in 0..15. Each plane is laid out as int4's
// nibbles, the whole upper plane before the lower one, so that a draft that reads one of them reads half the bytes.
#include "linear.h"

namespace SPECPRESS_PATH {

// Both planes: the codes again, and so kind int8's exact sums.
struct Nested : IntegerScheme<Nested, 8> {
    struct Planes {
        B64 upper, lower;
    };
    int64_t apart;
    explicit Nested(const Weights& w) : IntegerScheme(w), apart(specpress::plane_bytes(w)) {}
    [[gnu::always_inline]] void fetch(const uint8_t* codes) const {
        prefetch(codes);
        prefetch(codes + apart);
    }
    Planes read(const uint8_t* codes) const { return {load64(codes), load64(codes + apart)}; }
    // Joined nibbles are the code plus 128; with an unsigned operand they stay so, which adds 128 Σ x.
    int above(const Weights&) const { return UNSIGNED_DOT ? 128 : 0; }
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    template <int I>
    B64 part(Planes raw) const {
        return join<I>(raw.upper, raw.lower);
    }
    I16 dot(I16 acc, B64 w, X4 x) const { return dot_weights_unsigned(acc, w, x); }
#else
    template <int I>
    B64 part(Planes raw) const {
        return minus_128(join<I>(raw.upper, raw.lower));
    }
    I16 dot(I16 acc, B64 w, X4 x) const { return dot_signed(acc, w, x); }
#endif
};

// The upper plane alone, every l taken for its middle, 8: Σ (16 h + 8) x = 16 Σ h x + 8 Σ x. Nothing on the way exceeds
// 128 · 127 times the inputs, int8's own bound.
struct Upper : IntegerScheme<Upper, 8> {
    using IntegerScheme::IntegerScheme;
    static constexpr int SHORT = 32;
    int above(const Weights&) const { return 8; }
    template <int I>
    B64 part(B64 raw) const {
        return field<4 * I>(raw, 15);
    }
    I16 dot(I16 acc, B64 w, X4 x) const { return dot_weights_unsigned(acc, w, x); }
    I16 total(I16 acc, int32_t sum) const { return addi(shift_left<4>(acc), seti(8 * sum)); }
};

void linear_nested(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
    integer_linear<Nested>(w, in, first, last, y, stride, add_to);
}

void linear_upper(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
    integer_linear<Upper>(w, in, first, last, y, stride, add_to);
}

}  // namespace SPECPRESS_PATH
