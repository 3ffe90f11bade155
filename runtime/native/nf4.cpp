// nf4, mxfp4: nibbles are indices of sixteen integer levels (Weights::levels), looked up by a byte shuffle. Layout as int4.
#include "linear.h"

namespace SPECPRESS_PATH {

struct Nf4 : IntegerScheme<Nf4, 8> {
    static constexpr int FETCH_ROWS = 2;
    static constexpr int64_t FEW_TILED = 7;
    B64 levels;
    explicit Nf4(const Weights& w) : IntegerScheme(w) {
        uint8_t sixteen[16];
        for (int i = 0; i < 16; i++) sixteen[i] = static_cast<uint8_t>(w.levels[i] + (UNSIGNED_DOT ? 128 : 0));
        levels = table(sixteen);
    }
    // With an unsigned operand the levels carry 128, which adds 128 Σ x.
    int above(const Weights&) const { return UNSIGNED_DOT ? 128 : 0; }
    template <int I>
    B64 part(B64 raw) const {
        return look_up(levels, field<4 * I>(raw, 15));
    }
    I16 dot(I16 acc, B64 w, X4 x) const {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
        return dot_weights_unsigned(acc, w, x);
#else
        return dot_signed(acc, w, x);
#endif
    }
};

// Levels within ±LOW, as unsigned bytes that carry LOW: products fit 16 bits (2 · LOW · 254 · SHORT / 4 < 2^15).
struct LowLevels : IntegerScheme<LowLevels, 8> {
    static constexpr int SHORT = 16, FETCH_ROWS = Nf4::FETCH_ROWS;
    B64 levels;
    explicit LowLevels(const Weights& w) : IntegerScheme(w) {
        uint8_t sixteen[16];
        for (int i = 0; i < 16; i++) sixteen[i] = static_cast<uint8_t>(w.levels[i] + specpress::LOW);
        levels = table(sixteen);
    }
    int above(const Weights&) const { return specpress::LOW; }
    template <int I>
    B64 part(B64 raw) const {
        return look_up(levels, field<4 * I>(raw, 15));
    }
    I16 dot(I16 acc, B64 w, X4 x) const { return dot_weights_unsigned(acc, w, x); }
};

void linear_nf4(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
    if constexpr (SHORT_SUMS)
        if (specpress::low_levels(w)) return integer_linear<LowLevels>(w, in, first, last, y, stride, add_to);
    integer_linear<Nf4>(w, in, first, last, y, stride, add_to);
}

}  // namespace SPECPRESS_PATH
