// trellis: a tile of 16 outputs by 16 inputs is one circular sequence of bits (trellis.h). 64 weights in the order of the
// products are 8 · bits bytes: a byte shuffle spreads them over eight lanes, each lane's eight windows of eight bits are
// one shift, and their levels one look-up among 128, negated where the upper bit says so. A step of 16 inputs is two tiles
// side by side.
#include "trellis.h"

#include "linear.h"

#if defined(SPECPRESS_TWIN)
namespace SPECPRESS_TWIN {
void linear_trellis(const specpress::Weights&, const specpress::Inputs&, int64_t, int64_t, float*, int64_t, bool);
}
#endif

namespace SPECPRESS_PATH {

struct Sequence {
    const uint8_t* p;
};

// What an unsigned operand adds to levels, which adds as much times Σ x.
constexpr int RAISED = UNSIGNED_DOT ? 128 : 0;

#if defined(__AVX512VBMI__)
template <int BITS>
struct Decoder {
    static constexpr int BYTES = 32 * BITS, PART = 8 * BITS;
    __m512i low, high, places, wrapped, shifts;

    explicit Decoder(const int8_t* levels) {
        alignas(64) uint8_t bytes[128], own[64], last[64];
        for (int s = 0; s < 128; s++) bytes[s] = static_cast<uint8_t>(levels[s] + RAISED);
        low = _mm512_load_si512(bytes), high = _mm512_load_si512(bytes + 64);
        for (int lane = 0; lane < 8; lane++)
            for (int j = 0; j < 8; j++) {
                own[8 * lane + j] = static_cast<uint8_t>((BITS * lane + j) & 63);
                // Of the last 64 bytes, and from 64 on of the first: what follows the end is the beginning.
                const int at = 3 * PART + BITS * lane + j;
                last[8 * lane + j] = static_cast<uint8_t>(at < BYTES ? at - (BYTES - 64) : 64 + at - BYTES);
                bytes[8 * lane + j] = static_cast<uint8_t>(BITS * j);
            }
        places = _mm512_load_si512(own), wrapped = _mm512_load_si512(last), shifts = _mm512_load_si512(bytes);
    }

    template <int I>
    B64 part(const uint8_t* p) const {
        __m512i spread;
        if constexpr (I == 3) {
            spread = _mm512_permutex2var_epi8(_mm512_loadu_si512(p + BYTES - 64), wrapped, _mm512_loadu_si512(p));
        } else {
            // Where 64 bytes from here would end beyond the tile they begin earlier.
            constexpr int from = I * PART < BYTES - 64 ? I * PART : BYTES - 64, off = I * PART - from;
            const __m512i at = off ? _mm512_add_epi8(places, _mm512_set1_epi8(off)) : places;
            spread = _mm512_permutexvar_epi8(at, _mm512_loadu_si512(p + from));
        }
        const __m512i states = _mm512_multishift_epi64_epi8(shifts, spread);
        const __m512i levels = _mm512_permutex2var_epi8(low, states, high);
        // Raised by 128 they are unsigned bytes, and 128 − level is the negative of 128 + level there, too.
        return {_mm512_mask_sub_epi8(levels, _mm512_movepi8_mask(states), _mm512_setzero_si512(), levels)};
    }
};
#else
template <int BITS>
struct Decoder {
    static constexpr int BYTES = 32 * BITS, PART = 8 * BITS;
    uint8_t level[specpress::TRELLIS_STATES];

    explicit Decoder(const int8_t* levels) {
        for (int s = 0; s < 128; s++) {
            level[s] = static_cast<uint8_t>(levels[s] + RAISED);
            level[128 + s] = static_cast<uint8_t>(RAISED - levels[s]);
        }
    }

    template <int I>
    B64 part(const uint8_t* p) const {
        alignas(64) uint8_t out[64];
        uint8_t bytes[PART + 8];
        constexpr int rest = I == 3 ? 0 : 8;
        std::memcpy(bytes, p + I * PART, PART + rest);
        if constexpr (rest == 0) std::memcpy(bytes + PART, p, 8);
        for (int lane = 0; lane < 8; lane++) {
            const uint8_t* from = bytes + BITS * lane;
            // Eight windows are 7 · bits + 8 bits: five bytes at most.
            uint64_t window = 0;
            for (int j = 0; j < 5; j++) window |= static_cast<uint64_t>(from[j]) << 8 * j;
            for (int j = 0; j < 8; j++) out[8 * lane + j] = level[window >> BITS * j & 255];
        }
        return load64(out);
    }
};
#endif

template <int BITS>
struct Trellis : IntegerScheme<Trellis<BITS>, 16> {
    static constexpr int64_t BYTES = 64 * BITS;
    Decoder<BITS> decoder;
    explicit Trellis(const Weights& w) : IntegerScheme<Trellis<BITS>, 16>(w), decoder(w.levels) {}
    Sequence read(const uint8_t* codes) const { return {codes}; }
    int above(const Weights&) const { return RAISED; }
    template <int I>
    B64 part(Sequence raw) const {
        return decoder.template part<I>(raw.p);
    }
    I16 dot(I16 acc, B64 w, X4 x) const {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
        return dot_weights_unsigned(acc, w, x);
#else
        return dot_signed(acc, w, x);
#endif
    }
};

void linear_trellis(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
#if defined(SPECPRESS_TWIN)
    static const bool shuffles = __builtin_cpu_supports("avx512vbmi");
    if (shuffles) return SPECPRESS_TWIN::linear_trellis(w, in, first, last, y, stride, add_to);
#endif
    switch (w.bits) {
        case 2: return integer_linear<Trellis<2>>(w, in, first, last, y, stride, add_to);
        case 3: return integer_linear<Trellis<3>>(w, in, first, last, y, stride, add_to);
        default: return integer_linear<Trellis<4>>(w, in, first, last, y, stride, add_to);
    }
}

}  // namespace SPECPRESS_PATH
