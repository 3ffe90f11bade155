// AVX2: codes of 8 bits multiplied as words. Products of bytes leave no room for a second one in 16 bits, and giving the
// inputs the signs of the weights first takes a third instruction of the two units that multiply. As words two products are
// one instruction and fit 32 bits. Inputs are widened once (widen_inputs), weights in registers; of four inputs the even
// words are the first and third, the odd ones the second and fourth.
//
// Many rows go in panels: a slab of weights is widened once for all of them, and Winograd's inner product (1968) takes half
// of the multiplications:
//
//   w0·x0 + w1·x1 = (w0 + x1)·(w1 + x0) − w0·w1 − x0·x1
//
// The last two terms are sums over a row of weights and over a row of inputs alone. Sums wrap in 32 bits and the result
// fits them, so it is the same exact integer, and so are a row's bits.
#pragma once

#include "linear.h"

namespace SPECPRESS_PATH {

constexpr int64_t PANEL = 64;  // rows at most
constexpr int64_t SLAB = 256;  // inputs: their widened weights stay in the first level of the cache

// 16 outputs by four inputs.
struct Quad {
    B64 even, odd;
};
inline Quad widened(B64 codes) {
    return {{_mm256_srai_epi16(_mm256_slli_epi16(codes.a, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(codes.b, 8), 8)},
            {_mm256_srai_epi16(codes.a, 8), _mm256_srai_epi16(codes.b, 8)}};
}
inline __m256i two_words(const int16_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
}

// ------------------------------------------------------------------------------------------------------- a few rows
inline __m256i add_words(__m256i acc, __m256i w, __m256i x) {
#if defined(__GNUC__)
    // In one piece, as `pairs` is.
    __m256i t;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(t) : "x"(w), "x"(x));
    return acc;
#else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(w, x));
#endif
}

template <int M, int I, class Scheme, class Raw>
inline void word_parts(const Scheme& scheme, Raw raw, const int16_t* x, int64_t stride, I16 (&sums)[M]) {
    if constexpr (I < Scheme::STEP / 4) {
        const Quad w = widened(scheme.template part<I>(raw));
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            const __m256i odd = two_words(x + m * stride + 4 * I), even = two_words(x + m * stride + 4 * I + 2);
            sums[m] = {add_words(sums[m].a, w.even.a, even), add_words(sums[m].b, w.even.b, even)};
            sums[m] = {add_words(sums[m].a, w.odd.a, odd), add_words(sums[m].b, w.odd.b, odd)};
        }
        word_parts<M, I + 1>(scheme, raw, x, stride, sums);
    }
}

// ------------------------------------------------------------------------------------------------------ many rows
// acc + (even + second)·(odd + first).
inline __m256i add_crossed(__m256i acc, __m256i even, __m256i odd, __m256i second, __m256i first) {
#if defined(__GNUC__)
    __m256i t, u;
    asm("vpaddw %5, %3, %1\n\tvpaddw %6, %4, %2\n\tvpmaddwd %1, %2, %1\n\tvpaddd %1, %0, %0"
        : "+x"(acc), "=&x"(t), "=&x"(u)
        : "x"(even), "x"(odd), "x"(second), "x"(first));
    return acc;
#else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_add_epi16(even, second), _mm256_add_epi16(odd, first)));
#endif
}

inline void store64(int16_t* p, B64 x) { store64(reinterpret_cast<uint8_t*>(p), x); }
inline void storei(int32_t* p, I16 x) {
    auto* q = reinterpret_cast<__m256i*>(p);
    _mm256_store_si256(q, x.a), _mm256_store_si256(q + 1, x.b);
}
inline I16 subi(I16 x, I16 y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }

// Words of four inputs and 32 outputs: even and odd ones of the left 16 outputs, then of the right ones.
constexpr int64_t QUAD = 128;

template <int I, class Scheme, class Raw>
inline void widen_parts(const Scheme& scheme, Raw left, Raw right, int16_t* to, I16 (&pairs)[2]) {
    if constexpr (I < Scheme::STEP / 4) {
        const Quad wide[2] = {widened(scheme.template part<I>(left)), widened(scheme.template part<I>(right))};
        for (int h = 0; h < 2; h++) {
            store64(to + I * QUAD + 64 * h, wide[h].even);
            store64(to + I * QUAD + 64 * h + 32, wide[h].odd);
            pairs[h] = addi(pairs[h], {_mm256_madd_epi16(wide[h].even.a, wide[h].odd.a), _mm256_madd_epi16(wide[h].even.b, wide[h].odd.b)});
        }
        widen_parts<I + 1>(scheme, left, right, to, pairs);
    }
}

// M rows by 16 outputs: sums over `quads` quads.
template <int M>
inline void add_slab(const int16_t* w, const int16_t* x, int64_t quads, int64_t stride, I16 (&acc)[M]) {
    I16 sums[M];
    for (int m = 0; m < M; m++) sums[m] = acc[m];
    for (int64_t q = 0; q < quads; q++, w += QUAD, x += 4) {
        const auto* p = reinterpret_cast<const uint8_t*>(w);
        const B64 even = load64(p), odd = load64(p + 64);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            const __m256i second = two_words(x + m * stride), first = two_words(x + m * stride + 2);
            sums[m] = {add_crossed(sums[m].a, even.a, odd.a, second, first), add_crossed(sums[m].b, even.b, odd.b, second, first)};
        }
    }
    for (int m = 0; m < M; m++) acc[m] = sums[m];
}

// A slab, inputs `at`.. of group g, and whether its group begins or ends with it; its weights, and Σ of the products of
// their pairs so far.
struct Slab {
    int64_t g, at, inputs;
    bool first, last;
    const int16_t* weights;
    const I16* pairs;
};

// M rows by half h of a block: to `sums`, or where the group ends to the tile.
template <class Scheme, int M>
inline void panel_tile(const Scheme& scheme, const Weights& w, const Inputs& in, const Slab& s, int64_t row, int64_t block, int h,
                       int32_t* sums, float* tile) {
    const int64_t at = (block * w.groups + s.g) * BLOCK + h * LANES;
    const int32_t* input_sums = in.sums + row * in.groups + s.g;
    I16 acc[M];
    for (int m = 0; m < M; m++) acc[m] = s.first ? scheme.start(w, at, input_sums[m * in.groups]) : loadi(sums + m * BLOCK);
    add_slab<M>(s.weights + 64 * h, in.wide + row * in.stride + s.at, s.inputs / 4, in.stride, acc);
    if (!s.last) {
        for (int m = 0; m < M; m++) storei(sums + m * BLOCK, acc[m]);
        return;
    }
    const F16 scale = load_scale(w, at);
    for (int m = 0; m < M; m++) {
        const int64_t of = (row + m) * in.groups + s.g;
        const I16 exact = subi(acc[m], addi(s.pairs[h], seti(in.pairs[of])));
        F16 term = mul(to_float(scheme.total(exact, in.sums[of])), scale);
        if (w.offset) term = sub(term, mul(set(static_cast<float>(in.sums[of])), load(w.offset + at)));
        term = mul(term, set(in.step[of]));
        float* y = tile + m * BLOCK;
        store(y, s.g == 0 ? term : add(load(y), term));
    }
}

template <class Scheme, int M = MAX_ROWS>
inline void any_panel_tile(int64_t rows, const Scheme& scheme, const Weights& w, const Inputs& in, const Slab& s, int64_t row,
                           int64_t block, int h, int32_t* sums, float* tile) {
    if constexpr (M > 0) {
        if (rows == M)
            panel_tile<Scheme, M>(scheme, w, in, s, row, block, h, sums, tile);
        else
            any_panel_tile<Scheme, M - 1>(rows, scheme, w, in, s, row, block, h, sums, tile);
    }
}

// One block's outputs for a panel of rows.
template <class Scheme>
void panel_product(const Weights& w, const Inputs& in, int64_t row, int64_t rows, int64_t block, float* y, int64_t stride, bool add_to) {
    alignas(64) float tile[PANEL * BLOCK];
    alignas(64) int32_t sums[PANEL * BLOCK];
    alignas(64) int16_t weights[SLAB / 4 * QUAD];
    const Scheme scheme(w);
    const int64_t size = w.group;
    const uint8_t* codes = w.codes + block * w.groups * (size / Scheme::STEP) * Scheme::BYTES;
    for (int64_t g = 0; g < w.groups; g++) {
        I16 pairs[2] = {seti(0), seti(0)};
        for (int64_t k = 0; k < size; k += SLAB) {
            const int64_t inputs = size - k < SLAB ? size - k : SLAB;
            // While the rows pass over this slab, the next one comes from memory.
            const int64_t ahead = inputs / Scheme::STEP * Scheme::BYTES;
            int16_t* to = weights;
            for (int64_t i = 0; i < inputs; i += Scheme::STEP, codes += Scheme::BYTES, to += Scheme::STEP / 4 * QUAD) {
                scheme.fetch(codes + ahead);
                scheme.fetch(codes + ahead + Scheme::BYTES / 2);
                widen_parts<0>(scheme, scheme.read(codes), scheme.read(codes + Scheme::BYTES / 2), to, pairs);
            }
            const Slab slab = {g, g * size + k, inputs, k == 0, k + inputs == size, weights, pairs};
            for (int64_t m = 0; m < rows; m += MAX_ROWS) {
                const int64_t count = rows - m < MAX_ROWS ? rows - m : MAX_ROWS;
                for (int h = 0; h < 2; h++) {
                    const int64_t to_sums = m * BLOCK + h * LANES;
                    any_panel_tile<Scheme>(count, scheme, w, in, slab, row + m, block, h, sums + to_sums, tile + to_sums);
                }
            }
        }
    }
    for (int64_t m = 0; m < rows; m++) finish<1>(w, block, tile + m * BLOCK, y + (row + m) * stride, stride, add_to);
}

template <class Scheme>
void panel_linear(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
    // Panels of about equal size: a last one of a few rows would widen all weights for them.
    const int64_t panels = (in.rows + PANEL - 1) / PANEL, panel = (in.rows + panels - 1) / panels;
    for (int64_t row = 0; row < in.rows; row += panel) {
        const int64_t rows = in.rows - row < panel ? in.rows - row : panel;
        for (int64_t block = first; block < last; block++) panel_product<Scheme>(w, in, row, rows, block, y, stride, add_to);
    }
}

}  // namespace SPECPRESS_PATH
