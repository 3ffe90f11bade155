// trellis: a tile of 16 outputs by 16 inputs is one circular sequence of bits (trellis.h). 64 weights in the order of the
// products, a part of it, are 8 · bits bytes: a byte shuffle spreads them over eight lanes, each lane's eight windows of eight
// bits are one shift, and their levels one look-up among 128, negated where the upper bit says so. A step of 16 inputs is two
// tiles side by side.
#include "trellis.h"

#include <vector>

#include "linear.h"

#if defined(SPECPRESS_TWIN)
namespace SPECPRESS_TWIN {
void linear_trellis(const specpress::Weights&, const specpress::Inputs&, int64_t, int64_t, float*, int64_t, bool);
}
#endif

namespace SPECPRESS_PATH {

// What an unsigned operand adds to levels, which adds as much times Σ x.
constexpr int RAISED = UNSIGNED_DOT ? 128 : 0;

// A tile of which parts are decoded by themselves.
struct Codes {
    const uint8_t* p;
    explicit Codes(const uint8_t* codes) : p(codes) {}
};

#if defined(__AVX512VBMI__)
template <int BITS>
struct Decoder {
    // A lane's windows need LANE bytes: one shuffle spreads two parts where these fit into its eight.
    static constexpr int BYTES = 32 * BITS, PART = 8 * BITS, LANE = (7 * BITS + 15) / 8, TOGETHER = 2 * LANE <= 8 ? 2 : 1;
    static constexpr int SPREADS = 4 / TOGETHER;
    // Where in the last shuffle what follows the end lies, which is the beginning.
    static constexpr int WRAPPED = 56 + TOGETHER * LANE - 1;
    struct Tile : Codes {
        using Codes::Codes;
        __m512i spread;
    };
    __m512i low, high, places[SPREADS], shifts[TOGETHER];

    // The first of the 64 bytes that a shuffle reads: those from its parts' first on, or the tile's last.
    static constexpr int first(int spread) {
        return spread * TOGETHER * PART < BYTES - 64 ? spread * TOGETHER * PART : BYTES - 64;
    }

    explicit Decoder(const int8_t* levels) {
        alignas(64) uint8_t bytes[128];
        for (int s = 0; s < 128; s++) bytes[s] = static_cast<uint8_t>(levels[s] + RAISED);
        low = _mm512_load_si512(bytes), high = _mm512_load_si512(bytes + 64);
        for (int s = 0; s < SPREADS; s++) {
            for (int i = 0; i < 64; i++) {
                const int part = s * TOGETHER + (TOGETHER == 2 ? i % 8 / LANE : 0), byte = TOGETHER == 2 ? i % 8 % LANE : i % 8;
                // A tile of 64 bytes is a circle to the shuffle, too.
                bytes[i] = static_cast<uint8_t>((part * PART + BITS * (i / 8) + byte - first(s)) & 63);
            }
            places[s] = _mm512_load_si512(bytes);
        }
        for (int t = 0; t < TOGETHER; t++) {
            for (int i = 0; i < 64; i++) bytes[i] = static_cast<uint8_t>(8 * LANE * t + BITS * (i % 8));
            shifts[t] = _mm512_load_si512(bytes);
        }
    }

    // Parts of a tile are asked for one after the other.
    template <int I>
    B64 part(Tile& tile) const {
        if constexpr (I % TOGETHER == 0) {
            constexpr int s = I / TOGETHER;
            tile.spread = _mm512_permutexvar_epi8(places[s], _mm512_loadu_si512(tile.p + first(s)));
            if constexpr (s == SPREADS - 1 && BYTES > 64)
                tile.spread = _mm512_mask_loadu_epi8(tile.spread, 1ull << WRAPPED, tile.p - WRAPPED);
        }
        const __m512i states = _mm512_multishift_epi64_epi8(shifts[I % TOGETHER], tile.spread);
        const __m512i levels = _mm512_permutex2var_epi8(low, states, high);
        // Raised by 128 they are unsigned bytes, and 128 − level is the negative of 128 + level there, too.
        return {_mm512_mask_sub_epi8(levels, _mm512_movepi8_mask(states), _mm512_setzero_si512(), levels)};
    }
};
#elif defined(__AVX2__)
template <int BITS>
struct Decoder {
    static constexpr int BYTES = 32 * BITS, PART = 8 * BITS;
    using Tile = Codes;
    __m256i table[8], spread[2], lift;

    explicit Decoder(const int8_t* levels) {
        for (int t = 0; t < 8; t++)
            table[t] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(levels + 16 * t)));
        // A word for each of 16 weights: the two bytes in which its window lies, and what lifts it into the upper one.
        alignas(32) uint8_t own[2][32];
        alignas(32) uint16_t by[16];
        for (int half = 0; half < 2; half++)
            for (int j = 0; j < 16; j++) {
                const int weight = 16 * (j / 8) + 8 * half + j % 8, bit = BITS * weight, from = j / 8 * 2 * BITS;
                own[half][2 * j] = static_cast<uint8_t>(bit / 8 - from);
                own[half][2 * j + 1] = static_cast<uint8_t>(bit / 8 - from + 1);
                by[j] = static_cast<uint16_t>(1 << (8 - bit % 8));
            }
        for (int half = 0; half < 2; half++) spread[half] = _mm256_load_si256(reinterpret_cast<const __m256i*>(own[half]));
        lift = _mm256_load_si256(reinterpret_cast<const __m256i*>(by));
    }

    // States of 32 weights, whose bits begin at p and end before p + 32.
    __m256i states(const uint8_t* p) const {
        const __m256i raw = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                                                    _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * BITS)), 1);
        const __m256i first = _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(raw, spread[0]), lift), 8);
        const __m256i second = _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(raw, spread[1]), lift), 8);
        return _mm256_packus_epi16(first, second);
    }

    // One of eight tables of sixteen has an index without its upper bit; the others give zeros.
    __m256i look_up_states(__m256i states) const {
        const __m256i index = _mm256_and_si256(states, _mm256_set1_epi8(127)), above = _mm256_set1_epi8(0x70);
        __m256i found = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int t = 0; t < 8; t++) {
            const __m256i at = _mm256_adds_epu8(_mm256_xor_si256(index, _mm256_set1_epi8(static_cast<char>(16 * t))), above);
            found = _mm256_or_si256(found, _mm256_shuffle_epi8(table[t], at));
        }
        found = _mm256_sign_epi8(found, _mm256_or_si256(states, _mm256_set1_epi8(1)));
        return UNSIGNED_DOT ? _mm256_xor_si256(found, _mm256_set1_epi8(static_cast<char>(0x80))) : found;
    }

    B64 both(const uint8_t* p) const {
        const __m256i first = look_up_states(states(p)), second = look_up_states(states(p + PART / 2));
#if defined(__AVX512F__)
        return {_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1)};
#else
        return {first, second};
#endif
    }

    template <int I>
    B64 part(Tile& tile) const {
        const uint8_t* p = tile.p;
        if constexpr (I < 3) return both(p + I * PART);
        // The last windows end in the beginning.
        uint8_t end[PART + 16];
        std::memcpy(end, p + 3 * PART, PART), std::memcpy(end + PART, p, 16);
        return both(end);
    }
};
#else
template <int BITS>
struct Decoder {
    static constexpr int BYTES = 32 * BITS, PART = 8 * BITS;
    using Tile = Codes;
    uint8_t level[specpress::TRELLIS_STATES];

    explicit Decoder(const int8_t* levels) {
        for (int s = 0; s < 128; s++) {
            level[s] = static_cast<uint8_t>(levels[s] + RAISED);
            level[128 + s] = static_cast<uint8_t>(RAISED - levels[s]);
        }
    }

    template <int I>
    B64 part(Tile& tile) const {
        const uint8_t* p = tile.p;
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

inline I16 dot_levels(I16 acc, B64 w, X4 x) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    return dot_weights_unsigned(acc, w, x);
#else
    return dot_signed(acc, w, x);
#endif
}

template <int BITS>
struct Trellis : IntegerScheme<Trellis<BITS>, 16> {
    static constexpr int64_t BYTES = 64 * BITS;
    // Decoding leaves the processor too few loads in sight to read ahead by.
    static constexpr int FETCH_ROWS = 1;
    static constexpr int64_t FEW_TILED = 4;
    static constexpr bool WHOLE = !NARROW;
    using Tile = typename Decoder<BITS>::Tile;
    Decoder<BITS> decoder;
    explicit Trellis(const Weights& w) : IntegerScheme<Trellis<BITS>, 16>(w), decoder(w.levels) {}
    // Half of a step's.
    [[gnu::always_inline]] void fetch(const uint8_t* codes) const {
        for (int64_t line = 0; line < BYTES / 2; line += 64) prefetch(codes + line);
    }
    Tile read(const uint8_t* codes) const { return Tile(codes); }
    int above(const Weights&) const { return RAISED; }
    template <int I>
    B64 part(Tile& tile) const {
        return decoder.template part<I>(tile);
    }
    I16 dot(I16 acc, B64 w, X4 x) const { return dot_levels(acc, w, x); }

    // `size` inputs by 32 outputs. Each part is decoded before the one ahead of it is multiplied: products of eight rows, which
    // otherwise wait for it, take a fifth less time.
    template <int M, int SETS>
    inline void whole(const uint8_t* codes, const int8_t* x, int64_t size, int64_t stride, I16 (&acc)[SETS * M][2]) const {
        Tile left = read(codes), right = read(codes + BYTES / 2);
        B64 a = part<0>(left), b = part<0>(right);
        for (int64_t k = 0; k < size; k += 16) {
            if (fetches_ahead<Trellis, M>())
                for (int64_t line = 0; line < BYTES; line += 64) prefetch(codes + AHEAD + line);
            // What follows the last step is its own first part, for nothing.
            const uint8_t* next = k + 16 < size ? codes + BYTES : codes;
            parts_ahead<M, SETS, 0>(left, right, next, a, b, x + k, stride, acc);
            codes = next;
        }
    }
    template <int M, int SETS, int I>
    inline void parts_ahead(Tile& left, Tile& right, const uint8_t* next, B64& a, B64& b, const int8_t* x, int64_t stride,
                            I16 (&acc)[SETS * M][2]) const {
        if constexpr (I < 4) {
            if constexpr (I == 3) left = read(next), right = read(next + BYTES / 2);
            const B64 c = part<(I + 1) % 4>(left), d = part<(I + 1) % 4>(right);
            this->template add_part<M, SETS, I>(a, b, x, stride, acc);
            a = c, b = d;
            parts_ahead<M, SETS, I + 1>(left, right, next, a, b, x, stride, acc);
        }
    }
};

// A block's levels as the decoder gives them: a byte each, 16 outputs by four inputs in 64 of them.
struct Levels : IntegerScheme<Levels, 4> {
    using IntegerScheme::IntegerScheme;
    int above(const Weights&) const { return RAISED; }
    template <int I>
    B64 part(B64 raw) const {
        return raw;
    }
    I16 dot(I16 acc, B64 w, X4 x) const { return dot_levels(acc, w, x); }
};

template <int I = 0, class Decoder, class Tile>
inline void write_levels(const Decoder& decoder, Tile left, Tile right, uint8_t* to) {
    if constexpr (I < 4) {
        const B64 a = decoder.template part<I>(left), b = decoder.template part<I>(right);
        std::memcpy(to + I * 128, &a, 64), std::memcpy(to + I * 128 + 64, &b, 64);
        write_levels<I + 1>(decoder, left, right, to);
    }
}

// A few rows take levels from the registers in which they were decoded; for more each block is decoded once, into memory.
template <int BITS>
void linear_of(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
#if defined(__AMX_INT8__)
    // Its tiles are filled once for all rows, too.
    if (in.rows >= Trellis<BITS>::FEW_TILED) return tiled_linear<Trellis<BITS>>(w, in, first, last, y, stride, add_to);
#endif
    if (in.rows <= MAX_ROWS) return linear<Trellis<BITS>>(w, in, first, last, y, stride, add_to);
    thread_local std::vector<uint8_t> memory;
    const int64_t size = w.group * specpress::BLOCK;
    memory.resize(static_cast<size_t>(size + 63));
    uint8_t* levels = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 63);
    using Tile = typename Decoder<BITS>::Tile;
    const Decoder<BITS> decoder(w.levels);
    for (int64_t block = first; block < last; block++) {
        const uint8_t* tiles = w.codes + block * (w.group / 16) * 64 * BITS;
        for (int64_t k = 0; k < w.group; k += 16, tiles += 64 * BITS) {
            prefetch(tiles + AHEAD), prefetch(tiles + AHEAD + 32 * BITS);
            write_levels(decoder, Tile(tiles), Tile(tiles + 32 * BITS), levels + k * specpress::BLOCK);
        }
        Weights decoded = w;
        decoded.codes = levels - block * size;
        integer_linear<Levels>(decoded, in, block, block + 1, y, stride, add_to);
    }
}

void linear_trellis(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
#if defined(SPECPRESS_TWIN)
    static const bool shuffles = __builtin_cpu_supports("avx512vbmi");
    if (shuffles) return SPECPRESS_TWIN::linear_trellis(w, in, first, last, y, stride, add_to);
#endif
    switch (w.bits) {
        case 2: return linear_of<2>(w, in, first, last, y, stride, add_to);
        case 3: return linear_of<3>(w, in, first, last, y, stride, add_to);
        default: return linear_of<4>(w, in, first, last, y, stride, add_to);
    }
}

}  // namespace SPECPRESS_PATH
