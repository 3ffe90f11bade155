// ternary-1.25 (three_of_four.h): patterns are looked up as the four bytes of a word. With AVX-512 that is one look-up of 16
// words among 32, for a shift; elsewhere signs and places come from a table each, as the layout has them apart.
#include "three_of_four.h"

#include "linear.h"

namespace SPECPRESS_PATH {

using specpress::weight_of_pattern;

// Each word shifted to the right; and the bits of x where the mask has ones, those of y elsewhere.
#if defined(__AVX512F__)
template <int S> inline B64 shift_words(B64 x) {
    return S == 0 ? x : B64{_mm512_srli_epi32(x.v, S)};
}
inline B64 select_bits(int mask, B64 x, B64 y) { return {_mm512_ternarylogic_epi32(_mm512_set1_epi32(mask), x.v, y.v, 0xca)}; }
#elif defined(__AVX2__)
template <int S> inline B64 shift_words(B64 x) {
    return S == 0 ? x : B64{_mm256_srli_epi32(x.a, S), _mm256_srli_epi32(x.b, S)};
}
inline B64 select_bits(int mask, B64 x, B64 y) {
    const __m256i m = _mm256_set1_epi32(mask);
    auto one = [&](__m256i p, __m256i q) { return _mm256_or_si256(_mm256_and_si256(m, p), _mm256_andnot_si256(m, q)); };
    return {one(x.a, y.a), one(x.b, y.b)};
}
#elif defined(__ARM_FEATURE_DOTPROD)
template <int S> inline B64 shift_words(B64 x) {
    if constexpr (S == 0) return x;
    else return quarters<B64>([](auto p) { return vreinterpretq_u8_u32(vshrq_n_u32(vreinterpretq_u32_u8(p), S)); }, x);
}
inline B64 select_bits(int mask, B64 x, B64 y) {
    const uint8x16_t m = vreinterpretq_u8_u32(vdupq_n_u32(static_cast<uint32_t>(mask)));
    return quarters<B64>([&](auto p, auto q) { return vbslq_u8(m, p, q); }, x, y);
}
#else
inline uint32_t word_of(const B64& x, int lane) {
    uint32_t word;
    std::memcpy(&word, x.v + 4 * lane, 4);
    return word;
}
template <class F>
inline B64 by_words(F f) {
    B64 out;
    for (int lane = 0; lane < LANES; lane++) {
        const uint32_t word = f(lane);
        std::memcpy(out.v + 4 * lane, &word, 4);
    }
    return out;
}
template <int S> inline B64 shift_words(B64 x) {
    return by_words([&](int lane) { return word_of(x, lane) >> S; });
}
inline B64 select_bits(int mask, B64 x, B64 y) {
    const auto m = static_cast<uint32_t>(mask);
    return by_words([&](int lane) { return (word_of(x, lane) & m) | (word_of(y, lane) & ~m); });
}
#endif

// Pattern I of 16 outputs in the lower five bits of each word, whatever the others hold.
template <int I>
inline B64 pattern(const uint8_t* words) {
    if constexpr (I < 30) {
        return shift_words<5 * (I % 6)>(load64(words + I / 6 * 64));
    } else {
        constexpr int from = I == 30 ? 0 : 3;
        const B64 low = shift_words<30>(load64(words + from * 64)), middle = shift_words<28>(load64(words + (from + 1) * 64));
        const B64 high = shift_words<I == 30 ? 26 : 27>(load64(words + 2 * 64));
        return select_bits(15, select_bits(3, low, middle), high);
    }
}

// From patterns to weights plus one, in bytes.
#if defined(__AVX512F__)
struct Patterns {
    __m512i low, high;
    Patterns() {
        alignas(64) uint8_t bytes[128];
        for (int i = 0; i < 128; i++) bytes[i] = static_cast<uint8_t>(weight_of_pattern(i / 4, i % 4) + 1);
        low = _mm512_load_si512(bytes), high = _mm512_load_si512(bytes + 64);
    }
    B64 look_up(B64 index) const { return {_mm512_permutex2var_epi32(low, index.v, high)}; }
};
#else
// Signs of three bits as four bytes of ±1, and what leaves out the byte at a place. Four places fill eight entries twice.
struct Halves {
    alignas(32) uint8_t signs[32], kept[32];
    Halves() {
        for (int i = 0; i < 32; i++) {
            // A pattern with these signs whose 0 is elsewhere.
            const int three = i / 4, place = i % 4, elsewhere = place == 0 ? 1 : 0;
            signs[i] = static_cast<uint8_t>(weight_of_pattern(three | elsewhere << 3, place));
            kept[i] = i / 4 % 4 == place ? 0 : 255;
        }
    }
};
#if defined(__AVX2__)
struct Patterns {
    __m256i signs, kept;
    Patterns() {
        const Halves halves;
        signs = _mm256_load_si256(reinterpret_cast<const __m256i*>(halves.signs));
        kept = _mm256_load_si256(reinterpret_cast<const __m256i*>(halves.kept));
    }
    __m256i one(__m256i index) const {
        const __m256i sign = _mm256_permutevar8x32_epi32(signs, index);
        const __m256i keep = _mm256_permutevar8x32_epi32(kept, _mm256_srli_epi32(index, 3));
        return _mm256_add_epi8(_mm256_and_si256(sign, keep), _mm256_set1_epi8(1));
    }
    B64 look_up(B64 index) const { return {one(index.a), one(index.b)}; }
};
#elif defined(__ARM_FEATURE_DOTPROD)
struct Patterns {
    uint8x16x2_t signs;
    uint8x16_t kept;
    Patterns() {
        const Halves halves;
        signs.val[0] = vld1q_u8(halves.signs), signs.val[1] = vld1q_u8(halves.signs + 16), kept = vld1q_u8(halves.kept);
    }
    // The places of a word's four bytes: four times its lowest bits, and 0 to 3.
    static uint8x16_t places(uint32x4_t x, uint32_t mask) {
        return vreinterpretq_u8_u32(vmlaq_u32(vdupq_n_u32(0x03020100u), vandq_u32(x, vdupq_n_u32(mask)), vdupq_n_u32(0x04040404u)));
    }
    B64 look_up(B64 index) const {
        return quarters<B64>(
            [&](auto p) {
                const uint32x4_t x = vreinterpretq_u32_u8(p);
                const uint8x16_t sign = vqtbl2q_u8(signs, places(x, 7)), keep = vqtbl1q_u8(kept, places(vshrq_n_u32(x, 3), 3));
                return vaddq_u8(vandq_u8(sign, keep), vdupq_n_u8(1));
            },
            index);
    }
};
#else
struct Patterns {
    uint32_t words[32];
    Patterns() {
        for (int i = 0; i < 32; i++) {
            uint8_t bytes[4];
            for (int place = 0; place < 4; place++) bytes[place] = static_cast<uint8_t>(weight_of_pattern(i, place) + 1);
            std::memcpy(words + i, bytes, 4);
        }
    }
    B64 look_up(B64 index) const {
        return by_words([&](int lane) { return words[word_of(index, lane) & 31]; });
    }
};
#endif
#endif

struct Words {
    const uint8_t* p;
};

struct ThreeOfFour : IntegerScheme<ThreeOfFour, specpress::FOURS_INPUTS> {
    static constexpr int64_t BYTES = 128 * specpress::FOURS_WORDS;
    static constexpr int SHORT = 256;
    static constexpr int64_t FEW_TILED = 5;
    Patterns patterns;
    explicit ThreeOfFour(const Weights& w) : IntegerScheme(w) {}
    [[gnu::always_inline]] void fetch(const uint8_t* codes) const {
        for (int64_t word = 0; word < specpress::FOURS_WORDS; word++) prefetch(codes + 64 * word);
    }
    Words read(const uint8_t* codes) const { return {codes}; }
    int above(const Weights&) const { return 1; }
    template <int I>
    B64 part(Words raw) const {
        return patterns.look_up(pattern<I>(raw.p));
    }
    I16 dot(I16 acc, B64 w, X4 x) const { return dot_weights_unsigned(acc, w, x); }
};

void linear_three_of_four(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
    integer_linear<ThreeOfFour>(w, in, first, last, y, stride, add_to);
}

}  // namespace SPECPRESS_PATH
