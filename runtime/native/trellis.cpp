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
    __m256i upper[4], other[4], spread[2], by[2];  // tables: see look_up_states

    explicit Decoder(const int8_t* levels) {
        for (int t = 0; t < 8; t += 2) {
            const auto half = [&](int of) {
                return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(levels + 16 * of)));
            };
            upper[t / 2] = half(t + 1), other[t / 2] = _mm256_xor_si256(half(t), half(t + 1));
        }
        // A word for every other of 16 weights: the two bytes in which its window lies, and what moves the window to the word's
        // lower byte, as the upper half of a product, or to its upper one, as the lower half.
        alignas(32) uint8_t bytes[2][32];
        alignas(32) uint16_t powers[2][16];
        for (int j = 0; j < 16; j++)
            for (int odd = 0; odd < 2; odd++) {
                const int bit = BITS * (2 * (j % 8) + odd), at = bit % 8;
                // A window that is the first byte stands above a zero, for the power would not fit.
                const bool whole = !odd && at == 0;
                bytes[odd][2 * j] = static_cast<uint8_t>(whole ? 0x80 : bit / 8);
                bytes[odd][2 * j + 1] = static_cast<uint8_t>(bit / 8 + !whole);
                powers[odd][j] = static_cast<uint16_t>(1 << (odd || whole ? 8 - at : 16 - at));
            }
        for (int odd = 0; odd < 2; odd++) {
            spread[odd] = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes[odd]));
            by[odd] = _mm256_load_si256(reinterpret_cast<const __m256i*>(powers[odd]));
        }
    }

    // 16 bytes of a tile from AT on, which the first ones follow.
    template <int AT>
    static __m128i sixteen(const uint8_t* tile) {
        constexpr int beyond = AT + 16 > BYTES ? AT + 16 - BYTES : 0;
        const __m128i own = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile + AT - beyond));
        if constexpr (beyond == 0) return own;
        return _mm_alignr_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile)), own, beyond);
    }

    // States of 32 weights, whose bits begin AT bytes behind the tile's first.
    template <int AT>
    [[gnu::always_inline]] __m256i states(const uint8_t* tile) const {
        const __m256i raw = _mm256_inserti128_si256(_mm256_castsi128_si256(sixteen<AT>(tile)), sixteen<AT + 2 * BITS>(tile), 1);
        const __m256i even = _mm256_mulhi_epu16(_mm256_shuffle_epi8(raw, spread[0]), by[0]);
        const __m256i odd = _mm256_mullo_epi16(_mm256_shuffle_epi8(raw, spread[1]), by[1]);
        return _mm256_blendv_epi8(even, odd, _mm256_set1_epi16(static_cast<int16_t>(0xff00)));
    }

    // b where a byte of `by` has its upper bit, else a. gcc compares with zero first, which the instruction does itself.
    static __m256i chosen(__m256i a, __m256i b, __m256i by) {
#if defined(__GNUC__)
        __m256i found;
        asm("vpblendvb %3, %2, %1, %0" : "=x"(found) : "x"(a), "x"(b), "x"(by));
        return found;
#else
        return _mm256_blendv_epi8(a, b, by);
#endif
    }

    // Each state's lower five bits look up an entry of four tables of 32, of which the next two bits choose one. An entry is that
    // of the table's upper half, and where bit 4 is 0 also what the lower half differs by: an index with bit 7 looks up zeros.
    // Bits are moved up by sums, for shifts wait for the same two units as shuffles do.
    [[gnu::always_inline]] __m256i look_up_states(__m256i states) const {
        const __m256i index = _mm256_and_si256(states, _mm256_set1_epi8(15));
        const __m256i lower = _mm256_add_epi8(_mm256_and_si256(states, _mm256_set1_epi8(31)), _mm256_set1_epi8(0x70));
        const __m256i last = _mm256_add_epi8(states, states), first = _mm256_add_epi8(last, last);
        const auto of_table = [&](int t) { return _mm256_xor_si256(_mm256_shuffle_epi8(upper[t], index), _mm256_shuffle_epi8(other[t], lower)); };
        const __m256i levels = chosen(chosen(of_table(0), of_table(1), first), chosen(of_table(2), of_table(3), first), last);
        const __m256i found = _mm256_sign_epi8(levels, _mm256_or_si256(states, _mm256_set1_epi8(1)));
        return UNSIGNED_DOT ? _mm256_xor_si256(found, _mm256_set1_epi8(static_cast<char>(0x80))) : found;
    }

    template <int I>
    [[gnu::always_inline]] B64 part(Tile& tile) const {
        const __m256i first = look_up_states(states<I * PART>(tile.p)), second = look_up_states(states<I * PART + PART / 2>(tile.p));
#if defined(__AVX512F__)
        return {_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1)};
#else
        return {first, second};
#endif
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

// Levels as the decoder gives them: a byte each, 16 outputs by four inputs in 64 of them, of which two stand side by side.
template <int64_t APART>
struct LevelsOf : IntegerScheme<LevelsOf<APART>, 4> {
    static constexpr int64_t BYTES = APART;
    // They were written just before.
    static constexpr int FETCH_ROWS = 0;
    explicit LevelsOf(const Weights& w) : IntegerScheme<LevelsOf<APART>, 4>(w) {}
    int above(const Weights&) const { return RAISED; }
    template <int I>
    B64 part(B64 raw) const {
        return raw;
    }
    I16 dot(I16 acc, B64 w, X4 x) const { return dot_levels(acc, w, x); }
};
using Levels = LevelsOf<128>;

// A tile's parts, to every APART bytes.
template <int I, int APART, class Decoder, class Tile>
inline void write_parts(const Decoder& decoder, Tile tile, uint8_t* to) {
    if constexpr (I < 4) {
        store64(to + I * APART, decoder.template part<I>(tile));
        write_parts<I + 1, APART>(decoder, tile, to);
    }
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

    // Where registers are few, tables alone fill them: levels of half a chunk go through memory.
    static constexpr bool CHUNKS = NARROW;
    template <int M, class X>
    inline void half(const uint8_t* codes, const X* x, int64_t inputs, int64_t stride, int h, I16 (&acc)[M][2]) const {
        alignas(64) uint8_t levels[chunk_of<Trellis> * LANES];
        decode_half(codes, inputs / 16, levels);
        LevelsOf<64>(Weights()).template half<M>(levels, x, inputs, stride, h, acc);
    }
    [[gnu::noinline]] void decode_half(const uint8_t* codes, int64_t steps, uint8_t* to) const {
        // A copy, which nothing written can change: its tables stay in registers.
        const Decoder<BITS> own = decoder;
#pragma GCC unroll 1
        for (int64_t step = 0; step < steps; step++, codes += BYTES, to += 256) {
            fetch(codes + AHEAD);
            write_parts<0, 64>(own, Tile(codes), to);
        }
    }

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
            write_parts<0, 128>(decoder, Tile(tiles), levels + k * specpress::BLOCK);
            write_parts<0, 128>(decoder, Tile(tiles + 32 * BITS), levels + k * specpress::BLOCK + 64);
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
