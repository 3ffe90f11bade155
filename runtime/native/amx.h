// AMX: from 16 rows on, products of an integer scheme in tiles of 32 rows by 32 outputs. The exact integers do not depend
// on how they were summed, and what follows them is add_group, so a row's bits are those of the small products.
//
// A tile register holds 16 rows of 64 bytes. One instruction multiplies 16 rows of inputs, 64 codes each, by 16 outputs,
// whose codes lie as kind int8's do: four inputs of each output, then the next four. Codes are widened into that order
// once for a panel of rows, a slab of at most SLAB inputs at a time, which the first level of the cache holds.
#pragma once

#include <algorithm>
#include <cstring>

#include "linear.h"

namespace SPECPRESS_PATH {

constexpr int64_t TILE = 16;            // rows of a register, and outputs of one product
constexpr int64_t TILE_BYTES = 64;      // of a register's row
constexpr int64_t PAIR = 2 * TILE;      // rows of two registers
constexpr int64_t SLAB = 512;
constexpr int64_t GROUPS = 4;           // of a slab at most
constexpr int64_t PANEL = 256;          // rows at most
constexpr int64_t PANEL_BYTES = 1 << 20;  // of their codes: what the second level of the cache holds beside the rest

// Registers: sums 0..3 (upper rows left and right, lower rows left and right), inputs 4 and 5, weights 6 and 7.
// What LDTILECFG reads.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    explicit TileShapes(int64_t count) {
        const int64_t upper = std::min(count, TILE), lower = count > TILE ? count - TILE : TILE;
        const int64_t shape[8] = {upper, upper, lower, lower, upper, lower, TILE, TILE};
        for (int t = 0; t < 8; t++) bytes[t] = TILE_BYTES, rows[t] = static_cast<uint8_t>(shape[t]);
    }
};

// gcc's intrinsics do not say that they read and write memory.
inline void fence() { asm volatile("" ::: "memory"); }

inline B64 set_bytes(int x) { return {_mm512_set1_epi8(static_cast<char>(x))}; }
inline B64 sub_bytes(B64 a, B64 b) { return {_mm512_sub_epi8(a.v, b.v)}; }
inline void store64(uint8_t* p, B64 a) { _mm512_store_si512(p, a.v); }

constexpr int64_t WIDE = 2 * TILE * TILE_BYTES;

// 64 inputs times 32 outputs of a slab, widened; zeros where a group ends.
struct WideTile {
    alignas(64) uint8_t half[2][TILE * TILE_BYTES];
};

template <class Scheme, int I, class Raw>
inline void widen(const Scheme& scheme, Raw left, Raw right, B64 less, int64_t quad, WideTile* to) {
    if constexpr (I < Scheme::STEP / 4) {
        WideTile& tile = to[quad / TILE];
        store64(tile.half[0] + quad % TILE * TILE_BYTES, sub_bytes(scheme.template part<I>(left), less));
        store64(tile.half[1] + quad % TILE * TILE_BYTES, sub_bytes(scheme.template part<I>(right), less));
        widen<Scheme, I + 1>(scheme, left, right, less, quad + 1, to);
    }
}

// `inputs` inputs from `codes` on; returns the tiles that they fill.
template <class Scheme>
inline int64_t widen_inputs(const Scheme& scheme, const Weights& w, const uint8_t* codes, int64_t inputs, WideTile* to) {
    const B64 less = set_bytes(scheme.above(w));
    for (int64_t k = 0; k < inputs; k += Scheme::STEP, codes += Scheme::BYTES) {
        scheme.fetch(codes + AHEAD);
        scheme.fetch(codes + AHEAD + Scheme::BYTES / 2);
        widen<Scheme, 0>(scheme, scheme.read(codes), scheme.read(codes + Scheme::BYTES / 2), less, k / 4, to);
    }
    const int64_t tiles = (inputs + TILE_BYTES - 1) / TILE_BYTES;
    for (int64_t quad = inputs / 4; quad < tiles * TILE; quad++)
        for (auto& half : to[quad / TILE].half) store64(half + quad % TILE * TILE_BYTES, set_bytes(0));
    return tiles;
}

// Sums of up to 32 rows over `tiles` tiles, `more` of them on top of what `sums` has. The last 64 bytes of a row may end
// beyond it: its `last` bytes are then read by way of a copy.
template <bool LOWER, bool UNSIGNED_INPUTS, bool DIRECT>
inline void multiply_tiles(const int8_t* x, int64_t stride, int64_t rows, const uint8_t* weights, int64_t tiles,
                           int64_t last, bool more, const uint8_t* next, int64_t lines, int32_t* sums) {
    constexpr int64_t ROW = BLOCK * 4;
    // Codes as they are lie left and right by turns, a line each.
    constexpr int64_t APART = DIRECT ? 2 * TILE_BYTES : TILE_BYTES, RIGHT = DIRECT ? TILE_BYTES : TILE * TILE_BYTES;
    if (more) {
        _tile_loadd(0, sums, ROW);
        _tile_loadd(1, sums + TILE, ROW);
        if constexpr (LOWER) {
            _tile_loadd(2, sums + TILE * BLOCK, ROW);
            _tile_loadd(3, sums + TILE * BLOCK + TILE, ROW);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (LOWER) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    alignas(64) int8_t copy[PAIR * TILE_BYTES];
    for (int64_t t = 0; t < tiles; t++, x += TILE_BYTES) {
        const int8_t* from = x;
        int64_t apart = stride;
        if (last && t == tiles - 1) {
            for (int64_t m = 0; m < rows; m++) std::memcpy(copy + m * TILE_BYTES, x + m * stride, static_cast<size_t>(last));
            from = copy, apart = TILE_BYTES;
            fence();
        }
        for (int64_t line = 0; line < lines; line++, next += TILE_BYTES) __builtin_prefetch(next, 0, 2);
        _tile_loadd(4, from, apart);
        _tile_loadd(6, weights + t * WIDE, APART);
        _tile_loadd(7, weights + t * WIDE + RIGHT, APART);
        if constexpr (LOWER) _tile_loadd(5, from + TILE * apart, apart);
        if constexpr (UNSIGNED_INPUTS) {
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            if constexpr (LOWER) {
                _tile_dpbusd(2, 5, 6);
                _tile_dpbusd(3, 5, 7);
            }
        } else {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            if constexpr (LOWER) {
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            }
        }
    }
    _tile_stored(0, sums, ROW);
    _tile_stored(1, sums + TILE, ROW);
    if constexpr (LOWER) {
        _tile_stored(2, sums + TILE * BLOCK, ROW);
        _tile_stored(3, sums + TILE * BLOCK + TILE, ROW);
    }
    fence();
}

// What turns the sums of a block's group into numbers, loaded once for a panel of rows.
struct GroupScale {
    F16 scale[2], offset[2];
    I16 start[2];
};

// add_group of `groups` groups in a row and of `rows` rows: sums[group][32][32] to the tile.
template <class Scheme>
inline void add_groups(const Scheme& scheme, const Weights& w, const GroupScale* of, int64_t groups, const int32_t* sums,
                       int64_t rows, const float* step, const int32_t* input_sums, bool first, float* tile) {
    for (int64_t m = 0; m < rows; m++, step += w.groups, input_sums += w.groups, tile += BLOCK, sums += BLOCK) {
        F16 y[2];
        for (int h = 0; h < 2; h++) y[h] = first ? zero() : load(tile + h * LANES);
        for (int64_t g = 0; g < groups; g++) {
            const F16 by = set(step[g]);
            const F16 sum = set(static_cast<float>(input_sums[g]));
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                I16 acc = loadi(sums + g * PAIR * BLOCK + h * LANES);
                if constexpr (Scheme::UNSIGNED_INPUTS) acc = addi(acc, of[g].start[h]);
                F16 term = mul(to_float(scheme.total(acc, input_sums[g])), of[g].scale[h]);
                if (w.offset) term = sub(term, mul(sum, of[g].offset[h]));
                term = mul(term, by);
                y[h] = first && g == 0 ? term : add(y[h], term);
            }
        }
        for (int h = 0; h < 2; h++) store(tile + h * LANES, y[h]);
    }
}

// One block's outputs for a panel of rows: of small groups up to GROUPS in a slab, of large ones a part.
template <class Scheme, bool DIRECT>
void tiled_panel(const Weights& w, const Inputs& in, int64_t row, int64_t rows, int64_t block, float* y, int64_t stride,
                 bool add_to) {
    alignas(64) float tile[PANEL * BLOCK];
    alignas(64) int32_t sums[PANEL * BLOCK];
    WideTile slab[SLAB / TILE_BYTES];
    GroupScale of[GROUPS];
    const Scheme scheme(w);
    const int64_t size = w.group, each = std::min(size, SLAB), tiles = (each + TILE_BYTES - 1) / TILE_BYTES;
    const int64_t together = size < SLAB ? std::min(GROUPS, SLAB / TILE_BYTES / tiles) : 1;
    const uint8_t* codes = w.codes + block * w.groups * (size / Scheme::STEP) * Scheme::BYTES;
    const int64_t rest = rows % PAIR, pairs = (rows + PAIR - 1) / PAIR;
    const TileShapes whole(PAIR), end(rest);
    for (int64_t group = 0; group < w.groups; group += together) {
        const int64_t groups = std::min(w.groups - group, together);
        for (int64_t g = 0; g < groups; g++)
            for (int h = 0; h < 2; h++) {
                const int64_t at = (block * w.groups + group + g) * BLOCK + h * LANES;
                of[g].scale[h] = load_scale(w, at);
                if (w.offset) of[g].offset[h] = load(w.offset + at);
                if constexpr (Scheme::UNSIGNED_INPUTS) of[g].start[h] = scheme.start(w, at, 0);
            }
        for (int64_t k = 0; k < size; k += SLAB) {
            const int64_t inputs = std::min(size - k, SLAB);
            const uint8_t* const read = DIRECT ? codes : slab->half[0];
            for (int64_t g = 0; g < groups; g++, codes += inputs / Scheme::STEP * Scheme::BYTES)
                if constexpr (!DIRECT) widen_inputs(scheme, w, codes, inputs, slab + g * tiles);
            fence();
            const int64_t filled = (inputs + TILE_BYTES - 1) / TILE_BYTES;
            // While the tiles multiply, the next codes come from memory.
            const int64_t steps = pairs * groups * filled;
            const int64_t lines = (groups * inputs / Scheme::STEP * (Scheme::BYTES / 64) + steps - 1) / steps;
            const uint8_t* next = codes;
            for (int64_t m = 0; m < rows; m += PAIR) {
                const int64_t count = std::min(rows - m, PAIR);
                // Sums that go on with the next part of their group wait in a place of their own.
                int32_t* const own = size <= SLAB ? sums : sums + m * BLOCK;
                if (count < PAIR && rows > PAIR) _tile_loadconfig(&end);
                if (group + groups == w.groups && k + inputs == size)
                    for (int64_t i = m; i < m + count; i++) {
                        const float* to = y + (row + i) * stride + block * BLOCK;
                        __builtin_prefetch(to, 1, 3), __builtin_prefetch(to + LANES, 1, 3);
                    }
                for (int64_t g = 0; g < groups; g++) {
                    const int8_t* x = in.codes + (row + m) * in.stride + (group + g) * size + k;
                    const int64_t last = group + g == w.groups - 1 ? inputs % TILE_BYTES : 0;
                    const auto multiply = count > TILE ? multiply_tiles<true, Scheme::UNSIGNED_INPUTS, DIRECT>
                                                       : multiply_tiles<false, Scheme::UNSIGNED_INPUTS, DIRECT>;
                    multiply(x, in.stride, count, read + g * tiles * WIDE, filled, last, k > 0, next, lines,
                             own + g * PAIR * BLOCK);
                    next += filled * lines * TILE_BYTES;
                }
                if (count < PAIR && rows > PAIR) _tile_loadconfig(&whole);
                if (k + inputs < size) continue;
                const int64_t at = (row + m) * w.groups + group;
                add_groups(scheme, w, of, groups, own, count, in.step + at, in.sums + at, group == 0, tile + m * BLOCK);
                if (group + groups < w.groups) continue;
                for (int64_t i = m; i < m + count; i++)
                    finish<1>(w, block, tile + i * BLOCK, y + (row + i) * stride, stride, add_to);
            }
        }
    }
}

template <class Scheme>
void tiled_linear(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
    const int64_t most = std::clamp(PANEL_BYTES / in.stride / PAIR * PAIR, PAIR, PANEL);
    // Panels of about equal size: a last one of a few rows would widen all codes for them.
    const int64_t panels = (in.rows + most - 1) / most, pairs = (in.rows + PAIR - 1) / PAIR;
    const int64_t panel = (pairs + panels - 1) / panels * PAIR;
    for (int64_t row = 0; row < in.rows; row += panel) {
        const int64_t rows = std::min(in.rows - row, panel);
        const TileShapes shapes(std::min(rows, PAIR));
        _tile_loadconfig(&shapes);
        const bool direct = Scheme::STEP == 4 && w.group % TILE_BYTES == 0;
        const auto panel_of = direct ? tiled_panel<Scheme, Scheme::STEP == 4> : tiled_panel<Scheme, false>;
        for (int64_t block = first; block < last; block++) panel_of(w, in, row, rows, block, y, stride, add_to);
    }
    _tile_release();
}

}  // namespace SPECPRESS_PATH
