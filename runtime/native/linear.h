// The products of the integer schemes: exact 32-bit sums per group, scaled and added first group to last.
//
//   y[n] = Σ_g (float(Σ_{k in g} q·x) · scale[n, g] (− float(Σ x) · offset[n, g])) · step[g]   (+ bias[n])
//
// One small product is up to MAX_ROWS rows by 32 outputs. A row's operations are the same whichever rows share it, so
// its bits are too. A scheme says how 64 bytes become weights (`part`), how many inputs two such vectors hold (STEP),
// and how an accumulator starts (`start`): the dot instruction wants one unsigned operand, and what was added to make it
// so is taken off beforehand, in exact integers. Where one vector does not hold whole weights a scheme also says what is
// read at a place (`fetch`, `read`) and what a finished accumulator stands for (`total`).
#pragma once

#include <cstddef>

#include "kernels.h"
#include "processor.h"
#include "vec.h"

namespace SPECPRESS_PATH {

using specpress::BLOCK;
using specpress::Inputs;
using specpress::Weights;

// How far ahead of the products the codes are fetched, in bytes: half a microsecond of one core's share of the memory's
// bandwidth.
constexpr int64_t AHEAD = 8192;

// Into the cache of the second level, on most processors: on their way to the first, lines hold the few buffers that loads
// which miss need, and on Zen 4 four rows of int4 took 12 % longer, one row 4 %. Xeons with AMX gain from the first: nf4 11 to 15 %.
// Inlined: to gcc a function that only fetches does nothing, and it leaves calls to it out.
[[gnu::always_inline]] inline void prefetch(const void* p) {
#if defined(__AMX_INT8__)
    __builtin_prefetch(p, 0, 3);
#else
    if (specpress::FETCHES_PAST_L2)
        __builtin_prefetch(p, 0, 0);
    else
        __builtin_prefetch(p, 0, 2);
#endif
}

// Whether products of M rows fetch codes ahead. The processor does so by itself as long as it reads far enough ahead: where
// a few rows leave it little else to do, asking for each line once more takes 8 to 20 % longer on Zen 4 (int8 at four rows,
// int4 at one), and with more rows not asking takes up to half as long again. On Zen 5 not asking takes longer from a row or
// three on, and where tiles of two rows take turns it does at any (int4 by AVX-VNNI: 1.2 to 1.4 times).
template <class Scheme, int M>
inline bool fetches_ahead() {
    constexpr int ROWS = Scheme::FETCH_ROWS;
    if constexpr (ROWS == 0)
        return false;
    else if constexpr (MAX_ROWS == 2 || M >= (NARROW ? (3 * ROWS + 7) / 8 : ROWS))
        return true;
    else
        return (M >= 3 * ROWS / 8 && specpress::READS_LITTLE_AHEAD) || specpress::READS_HARDLY_AHEAD;
}

inline int64_t scale_bytes(const Weights& w) { return w.scale_type == specpress::SCALE_F32 ? 4 : 2; }

// How far ahead of a group of so many bytes its scales are fetched: they are a second stream, too thin for the processor to
// fetch ahead by itself.
inline int64_t scales_ahead(int64_t group_bytes) { return (AHEAD / group_bytes + 1) * BLOCK; }

inline F16 load_scale(const Weights& w, int64_t index) {
    if (w.scale_type == specpress::SCALE_F32) return load(static_cast<const float*>(w.scale) + index);
    const uint16_t* half = static_cast<const uint16_t*>(w.scale) + index;
    return w.scale_type == specpress::SCALE_BF16 ? load_bf16(half) : load_f16(half);
}

// Adds the bias, and what is there already if `add` says so, and stores the outputs that exist.
template <int M>
inline void finish(const Weights& w, int64_t block, const float* tile, float* y, int64_t stride, bool add_to) {
    int64_t first = block * BLOCK, count = w.outputs - first < BLOCK ? w.outputs - first : BLOCK;
    for (int m = 0; m < M; m++) {
        float* row = y + m * stride + first;
        const float* from = tile + m * BLOCK;
        if (count == BLOCK) {
            for (int h = 0; h < 2; h++) {
                F16 v = load(from + h * LANES);
                if (w.bias) v = add(v, load(w.bias + first + h * LANES));
                if (add_to) v = add(load(row + h * LANES), v);
                store(row + h * LANES, v);
            }
        } else {
            for (int64_t i = 0; i < count; i++) {
                float v = w.bias ? from[i] + w.bias[first + i] : from[i];
                row[i] = add_to ? row[i] + v : v;
            }
        }
    }
}

// The sums of a group, scaled, added to the tile; of the first group they are the tile. small_product has the same in
// place: called there, it made a single row of int4 with AVX-512 2 to 4 % slower.
template <int M, class Scheme, class Sums>
inline void add_group(const Scheme& scheme, const Weights& w, int64_t at, const Sums& acc, const float* step,
                      const int32_t* sums, int64_t groups, bool first, float* tile) {
    const F16 scale[2] = {load_scale(w, at), load_scale(w, at + LANES)};
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        const F16 by = set(step[m * groups]);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            F16 term = mul(to_float(scheme.total(acc[m][h], sums[m * groups])), scale[h]);
            if (w.offset) {
                F16 sum = set(static_cast<float>(sums[m * groups]));
                term = sub(term, mul(sum, load(w.offset + at + h * LANES)));
            }
            term = mul(term, by);
            float* y = tile + m * BLOCK + h * LANES;
            store(y, first ? term : add(load(y), term));
        }
    }
}

template <class Scheme, int M>
inline void small_product(const Weights& w, const Inputs& in, int64_t row, int64_t block, float* tile) {
    constexpr int STEP = Scheme::STEP;
    const int64_t groups = w.groups, size = w.group;
    const uint8_t* codes = w.codes + block * groups * (size / STEP) * Scheme::BYTES;
    const int8_t* x = in.codes + row * in.stride;
    const float* step = in.step + row * groups;
    const int32_t* sums = in.sums + row * groups;
    const Scheme scheme(w);
    const int64_t apart = scale_bytes(w), ahead = scales_ahead(size / STEP * Scheme::BYTES);
    const uint8_t* scales = static_cast<const uint8_t*>(w.scale);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = (block * groups + g) * BLOCK;
        if (fetches_ahead<Scheme, M>()) {
            prefetch(scales + (at + ahead) * apart);
            prefetch(scales + (at + ahead) * apart + 64);
        }
        // A few rows have too few sums to keep the multipliers busy: every other product goes to a second set of them.
        constexpr int SETS = 2 * M <= (NARROW ? 2 : MAX_ROWS) && STEP > 4 ? 2 : 1;
        I16 acc[SETS * M][2];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            acc[m][0] = scheme.start(w, at, sums[m * groups + g]);
            acc[m][1] = scheme.start(w, at + LANES, sums[m * groups + g]);
        }
        for (int m = M; m < SETS * M; m++) acc[m][0] = acc[m][1] = seti(0);
        if constexpr (Scheme::WHOLE) {
            scheme.template whole<M, SETS>(codes, x, size, in.stride, acc);
            codes += size / STEP * Scheme::BYTES;
        } else {
            for (int64_t k = 0; k < size; k += STEP, codes += Scheme::BYTES) {
                if (fetches_ahead<Scheme, M>()) {
                    scheme.fetch(codes + AHEAD);
                    scheme.fetch(codes + AHEAD + Scheme::BYTES / 2);
                }
                const auto left = scheme.read(codes), right = scheme.read(codes + Scheme::BYTES / 2);
                scheme.template each<M, SETS>(left, right, x + k, in.stride, acc);
            }
        }
        for (int m = M; m < SETS * M; m++)
            acc[m - M][0] = addi(acc[m - M][0], acc[m][0]), acc[m - M][1] = addi(acc[m - M][1], acc[m][1]);
        x += size;
        const F16 scale[2] = {load_scale(w, at), load_scale(w, at + LANES)};
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const F16 by = set(step[m * groups + g]);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                F16 term = mul(to_float(scheme.total(acc[m][h], sums[m * groups + g])), scale[h]);
                if (w.offset) {
                    F16 sum = set(static_cast<float>(sums[m * groups + g]));
                    term = sub(term, mul(sum, load(w.offset + at + h * LANES)));
                }
                term = mul(term, by);
                float* y = tile + m * BLOCK + h * LANES;
                store(y, g == 0 ? term : add(load(y), term));
            }
        }
    }
}

// How many inputs a sum of 16 bits is good for; 0: the path or the scheme has none.
template <class Scheme>
constexpr int64_t short_inputs = SHORT_SUMS ? Scheme::SHORT : 0;
// Inputs of a chunk.
template <class Scheme>
constexpr int64_t chunk_of = short_inputs<Scheme> > 0 ? short_inputs<Scheme> : 16 * Scheme::STEP;

// The same where registers are few: 16 outputs at a time, of a chunk of inputs, so that both halves of it come from the
// cache of the first level. Codes that are small enough are summed in 16 bits, and widened once a chunk. `x`: the row's
// codes, or the same as words.
template <class Scheme, int M, class X>
inline void narrow_product(const Weights& w, const Inputs& in, const X* x, int64_t row, int64_t block, float* tile) {
    constexpr int64_t STEP = Scheme::STEP, CHUNK = chunk_of<Scheme>;
    const int64_t groups = w.groups, size = w.group;
    const uint8_t* codes = w.codes + block * groups * (size / STEP) * Scheme::BYTES;
    const float* step = in.step + row * groups;
    const int32_t* sums = in.sums + row * groups;
    const Scheme scheme(w);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = (block * groups + g) * BLOCK;
        I16 acc[M][2];
        for (int m = 0; m < M; m++)
            for (int h = 0; h < 2; h++) acc[m][h] = scheme.start(w, at + h * LANES, sums[m * groups + g]);
        for (int64_t k = 0; k < size; k += CHUNK) {
            const int64_t inputs = size - k < CHUNK ? size - k : CHUNK;
            for (int h = 0; h < 2; h++) scheme.template half<M>(codes + h * (Scheme::BYTES / 2), x, inputs, in.stride, h, acc);
            codes += inputs / STEP * Scheme::BYTES;
            x += inputs;
        }
        add_group<M>(scheme, w, at, acc, step + g, sums + g, groups, g == 0, tile);
    }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Parts I, I + 1 and so on of a vector of codes, eight inputs at a time, times the rows two by two.
template <class Scheme, int M, int I, class Raw>
inline void add_pairs_of_rows(const Scheme& scheme, Raw raw, const int8_t* x, int64_t stride, I16Pair (&sums)[(M + 1) / 2]) {
    if constexpr (I < Scheme::STEP / 4) {
        const B128 weights = eights(scheme.template part<I>(raw), scheme.template part<I + 1>(raw));
#pragma GCC unroll 4
        for (int m = 0; m < M; m += 2) {
            const int8_t* row = x + m * stride + 4 * I;
            sums[m / 2] = dot_pair(sums[m / 2], weights, eight(row, m + 1 < M ? row + stride : row));
        }
        add_pairs_of_rows<Scheme, M, I + 2>(scheme, raw, x, stride, sums);
    }
}

// The same of int8, whose vectors hold four inputs: `count` of the eight are there.
template <class Scheme, int M>
inline void add_pairs_of_rows(const Scheme& scheme, const uint8_t* codes, const int8_t* x, int64_t count, int64_t stride,
                              I16Pair (&sums)[(M + 1) / 2]) {
    const B128 weights = eights(scheme.read(codes), count > 4 ? scheme.read(codes + 128) : B64());
#pragma GCC unroll 4
    for (int m = 0; m < M; m += 2) {
        const int8_t *row = x + m * stride, *next = m + 1 < M ? row + stride : row;
        sums[m / 2] = dot_pair(sums[m / 2], weights, count > 4 ? eight(row, next) : four_of_eight(row, next));
    }
}

// narrow_product of rows two by two: one instruction multiplies two outputs by two rows, eight inputs each.
template <class Scheme, int M>
inline void paired_product(const Weights& w, const Inputs& in, int64_t row, int64_t block, float* tile) {
    constexpr int64_t STEP = Scheme::STEP, CHUNK = 16 * STEP;
    const int64_t groups = w.groups, size = w.group;
    const uint8_t* codes = w.codes + block * groups * (size / STEP) * Scheme::BYTES;
    const int8_t* x = in.codes + row * in.stride;
    const float* step = in.step + row * groups;
    const int32_t* sums = in.sums + row * groups;
    const Scheme scheme(w);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = (block * groups + g) * BLOCK;
        I16Pair pairs[2][(M + 1) / 2];
        for (auto& half : pairs)
            for (I16Pair& pair : half) pair = {seti(0), seti(0)};
        for (int64_t k = 0; k < size; k += CHUNK) {
            const int64_t inputs = size - k < CHUNK ? size - k : CHUNK;
            for (int h = 0; h < 2; h++) {
                const uint8_t* from = codes + h * (Scheme::BYTES / 2);
                I16Pair own[(M + 1) / 2];
                for (int p = 0; p < (M + 1) / 2; p++) own[p] = pairs[h][p];
                if constexpr (STEP > 4) {
                    for (int64_t i = 0; i < inputs; i += STEP, from += Scheme::BYTES) {
                        scheme.fetch(from + AHEAD);
                        add_pairs_of_rows<Scheme, M, 0>(scheme, scheme.read(from), x + i, in.stride, own);
                    }
                } else {
                    int64_t i = 0;
                    for (; i + 8 <= inputs; i += 8, from += 256) {
                        scheme.fetch(from + AHEAD);
                        scheme.fetch(from + AHEAD + 128);
                        add_pairs_of_rows<Scheme, M>(scheme, from, x + i, 8, in.stride, own);
                    }
                    if (i < inputs) add_pairs_of_rows<Scheme, M>(scheme, from, x + i, 4, in.stride, own);
                }
                for (int p = 0; p < (M + 1) / 2; p++) pairs[h][p] = own[p];
            }
            codes += inputs / STEP * Scheme::BYTES;
            x += inputs;
        }
        I16 acc[M][2];
        for (int m = 0; m < M; m++)
            for (int h = 0; h < 2; h++) {
                const I16 found = m % 2 ? second_row(pairs[h][m / 2]) : first_row(pairs[h][m / 2]);
                acc[m][h] = addi(scheme.start(w, at + h * LANES, sums[m * groups + g]), found);
            }
        add_group<M>(scheme, w, at, acc, step + g, sums + g, groups, g == 0, tile);
    }
}
#endif

template <class Scheme, int M>
void tile_of_rows(const Weights& w, const Inputs& in, int64_t row, int64_t block, float* y, int64_t stride, bool add_to) {
    alignas(64) float tile[M * BLOCK];
    Scheme::template product<M>(w, in, row, block, tile);
    finish<M>(w, block, tile, y + row * stride, stride, add_to);
}

template <class Scheme, int M = MAX_ROWS>
inline void last_rows(const Weights& w, const Inputs& in, int64_t row, int64_t rows, int64_t block, float* y, int64_t stride,
                      bool add_to) {
    if constexpr (M > 0) {
        if (rows == M)
            tile_of_rows<Scheme, M>(w, in, row, block, y, stride, add_to);
        else
            last_rows<Scheme, M - 1>(w, in, row, rows, block, y, stride, add_to);
    }
}

// Where rows are a few tiles, these pass in turns over so many weights, which stay in the cache of the first level (24 KB of
// int4). Of more tiles each passes over all blocks that it is given: the rows of all would not stay there.
constexpr int64_t FEW_TILES = 4, FEW_WEIGHTS = 48 << 10;

// Blocks first..last of one layer, by tiles of nearly equal height: 8 rows and then one would take the time of ten.
template <class Scheme>
void linear(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
    const int64_t tiles = (in.rows + MAX_ROWS - 1) / MAX_ROWS, blocks = FEW_WEIGHTS / (w.groups * w.group * BLOCK);
    const int64_t together = tiles == 1 || tiles > FEW_TILES ? last - first : blocks > 1 ? blocks : 1;
    for (int64_t begin = first; begin < last; begin += together) {
        const int64_t end = begin + together < last ? begin + together : last;
        for (int64_t tile = 0, row = 0; tile < tiles; tile++) {
            const int64_t rows = (in.rows - row + tiles - tile - 1) / (tiles - tile);
            for (int64_t block = begin; block < end; block++) last_rows<Scheme>(w, in, row, rows, block, y, stride, add_to);
            row += rows;
        }
    }
}

#if defined(SPECPRESS_WORDS)
// words.h
constexpr int64_t PANEL_ROWS = 16;  // fewer do not pay for widening weights into memory
template <int M, int I, class Scheme, class Raw>
inline void word_parts(const Scheme& scheme, Raw raw, const int16_t* x, int64_t stride, I16 (&sums)[M]);
template <class Scheme>
void panel_linear(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to);
#endif

// From how many rows on AMX's tiles are faster, and bytes of a tile's row: inputs that a group should have at least.
constexpr int64_t TILED_ROWS = 16, TILE_BYTES = 64;
#if defined(__AMX_INT8__)
// amx.h
template <class Scheme>
void tiled_linear(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to);
#endif

// The same of an integer scheme: many rows in tiles or panels, where the path has them.
template <class Scheme>
void integer_linear(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
#if defined(__AMX_INT8__)
    if (in.rows >= (w.group < TILE_BYTES ? TILED_ROWS : Scheme::FEW_TILED)) return tiled_linear<Scheme>(w, in, first, last, y, stride, add_to);
#endif
#if defined(SPECPRESS_WORDS)
    if constexpr (Scheme::SHORT == 0)
        if (in.wide && in.rows >= PANEL_ROWS) return panel_linear<Scheme>(w, in, first, last, y, stride, add_to);
#endif
    linear<Scheme>(w, in, first, last, y, stride, add_to);
}

// What the integer schemes share. Derived: STEP, part<I>(raw), dot(acc, weights, x), and what parts are above the weights
// that they stand for.
template <class Scheme, int INPUTS>
struct IntegerScheme {
    static constexpr int STEP = INPUTS;
    // Bytes of 32 outputs by STEP inputs, of which the left 16 outputs have the first half.
    static constexpr int64_t BYTES = 128;
    // From how many rows on codes are fetched ahead: see fetches_ahead. 0: never.
    static constexpr int FETCH_ROWS = (31 + INPUTS) / INPUTS;
    // Whether the inputs are stored as x + 128, and not the weights so.
    static constexpr bool UNSIGNED_INPUTS = false;
    // Inputs whose products with one weight row fit 16 bits, two and two: codes up to c times 127, c · 254 · SHORT / 4 below
    // 2^15. 0: not even four of them do.
    static constexpr int SHORT = 0;
    // TILED_ROWS where groups fill tiles: where other products pass over the codes twice, or fewer.
    static constexpr int64_t FEW_TILED = MAX_ROWS + 1;
    // Whether the scheme has `whole`, all inputs at once, which decodes weights while those before are multiplied.
    static constexpr bool WHOLE = false;
    // Whether the scheme has a `half` of its own, for any number of rows.
    static constexpr bool CHUNKS = false;
    explicit IntegerScheme(const Weights&) {}
    [[gnu::always_inline]] void fetch(const uint8_t* codes) const { prefetch(codes); }
    B64 read(const uint8_t* codes) const { return load64(codes); }
    int above(const Weights&) const { return 0; }
    // `sum`: of the row's inputs.
    I16 start(const Weights& w, int64_t, int32_t sum) const { return seti(-static_cast<const Scheme&>(*this).above(w) * sum); }
    I16 total(I16 acc, int32_t) const { return acc; }

    template <int M, int SETS, class Raw>
    inline void each(Raw left, Raw right, const int8_t* x, int64_t stride, I16 (&acc)[SETS * M][2]) const {
        parts<M, SETS, 0>(left, right, x, stride, acc);
    }
    template <int M, int SETS, int I, class Raw>
    inline void parts(Raw left, Raw right, const int8_t* x, int64_t stride, I16 (&acc)[SETS * M][2]) const {
        if constexpr (I < INPUTS / 4) {
            const auto& self = static_cast<const Scheme&>(*this);
            add_part<M, SETS, I>(self.template part<I>(left), self.template part<I>(right), x, stride, acc);
            parts<M, SETS, I + 1>(left, right, x, stride, acc);
        }
    }
    template <int M, int SETS, int I>
    inline void add_part(B64 left, B64 right, const int8_t* x, int64_t stride, I16 (&acc)[SETS * M][2]) const {
        const auto& self = static_cast<const Scheme&>(*this);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const X4 v = four(x + m * stride + 4 * I);
            I16(&into)[2] = acc[I % SETS * M + m];
            into[0] = self.dot(into[0], left, v);
            into[1] = self.dot(into[1], right, v);
        }
    }
    // Half `h` of a chunk: its codes stand every BYTES bytes.
    template <int M>
    inline void half(const uint8_t* codes, const int8_t* x, int64_t inputs, int64_t stride, int h, I16 (&acc)[M][2]) const {
        const auto& self = static_cast<const Scheme&>(*this);
        I16 sums[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) sums[m] = short_inputs<Scheme> > 0 ? seti(0) : acc[m][h];
        for (int64_t k = 0; k < inputs; k += INPUTS, codes += Scheme::BYTES) {
            if (fetches_ahead<Scheme, M>()) self.fetch(codes + AHEAD);
            parts_of_half<M, 0>(self.read(codes), x + k, stride, sums);
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            if constexpr (short_inputs<Scheme> > 0)
                acc[m][h] = widen_pairs(acc[m][h], sums[m]);
            else
                acc[m][h] = sums[m];
        }
    }
#if defined(SPECPRESS_WORDS)
    template <int M>
    inline void half(const uint8_t* codes, const int16_t* x, int64_t inputs, int64_t stride, int h, I16 (&acc)[M][2]) const {
        const auto& self = static_cast<const Scheme&>(*this);
        I16 sums[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) sums[m] = acc[m][h];
        for (int64_t k = 0; k < inputs; k += INPUTS, codes += Scheme::BYTES) {
            if (fetches_ahead<Scheme, M>()) self.fetch(codes + AHEAD);
            word_parts<M, 0>(self, self.read(codes), x + k, stride, sums);
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) acc[m][h] = sums[m];
    }
#endif
    template <int M, int I, class Raw>
    inline void parts_of_half(Raw raw, const int8_t* x, int64_t stride, I16 (&sums)[M]) const {
        if constexpr (I < INPUTS / 4) {
            const auto& self = static_cast<const Scheme&>(*this);
            const B64 part = self.template part<I>(raw);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
                const X4 v = four(x + m * stride + 4 * I);
                if constexpr (short_inputs<Scheme> > 0)
                    sums[m] = add_pairs(sums[m], part, v);
                else
                    sums[m] = self.dot(sums[m], part, v);
            }
            parts_of_half<M, I + 1>(raw, x, stride, sums);
        }
    }
    template <int M>
    static inline void product(const Weights& w, const Inputs& in, int64_t row, int64_t block, float* tile) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
        if constexpr (M > 1) return paired_product<Scheme, M>(w, in, row, block, tile);
#endif
        // One or two rows of sums that are 32 bits wide have room for both vectors.
#if defined(SPECPRESS_WORDS)
        if constexpr (Scheme::SHORT == 0 && M > 2)
            if (in.wide) return narrow_product<Scheme, M>(w, in, in.wide + row * in.stride, row, block, tile);
#endif
        if constexpr (NARROW && (short_inputs<Scheme> > 0 || Scheme::CHUNKS || M > 2))
            narrow_product<Scheme, M>(w, in, in.codes + row * in.stride, row, block, tile);
        else
            small_product<Scheme, M>(w, in, row, block, tile);
    }
};

}  // namespace SPECPRESS_PATH

#if defined(__AMX_INT8__)
#include "amx.h"
#endif
#if defined(SPECPRESS_WORDS)
#include "words.h"
#endif
