// Softmax attention of a few query rows over one key head, straight from the cache.
//
// Keys lie in blocks of 64 by slot, dimension by dimension, so that sixteen scores are sums over the dimensions, first to
// last. Everything that adds over keys goes in the order of their logical position: within a fixed split of 512 positions
// one key after the other under the split's own maximum, then split after split (Milakov and Gimelshein's online softmax,
// 1805.02867; the fixed split is FlashDecoding's). So a row's bits depend neither on its neighbours nor on its slots, and
// threads can share a long text (decoder.h, attend_all). Prefill, decoding, verification and trees are these functions.
// Quantised keys and values are widened in registers, by the operations of `recall`: no float copy of a block is made.
#include "attention_blocks.h"
#include "kernels.h"

namespace SPECPRESS_PATH {

using namespace specpress;

constexpr int64_t QUERIES = 8;  // query rows of a unit
constexpr int64_t BLOCKS = SPLIT / KEYS;
constexpr int64_t FEW = 16;     // rows of a forward that decodes or verifies

// Sums of one split, or of all so far: weighted values, and each row's maximum and sum of weights.
struct Sums {
    float* values;         // [QUERIES][wide]
    float *highest, *sum;  // [QUERIES]
};
static Sums sums_at(float* p, int64_t wide) { return {p, p + QUERIES * wide, p + QUERIES * (wide + 1)}; }

int64_t attention_part(const Heads& h) { return QUERIES * (padded(values_of(h)) + 2); }

// Floats of scratch: sums of a split and of all, scaled queries, weights of a split, scores of a tree's rows by slot, and
// values that are no whole vectors in the cache.
int64_t attention_scratch(const Heads& h) {
    return 2 * attention_part(h) + QUERIES * (padded(h.dim) + 2 * SPLIT) + (SPLIT + KEYS) * padded(values_of(h)) + 4 * LANES;
}

int64_t tile_rows() { return QUERIES; }

// ----------------------------------------------------------------------------------------------------- the products
// Scores of M queries against V · 16 keys of a block, from vector `first`. Queries lie dimension by dimension, QUERIES apart.
template <int M, int V, class Reader>
static inline void score(const float* q, int64_t dim, const Reader& block, const float* factor, int first, float* scores) {
    F16 acc[M][V], scale[V];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) acc[m][v] = zero();
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) scale[v] = block.key_scale(first + v);
    for (int64_t d = 0; d < dim; d++) {
        F16 k[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) k[v] = block.scaled(block.key(d, first + v), scale[v]);
        if constexpr (Reader::CODES) {
            if (factor)
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) k[v] = mul(k[v], set(factor[d]));
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const F16 x = set(q[d * QUERIES + m]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[m][v] = fma(x, k[v], acc[m][v]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(scores + m * SPLIT + (first + v) * LANES, acc[m][v]);
}

// Keys first..last of a split, and whether `out` holds the sum over those before.
struct Range {
    int64_t first, last;
    bool more;
};

// Σ_j weight_j · value_j over a range of keys, V · 16 dimensions from `from`.
template <int M, int V, class Reader>
static inline void mix(const float* weights, const Block* blocks, Range r, int64_t wide, int64_t from, float* out) {
    F16 acc[M][V];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) acc[m][v] = r.more ? load(out + m * wide + from + v * LANES) : zero();
    for (int64_t begin = r.first; begin < r.last;) {
        const int64_t base = begin / KEYS * KEYS, end = r.last < base + KEYS ? r.last : base + KEYS;
        const Reader block(blocks[begin / KEYS], wide);
        for (; begin < end; begin++) {
            const F16 scale = block.value_scale(begin - base);
            F16 x[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) x[v] = block.value(begin - base, from + v * LANES, scale);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                const F16 w = set(weights[m * SPLIT + begin]);
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) acc[m][v] = fma(w, x[v], acc[m][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(out + m * wide + from + v * LANES, acc[m][v]);
}

// Vectors of sums of a row beside M - 1 others: as many as the registers hold.
template <int M>
constexpr int vectors() {
    if (NARROW) return M == 1 ? 4 : M == 2 ? 2 : 1;
    return M <= MAX_ROWS / 2 || MAX_ROWS < 8 ? 4 : 2;
}

// Against the first `count` keys of some blocks, in whole vectors.
template <class Reader, int M>
static void score_rows(const float* q, int64_t dim, const Block* blocks, int64_t count, const float* factor, float* scores) {
    constexpr int V = vectors<M>();
    for (; count > 0; count -= KEYS, blocks++, scores += KEYS) {
        const Reader block(*blocks, 0);
        const int needed = static_cast<int>(((count < KEYS ? count : KEYS) + LANES - 1) / LANES);
        for (int v = 0; v < needed;) {
            if (V > 1 && needed - v <= V / 2)
                score<M, (V + 1) / 2>(q, dim, block, factor, v, scores), v += (V + 1) / 2;
            else
                score<M, V>(q, dim, block, factor, v, scores), v += V;
        }
    }
}

template <class Reader, int M>
static void mix_rows(const float* weights, const Block* blocks, Range r, int64_t wide, float* out) {
    constexpr int V = vectors<M>();
    int64_t from = 0;
    for (; from + V * LANES <= wide; from += V * LANES) mix<M, V, Reader>(weights, blocks, r, wide, from, out);
    for (; from < wide; from += LANES) mix<M, 1, Reader>(weights, blocks, r, wide, from, out);
}

template <class Reader, int M = MAX_ROWS>
static void score_any(int64_t rows, const float* q, int64_t dim, const Block* blocks, int64_t count, const float* factor,
                      float* scores) {
    if constexpr (M > 0) {
        if (rows == M)
            score_rows<Reader, M>(q, dim, blocks, count, factor, scores);
        else
            score_any<Reader, M - 1>(rows, q, dim, blocks, count, factor, scores);
    }
}
template <class Reader, int M = MAX_ROWS>
static void mix_any(int64_t rows, const float* weights, const Block* blocks, Range r, int64_t wide, float* out) {
    if constexpr (M > 0) {
        if (rows == M)
            mix_rows<Reader, M>(weights, blocks, r, wide, out);
        else
            mix_any<Reader, M - 1>(rows, weights, blocks, r, wide, out);
    }
}

// Keys from block `first` to key `last` of a split, blocks of one kind at a time.
static void score_all(int64_t rows, const float* q, int64_t dim, const Block* blocks, int64_t first, int64_t last, const float* factor,
                      float* scores) {
    while (first * KEYS < last) {
        const int64_t begin = first, kind = blocks[first].key_kind;
        while (first * KEYS < last && blocks[first].key_kind == kind) first++;
        const int64_t end = last < first * KEYS ? last : first * KEYS;
        const auto any = kind == CACHE_F32    ? score_any<FloatBlock>
                         : kind == CACHE_INT8 ? score_any<Int8Block>
                         : kind == CACHE_INT4 ? (blocks[begin].halves ? score_any<PackedBlock<Nibbles, true>> : score_any<PackedBlock<Nibbles, false>>)
                         : blocks[begin].halves ? score_any<PackedBlock<Threes, true>>
                                                : score_any<PackedBlock<Threes, false>>;
        any(rows, q, dim, blocks + begin, end - begin * KEYS, factor, scores + begin * KEYS);
    }
}
static void mix_all(int64_t rows, const float* weights, const Block* blocks, Range r, int64_t wide, float* out) {
    // Without keys the sums are 0, whatever the reader.
    if (r.first >= r.last) return r.more ? void() : mix_any<FloatBlock>(rows, weights, blocks, r, wide, out);
    while (r.first < r.last) {
        int64_t end = r.first / KEYS;
        const int64_t kind = blocks[end].value_kind;
        while (end * KEYS < r.last && blocks[end].value_kind == kind) end++;
        const Range run = {r.first, r.last < end * KEYS ? r.last : end * KEYS, r.more};
        const bool halves = blocks[r.first / KEYS].halves;
        const auto any = kind == CACHE_F32    ? mix_any<FloatBlock>
                         : kind == CACHE_INT8 ? mix_any<Int8Block>
                         : kind == CACHE_INT4 ? (halves ? mix_any<PackedBlock<Nibbles, true>> : mix_any<PackedBlock<Nibbles, false>>)
                         : halves             ? mix_any<PackedBlock<Threes, true>>
                                              : mix_any<PackedBlock<Threes, false>>;
        any(rows, weights, blocks, run, wide, out);
        r = {run.last, r.last, true};
    }
}

static int64_t bits_of(int64_t kind) { return kind == CACHE_F32 ? 32 : kind == CACHE_INT8 ? 8 : kind == CACHE_INT4 ? 4 : 3; }

// Inlined, as linear.h's prefetch.
[[gnu::always_inline]] static inline void fetch(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i);
}

// The first `count` keys of a block: of floats some of each dimension's lines, of codes all of them.
[[gnu::always_inline]] static inline void fetch_keys(const Block& block, int64_t dim, int64_t count) {
    const int64_t row = KEYS * bits_of(block.key_kind) / 8, some = count * bits_of(block.key_kind) / 8;
    if (row <= 64 || count == KEYS) return fetch(block.keys, dim * row);
    for (int64_t d = 0; d < dim; d++) fetch(static_cast<const char*>(block.keys) + d * row, some);
}

// Scores of one row to weights e^(s − max) in place, keys outside first..last to 0. Returns the maximum and the sum.
static float soften(float* scores, int64_t count, int64_t first, int64_t last, float* sum) {
    for (int64_t j = 0; j < first; j++) scores[j] = -INFINITY;
    for (int64_t j = last + 1; j < count; j++) scores[j] = -INFINITY;
    F16 most = set(-INFINITY);
    for (int64_t j = 0; j < count; j += LANES) most = max(most, load(scores + j));
    const float highest = lane_max(most);
    const F16 by = set(highest);
    F16 total = zero();
    for (int64_t j = 0; j < count; j += LANES) {
        const F16 e = exp(sub(load(scores + j), by));
        store(scores + j, e);
        total = add(total, e);
    }
    *sum = lane_sum(total);
    return highest;
}

static float exp_one(float x) {
    float lanes[LANES];
    store(lanes, exp(set(x)));
    return lanes[0];
}

// A block of the cache, where it lies.
static Block stored(const AttentionCall& c, const Store& s, int64_t kv_head, int64_t from, float* own_values) {
    const Heads& h = c.heads;
    const int64_t at = place(h, s, c.layer, kv_head, from).block, wide = padded(values_of(h)), bits = bits_of(h.cache_kind);
    const auto* keys = static_cast<const uint8_t*>(s.keys) + at * KEYS * h.dim * bits / 8;
    const auto* values = static_cast<const uint8_t*>(s.values) + at * KEYS * wide * bits / 8;
    if (h.cache_kind == CACHE_F32) return {CACHE_F32, CACHE_F32, keys, values, nullptr, nullptr};
    const float *key_scale = s.key_scale + at * KEYS, *value_scale = s.value_scale + at * KEYS;
    if (h.cache_kind != CACHE_INT4 || wide / 2 % LANES == 0)
        return {h.cache_kind, h.cache_kind, keys, values, key_scale, value_scale, h.key_basis != nullptr};
    widen_nibbles(values, value_scale, wide, h.key_basis != nullptr, own_values);
    return {h.cache_kind, CACHE_F32, keys, own_values, key_scale, nullptr, h.key_basis != nullptr};
}

// Scores of `count` queries, which may be more than the registers hold at once, against keys of a split: see score_all.
static void score_queries(int64_t count, const float* q, int64_t dim, const Block* blocks, int64_t first, int64_t last,
                          const float* factor, float* scores) {
    for (int64_t m = 0; m < count; m += MAX_ROWS) {
        const int64_t rows = count - m < MAX_ROWS ? count - m : MAX_ROWS;
        score_all(rows, q + m, dim, blocks, first, last, factor, scores + m * SPLIT);
    }
}

// A row of a tree in a split: its own positions first..last, from the split's beginning, and their slots.
struct Branch {
    int64_t first, last;
    const int64_t* slots;  // slots[position]
};
static Branch branch_of(const Batch& b, int64_t row, int64_t base, int64_t text) {
    const int64_t seen = b.position[row] - base + 1;
    return {text, seen < SPLIT ? seen : SPLIT, b.tail + b.tail_at[row] - b.tail_from[row] + base};
}

// Scores of a tree's own positions. They are found for all rows by slot, and then go to where each row has that slot.
// `scored`: the keys of the split whose scores are there, in whole blocks.
static void score_branches(const AttentionCall& c, const AttentionUnit& u, int64_t base, int64_t text, Range scored, const float* q,
                           const float* factor, float* by_slot, float* own_values, float* weights) {
    const Batch& b = *c.batch;
    const Store& s = b.stores[b.request[u.row]];
    const int64_t per_row = u.head_to - u.head_from;
    int64_t lowest = INT64_MAX, highest = -1;
    for (int64_t row = u.row; row < u.row + u.rows; row++) {
        const Branch of = branch_of(b, row, base, text);
        for (int64_t p = of.first; p < of.last; p++) {
            lowest = of.slots[p] < lowest ? of.slots[p] : lowest;
            highest = of.slots[p] > highest ? of.slots[p] : highest;
        }
    }
    for (int64_t from = lowest / KEYS * KEYS; from <= highest; from += KEYS) {
        if (from >= base + scored.first && from < base + scored.last) {
            // The block in which the text ends, whose scores lie where those of positions are going to.
            for (int64_t m = 0; m < u.rows * per_row; m++)
                std::memcpy(by_slot + m * SPLIT, weights + m * SPLIT + from - base, KEYS * 4);
        } else {
            const Block block = stored(c, s, u.kv_head, from, own_values);
            score_queries(u.rows * per_row, q, c.heads.dim, &block, 0, KEYS, factor, by_slot);
        }
        for (int64_t m = 0; m < u.rows * per_row; m++) {
            const Branch of = branch_of(b, u.row + m / per_row, base, text);
            for (int64_t p = of.first; p < of.last; p++)
                if (of.slots[p] / KEYS * KEYS == from) weights[m * SPLIT + p] = by_slot[m * SPLIT + of.slots[p] - from];
        }
    }
}

// Adds the values of a row's own positions, for its `heads` queries.
static void mix_branch(const AttentionCall& c, const Store& s, int64_t kv_head, const Branch& of, int64_t heads,
                       const float* weights, float* own_values, float* out) {
    const int64_t wide = padded(values_of(c.heads));
    for (int64_t p = of.first; p < of.last;) {
        const int64_t slot = of.slots[p], at = slot % KEYS;
        int64_t run = 1;
        while (p + run < of.last && at + run < KEYS && of.slots[p + run] == slot + run) run++;
        const Block block = stored(c, s, kv_head, slot - at, own_values);
        for (int64_t m = 0; m < heads; m += MAX_ROWS)
            mix_all(heads - m < MAX_ROWS ? heads - m : MAX_ROWS, weights + m * SPLIT + p - at, &block, {at, at + run, true},
                    wide, out + m * wide);
        p += run;
    }
}

void attend_split(const AttentionCall& c, const AttentionUnit& u, int64_t split, float* scratch, float* part) {
    const Heads& h = c.heads;
    const Batch& b = *c.batch;
    const int64_t dim = h.dim, wide = padded(values_of(h));
    const int64_t per_row = u.head_to - u.head_from, count = u.rows * per_row;
    const Store& s = b.stores[b.request[u.row]];
    const float* factor = h.key_factor ? h.key_factor + (c.layer * h.kv_heads + u.kv_head) * dim : nullptr;
    const Sums out = sums_at(part, wide);
    float* q = scratch;                             // [dim][QUERIES]
    float* weights = q + QUERIES * padded(dim);     // [QUERIES][SPLIT]
    float* by_slot = weights + QUERIES * SPLIT;     // [QUERIES][SPLIT]
    float* own_values = by_slot + QUERIES * SPLIT;  // [SPLIT][wide], and a block more
    for (int64_t m = 0; m < count; m++) {
        const float* from = c.queries + (u.row + m / per_row) * c.stride + (u.head_from + m % per_row) * dim;
        for (int64_t d = 0; d < dim; d++) q[d * QUERIES + m] = from[d] * c.scaling;
    }
    const Reach all = reach(c, u);
    const int64_t base = split * SPLIT, keys_here = all.last - base + 1 < SPLIT ? all.last - base + 1 : SPLIT;
    // What lies in the order of positions: all of a chain's, and of a tree's what came before it.
    const bool tree = b.tail_at[u.row] >= 0;
    const int64_t before = tree ? b.tail_from[u.row] - base : keys_here;
    const int64_t text = before < 0 ? 0 : before < keys_here ? before : keys_here;
    const int64_t used = (text + KEYS - 1) / KEYS;
    // Of a chain's last block the vectors that hold keys; a tree finds scores of its own slots in the text's last block.
    const int64_t whole = tree ? KEYS : LANES, scored = (keys_here + whole - 1) / whole * whole;
    // Blocks before every row's window have no weight.
    const int64_t start = all.first > base ? (all.first - base) / KEYS : 0;
    Block blocks[BLOCKS];
    for (int64_t block = start; block < used; block++)
        blocks[block] = stored(c, s, u.kv_head, base + block * KEYS, own_values + block * KEYS * wide);
    // A few rows come upon keys that the weights have pushed out of the caches.
    for (int64_t block = start; block < used && b.rows <= FEW; block++) {
        const int64_t there = text - block * KEYS < KEYS ? text - block * KEYS : KEYS;
        fetch_keys(blocks[block], dim, tree ? KEYS : there);
        fetch(blocks[block].values, there * wide * bits_of(blocks[block].value_kind) / 8);
    }
    score_queries(count, q, dim, blocks, start, tree ? used * KEYS : scored, factor, weights);
    if (tree) score_branches(c, u, base, text, {start * KEYS, used * KEYS, false}, q, factor, by_slot, own_values + SPLIT * wide, weights);
    if (c.softcap != 0.0f) {
        const F16 cap = set(c.softcap);
        for (int64_t m = 0; m < count; m++) {
            float* s = weights + m * SPLIT;
            for (int64_t j = start * KEYS; j < scored; j += LANES) store(s + j, mul(tanh(div(load(s + j), cap)), cap));
        }
    }
    for (int64_t m = 0; m < count; m++) {
        // −1: all of the split lies behind this row, which another row of the unit sees.
        const int64_t here = b.position[u.row + m / per_row] - base, last = here < 0 ? -1 : here;
        const int64_t first = last < 0 ? 0 : first_seen(c, last + base) - base;
        out.highest[m] = soften(weights + m * SPLIT, scored, first < 0 ? 0 : first < scored ? first : scored,
                                last < scored ? last : scored - 1, out.sum + m);
    }
    for (int64_t m = 0; m < count; m += MAX_ROWS) {
        const int64_t rows = count - m < MAX_ROWS ? count - m : MAX_ROWS;
        // Together over what all of them see, then each over its own rest: a row never meets a later row's value, not
        // even with weight 0, which would turn an infinity there into a NaN here.
        int64_t seen[QUERIES], common = text;
        for (int64_t i = m; i < m + rows; i++) {
            const int64_t own = b.position[u.row + i / per_row] - base + 1;
            seen[i] = own < 0 ? 0 : own < text ? own : text;
            common = seen[i] < common ? seen[i] : common;
        }
        const int64_t rest = common < start * KEYS ? start * KEYS : common;
        mix_all(rows, weights + m * SPLIT, blocks, {start * KEYS, common, false}, wide, out.values + m * wide);
        for (int64_t i = m; i < m + rows; i++)
            if (seen[i] > rest) mix_all(1, weights + i * SPLIT, blocks, {rest, seen[i], true}, wide, out.values + i * wide);
    }
    for (int64_t row = 0; tree && row < u.rows; row++)
        mix_branch(c, s, u.kv_head, branch_of(b, u.row + row, base, text), per_row, weights + row * per_row * SPLIT,
                   own_values + SPLIT * wide, out.values + row * per_row * wide);
}

// Adds the sums of a split to those before it.
static void join(const AttentionCall& c, const AttentionUnit& u, int64_t split, const Sums& from, const Sums& into) {
    const int64_t wide = padded(values_of(c.heads)), per_row = u.head_to - u.head_from, base = split * SPLIT;
    for (int64_t m = 0; m < u.rows * per_row; m++) {
        const int64_t last = c.batch->position[u.row + m / per_row];
        const int64_t first = first_seen(c, last);
        if (last < base || first >= base + SPLIT) continue;  // this row sees nothing of the split
        float* to = into.values + m * wide;
        const float* part = from.values + m * wide;
        if (into.sum[m] == 0.0f && into.highest[m] == -INFINITY) {
            std::memcpy(to, part, static_cast<size_t>(wide) * 4);
            into.highest[m] = from.highest[m], into.sum[m] = from.sum[m];
            continue;
        }
        const float top = into.highest[m] > from.highest[m] ? into.highest[m] : from.highest[m];
        const float old = exp_one(into.highest[m] - top), add_by = exp_one(from.highest[m] - top);
        for (int64_t d = 0; d < wide; d++) to[d] = to[d] * old + part[d] * add_by;
        into.sum[m] = into.sum[m] * old + from.sum[m] * add_by;
        into.highest[m] = top;
    }
}

void attend(const AttentionCall& c, const AttentionUnit& u, float* parts, float* scratch) {
    const Heads& h = c.heads;
    const int64_t dim = values_of(h), wide = padded(dim), per_row = u.head_to - u.head_from, count = u.rows * per_row;
    float *own = scratch, *rest = scratch + 2 * attention_part(h);
    const Sums whole = sums_at(scratch + attention_part(h), wide);
    for (int64_t m = 0; m < count; m++) {
        for (int64_t d = 0; d < wide; d++) whole.values[m * wide + d] = 0.0f;
        whole.highest[m] = -INFINITY, whole.sum[m] = 0.0f;
    }
    const Reach all = reach(c, u);
    for (int64_t split = all.first / SPLIT; split <= all.last / SPLIT; split++) {
        if (!parts) attend_split(c, u, split, rest, own);
        join(c, u, split, sums_at(parts ? parts : own, wide), whole);
        if (parts) parts += attention_part(h);
    }
    for (int64_t m = 0; m < count; m++) {
        const int64_t head = u.head_from + m % per_row;
        float* to = c.out + (u.row + m / per_row) * h.heads * dim + head * dim;
        if (c.sinks) {
            const float sink = c.sinks[head], top = whole.highest[m] > sink ? whole.highest[m] : sink;
            const float old = exp_one(whole.highest[m] - top);
            for (int64_t d = 0; d < dim; d++) whole.values[m * wide + d] = whole.values[m * wide + d] * old;
            whole.sum[m] = whole.sum[m] * old + exp_one(sink - top);
        }
        for (int64_t d = 0; d < dim; d++) to[d] = whole.values[m * wide + d] / whole.sum[m];
    }
}

}  // namespace SPECPRESS_PATH
