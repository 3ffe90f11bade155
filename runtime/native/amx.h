// AMX: products of an integer scheme in tiles of 32 rows by 32 outputs, from 16 rows on, or fewer where groups fill tiles
// (FEW_TILED). The exact integers do not depend on how they were summed, and what follows them is add_group, so a
// row's bits are those of the small products.
//
// A tile register holds 16 rows of 64 bytes. One instruction multiplies 16 rows of inputs, 64 codes each, by 16 outputs,
// whose codes lie as kind int8's do: four inputs of each output, then the next four. Codes are widened into that order
// once for a panel of rows, a slab of at most SLAB inputs at a time, which the first level of the cache holds.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "linear.h"

namespace SPECPRESS_PATH {

constexpr int64_t TILE = 16;            // rows of a register, and outputs of one product
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

constexpr int64_t WIDE = 2 * TILE * TILE_BYTES;

// 64 inputs times 32 outputs of a slab, widened; zeros where a group ends.
struct WideTile {
    alignas(64) uint8_t half[2][TILE * TILE_BYTES];
};

// Inlined: Trellis holds its tables in registers.
template <class Scheme, int I, class Raw>
[[gnu::always_inline]] inline void widen(const Scheme& scheme, Raw left, Raw right, int64_t quad, WideTile* to) {
    if constexpr (I < Scheme::STEP / 4) {
        WideTile& tile = to[quad / TILE];
        store64(tile.half[0] + quad % TILE * TILE_BYTES, scheme.template part<I>(left));
        store64(tile.half[1] + quad % TILE * TILE_BYTES, scheme.template part<I>(right));
        widen<Scheme, I + 1>(scheme, left, right, quad + 1, to);
    }
}

// One step of inputs, from number 4 * quad on.
template <class Scheme>
[[gnu::always_inline]] inline void widen_step(const Scheme& scheme, const uint8_t* codes, int64_t quad, WideTile* tiles) {
    scheme.fetch(codes + AHEAD);
    scheme.fetch(codes + AHEAD + Scheme::BYTES / 2);
    widen<Scheme, 0>(scheme, scheme.read(codes), scheme.read(codes + Scheme::BYTES / 2), quad, tiles);
}

// So many inputs.
template <class Scheme>
inline void widen_inputs(const Scheme& scheme, const uint8_t* codes, int64_t inputs, WideTile* tiles) {
    for (int64_t k = 0; k < inputs; k += Scheme::STEP, codes += Scheme::BYTES) widen_step(scheme, codes, k / 4, tiles);
}

// What a last tile has beyond `inputs`.
inline void zero_rest(int64_t inputs, WideTile* tiles) {
    for (int64_t quad = inputs / 4; quad % TILE; quad++)
        for (auto& half : tiles[quad / TILE].half) store64(half + quad % TILE * TILE_BYTES, set_bytes(0));
}

template <bool LOWER>
inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (LOWER) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

// To sums[32][32].
template <bool LOWER>
inline void store_sums(int32_t* sums) {
    constexpr int64_t ROW = BLOCK * 4;
    _tile_stored(0, sums, ROW);
    _tile_stored(1, sums + TILE, ROW);
    if constexpr (LOWER) {
        _tile_stored(2, sums + TILE * BLOCK, ROW);
        _tile_stored(3, sums + TILE * BLOCK + TILE, ROW);
    }
    fence();
}

template <bool LOWER, bool UNSIGNED_INPUTS>
inline void multiply_left() {
    if constexpr (UNSIGNED_INPUTS) {
        _tile_dpbusd(0, 4, 6);
        if constexpr (LOWER) _tile_dpbusd(2, 5, 6);
    } else {
        _tile_dpbsud(0, 4, 6);
        if constexpr (LOWER) _tile_dpbsud(2, 5, 6);
    }
}

template <bool LOWER, bool UNSIGNED_INPUTS>
inline void multiply_right() {
    if constexpr (UNSIGNED_INPUTS) {
        _tile_dpbusd(1, 4, 7);
        if constexpr (LOWER) _tile_dpbusd(3, 5, 7);
    } else {
        _tile_dpbsud(1, 4, 7);
        if constexpr (LOWER) _tile_dpbsud(3, 5, 7);
    }
}

// Up to 32 rows of 64 inputs, `apart` bytes from row to row, times 32 outputs of which 16 lie at `left`, the others at
// `right`; added to the sums. Where inputs are not unsigned weights are. `meanwhile` is called with the constants 0 to 3, for
// work that the processor does while it waits for tiles.
template <bool LOWER, bool UNSIGNED_INPUTS, class Meanwhile>
inline void multiply_tile(const int8_t* x, int64_t apart, const uint8_t* left, const uint8_t* right, int64_t weights_apart,
                          Meanwhile meanwhile) {
    fence();
    _tile_loadd(4, x, apart);
    if constexpr (LOWER) _tile_loadd(5, x + TILE * apart, apart);
    meanwhile(std::integral_constant<int, 0>());
    _tile_loadd(6, left, weights_apart);
    meanwhile(std::integral_constant<int, 1>());
    _tile_loadd(7, right, weights_apart);
    multiply_left<LOWER, UNSIGNED_INPUTS>();
    meanwhile(std::integral_constant<int, 2>());
    multiply_right<LOWER, UNSIGNED_INPUTS>();
    meanwhile(std::integral_constant<int, 3>());
}

// The last `bytes` of each row, from `x` on: 64 bytes of a tile could end beyond it.
inline void copy_ends(const int8_t* x, int64_t stride, int64_t rows, int64_t bytes, int8_t* to) {
    for (int64_t m = 0; m < rows; m++) std::memcpy(to + m * TILE_BYTES, x + m * stride, static_cast<size_t>(bytes));
}

// Sums of up to 32 rows over `tiles` tiles, `more` of them on top of what `sums` has. `last`: bytes of the last tile in each
// row where it ends before 64, else 0.
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
        zero_sums<LOWER>();
    }
    alignas(64) int8_t copy[PAIR * TILE_BYTES];
    for (int64_t t = 0; t < tiles; t++, x += TILE_BYTES) {
        const bool ends = last && t == tiles - 1;
        if (ends) copy_ends(x, stride, rows, last, copy);
        for (int64_t line = 0; line < lines; line++, next += TILE_BYTES) __builtin_prefetch(next, 0, 2);
        const uint8_t* left = weights + t * WIDE;
        multiply_tile<LOWER, UNSIGNED_INPUTS>(ends ? copy : x, ends ? TILE_BYTES : stride, left, left + RIGHT, APART, [](auto) {});
    }
    store_sums<LOWER>(sums);
}

// What turns the sums of a block's group into numbers, loaded once for a panel of rows.
struct GroupScale {
    F16 scale[2], offset[2];
    I16 start[2];
};

template <class Scheme>
inline GroupScale scale_of(const Scheme& scheme, const Weights& w, int64_t block, int64_t group) {
    GroupScale of;
    for (int h = 0; h < 2; h++) {
        const int64_t at = (block * w.groups + group) * BLOCK + h * LANES;
        of.scale[h] = load_scale(w, at);
        if (w.offset) of.offset[h] = load(w.offset + at);
        if constexpr (Scheme::UNSIGNED_INPUTS) of.start[h] = scheme.start(w, at, 0);
    }
    return of;
}

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
                const I16 start = Scheme::UNSIGNED_INPUTS ? of[g].start[h] : scheme.start(w, 0, input_sums[g]);
                const I16 acc = addi(loadi(sums + g * PAIR * BLOCK + h * LANES), start);
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
        for (int64_t g = 0; g < groups; g++) of[g] = scale_of(scheme, w, block, group + g);
        for (int64_t k = 0; k < size; k += SLAB) {
            const int64_t inputs = std::min(size - k, SLAB);
            const uint8_t* const read = DIRECT ? codes : slab->half[0];
            for (int64_t g = 0; g < groups; g++, codes += inputs / Scheme::STEP * Scheme::BYTES)
                if constexpr (!DIRECT) {
                    widen_inputs(scheme, codes, inputs, slab + g * tiles);
                    zero_rest(inputs, slab + g * tiles);
                }
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

// A group's last inputs, or any: not inlined, with a copy of the scheme.
template <class Scheme>
[[gnu::noinline]] void widen_some(Scheme scheme, const uint8_t* codes, int64_t inputs, WideTile* to) {
    widen_inputs(scheme, codes, inputs, to);
    zero_rest(inputs, to);
}

// What few_tiled widens of a layer's codes, in their order: units of 64 inputs, or a step's several tiles. All of it is inlined
// and no call refers to it, so that registers hold it, Trellis's tables above all.
template <class Scheme>
struct Widening {
    static constexpr int64_t UNIT = std::max<int64_t>(TILE_BYTES, Scheme::STEP), TILES = UNIT / TILE_BYTES, KEPT = 4;
    static constexpr int64_t PART = std::max<int64_t>(UNIT / 4, Scheme::STEP);
    using Kept = WideTile[KEPT][TILES];

    const Scheme scheme;
    const int64_t size;       // of a group
    const uint8_t* codes;     // the next unit's
    int64_t groups;           // that are not all widened
    int64_t left;             // inputs of the next unit's group from there on
    int64_t slot = 0;         // of the next unit

    // Quarter NUMBER of the next unit: 0 to 3, in this order.
    template <int NUMBER>
    [[gnu::always_inline]] inline void part(Kept& kept) {
        if (!groups) return;
        constexpr int64_t FROM = NUMBER * PART, END = std::min<int64_t>(FROM + PART, UNIT);
        if (left < UNIT) {
            if (NUMBER == 3) whole(kept);
            return;
        }
#pragma GCC unroll 4
        for (int64_t k = FROM; k < END; k += Scheme::STEP) widen_step(scheme, codes + k / Scheme::STEP * Scheme::BYTES, k / 4, kept[slot]);
        if (NUMBER == 3) skip(UNIT);
    }

    // All of it.
    [[gnu::always_inline]] inline void whole(Kept& kept) {
        if (!groups) return;
        const int64_t inputs = std::min(left, UNIT);
        widen_some(scheme, codes, inputs, kept[slot]);
        skip(inputs);
    }

    [[gnu::always_inline]] inline void skip(int64_t inputs) {
        slot = (slot + 1) % KEPT, codes += inputs / Scheme::STEP * Scheme::BYTES, left -= inputs;
        if (!left) left = size, groups--;
    }
};

// Up to 32 rows: while a tile is loaded and multiplied the second next is widened, a quarter at a time. The next would be read
// from stores that have not left the processor's buffers yet; for the same reason a group's sums are added a group later.
template <class Scheme, bool LOWER>
void few_tiled(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
    constexpr int64_t TILES = Widening<Scheme>::TILES, KEPT = Widening<Scheme>::KEPT;
    typename Widening<Scheme>::Kept kept;
    alignas(64) float tile[PAIR * BLOCK];
    alignas(64) int32_t sums[PAIR * BLOCK];
    alignas(64) int8_t ends[PAIR * TILE_BYTES];
    const Scheme scheme(w);
    const int64_t size = w.group, tiles = (size + TILE_BYTES - 1) / TILE_BYTES, rest = size % TILE_BYTES;
    const int64_t steps = size / Scheme::STEP;
    Widening<Scheme> wide{Scheme(w), size, w.codes + first * w.groups * steps * Scheme::BYTES, (last - first) * w.groups, size};
    copy_ends(in.codes + w.groups * size - rest, in.stride, in.rows, rest, ends);
    const int64_t apart = scale_bytes(w), ahead = scales_ahead(steps * Scheme::BYTES);
    const uint8_t* scales = static_cast<const uint8_t*>(w.scale);
    const auto add = [&](int64_t block, int64_t g) {
        const GroupScale of = scale_of(scheme, w, block, g);
        add_groups(scheme, w, &of, 1, sums, in.rows, in.step + g, in.sums + g, g == 0, tile);
        if (g < w.groups - 1) return;
        for (int64_t m = 0; m < in.rows; m++) finish<1>(w, block, tile + m * BLOCK, y + m * stride, stride, add_to);
    };
    const auto widen_part = [&](auto number) { wide.template part<decltype(number)::value>(kept); };
    wide.whole(kept), wide.whole(kept);
    int64_t slot = 0;
    for (int64_t block = first; block < last; block++)
        for (int64_t g = 0; g < w.groups; g++) {
            const int64_t at = (block * w.groups + g) * BLOCK;
            prefetch(scales + (at + ahead) * apart);
            if (apart == 4) prefetch(scales + (at + ahead) * apart + 64);
            zero_sums<LOWER>();
            const int8_t* x = in.codes + g * size;
            for (int64_t t = 0; t < tiles; t++, x += TILE_BYTES) {
                const auto& half = kept[slot][t % TILES].half;
                const bool end = rest && g == w.groups - 1 && t == tiles - 1, begins = t % TILES == 0;
                const auto meanwhile = [&](auto number) {
                    if (begins) widen_part(number);
                    fence();
                };
                multiply_tile<LOWER, Scheme::UNSIGNED_INPUTS>(end ? ends : x, end ? TILE_BYTES : in.stride, half[0], half[1],
                                                              TILE_BYTES, meanwhile);
                if (t % TILES == TILES - 1 || t == tiles - 1) slot = (slot + 1) % KEPT;
                if (t) continue;
                if (g)
                    add(block, g - 1);
                else if (block > first)
                    add(block - 1, w.groups - 1);
            }
            store_sums<LOWER>(sums);
        }
    add(last - 1, w.groups - 1);
}

template <class Scheme>
void tiled_linear(const Weights& w, const Inputs& in, int64_t first, int64_t last, float* y, int64_t stride, bool add_to) {
    if (Scheme::STEP > 4 && w.group >= TILE_BYTES && in.rows <= PAIR) {
        const TileShapes shapes(in.rows);
        _tile_loadconfig(&shapes);
        (in.rows > TILE ? few_tiled<Scheme, true> : few_tiled<Scheme, false>)(w, in, first, last, y, stride, add_to);
        return _tile_release();
    }
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
