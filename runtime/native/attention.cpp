// Softmax attention of a few query rows over one key head, straight from the cache.
//
// Keys lie in blocks of 64 by slot, dimension by dimension, so that sixteen scores are sums over the dimensions, first to
// last. Everything that adds over keys goes in the order of their logical position: within a fixed split of 512 positions
// one key after the other under the split's own maximum, then split after split (Milakov and Gimelshein's online softmax,
// 1805.02867; the fixed split is FlashDecoding's). So a row's bits depend neither on its neighbours nor on its slots.
// Prefill, decoding, verification and trees are this one function.
#include "cache.h"
#include "kernels.h"
#include "vec.h"

namespace SPECPRESS_PATH {

using namespace specpress;

constexpr int64_t QUERIES = 8;  // query rows of a unit
constexpr int64_t BLOCKS = SPLIT / KEYS;
constexpr int64_t FEW = 16;     // rows of a forward that decodes or verifies

// Floats of scratch: scaled queries, weights of a split, a split's sums, all sums, and a split's keys and values.
int64_t attention_scratch(const Heads& h) {
    return QUERIES * (padded(h.dim) * 3 + SPLIT) + SPLIT * (h.dim + padded(h.dim)) + 4 * LANES;
}

int64_t tile_rows() { return QUERIES; }

// ----------------------------------------------------------------------------------------------------- the products
// Scores of M queries against V · 16 keys.
template <int M, int V>
static inline void score(const float* q, int64_t dim, int64_t wide, const float* keys, float* scores) {
    F16 acc[M][V];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) acc[m][v] = zero();
    for (int64_t d = 0; d < dim; d++) {
        F16 k[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) k[v] = load(keys + d * KEYS + v * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const F16 x = set(q[m * wide + d]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[m][v] = fma(x, k[v], acc[m][v]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(scores + m * SPLIT + v * LANES, acc[m][v]);
}

// Keys first..last of a split, and whether `out` holds the sum over those before.
struct Range {
    int64_t first, last;
    bool more;
};

// Σ_j weight_j · value_j over a range of keys, V · 16 dimensions from `from`.
template <int M, int V>
static inline void mix(const float* weights, const float* const* values, Range r, int64_t wide, int64_t from, float* out) {
    F16 acc[M][V];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) acc[m][v] = r.more ? load(out + m * wide + from + v * LANES) : zero();
    for (int64_t begin = r.first; begin < r.last;) {
        const int64_t block = begin / KEYS, end = r.last < (block + 1) * KEYS ? r.last : (block + 1) * KEYS;
        const float* p = values[block] + (begin % KEYS) * wide + from;
        for (; begin < end; begin++, p += wide) {
            F16 x[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) x[v] = load(p + v * LANES);
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

template <int M>
static void score_rows(const float* q, int64_t dim, int64_t wide, const float* const* keys, int64_t count, float* scores) {
    constexpr int V = vectors<M>();
    for (int64_t begin = 0; begin < count; begin += KEYS)
        for (int64_t j = 0; j < KEYS; j += V * LANES) score<M, V>(q, dim, wide, keys[begin / KEYS] + j, scores + begin + j);
}

template <int M>
static void mix_rows(const float* weights, const float* const* values, Range r, int64_t wide, float* out) {
    constexpr int V = vectors<M>();
    int64_t from = 0;
    for (; from + V * LANES <= wide; from += V * LANES) mix<M, V>(weights, values, r, wide, from, out);
    for (; from < wide; from += LANES) mix<M, 1>(weights, values, r, wide, from, out);
}

template <int M = MAX_ROWS>
static void score_any(int64_t rows, const float* q, int64_t dim, int64_t wide, const float* const* keys, int64_t count, float* scores) {
    if constexpr (M > 0) {
        if (rows == M)
            score_rows<M>(q, dim, wide, keys, count, scores);
        else
            score_any<M - 1>(rows, q, dim, wide, keys, count, scores);
    }
}
template <int M = MAX_ROWS>
static void mix_any(int64_t rows, const float* weights, const float* const* values, Range r, int64_t wide, float* out) {
    if constexpr (M > 0) {
        if (rows == M)
            mix_rows<M>(weights, values, r, wide, out);
        else
            mix_any<M - 1>(rows, weights, values, r, wide, out);
    }
}

static void fetch(const float* p, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) __builtin_prefetch(p + i);
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

void attend(const AttentionCall& c, const AttentionUnit& u, float* scratch) {
    const Heads& h = c.heads;
    const Batch& b = *c.batch;
    const int64_t dim = h.dim, wide = padded(dim), per_row = u.head_to - u.head_from, count = u.rows * per_row;
    const Store& s = b.stores[b.request[u.row]];
    float* q = scratch;                              // [QUERIES][wide]
    float* part = q + QUERIES * wide;                // [QUERIES][wide]
    float* whole = part + QUERIES * wide;            // [QUERIES][wide]
    float* weights = whole + QUERIES * wide;         // [QUERIES][SPLIT]
    float* own_keys = weights + QUERIES * SPLIT;     // [BLOCKS][dim][KEYS]
    float* own_values = own_keys + SPLIT * dim;      // [SPLIT][wide]
    float highest[QUERIES], sum[QUERIES];
    int64_t lowest_first = INT64_MAX, highest_last = -1;
    for (int64_t m = 0; m < count; m++) {
        const int64_t row = u.row + m / per_row, head = u.head_from + m % per_row;
        const float* from = c.queries + row * c.stride + head * dim;
        for (int64_t d = 0; d < dim; d++) q[m * wide + d] = from[d] * c.scaling;
        for (int64_t d = 0; d < wide; d++) whole[m * wide + d] = 0.0f;
        highest[m] = -INFINITY, sum[m] = 0.0f;
        const int64_t last = b.position[row], first = c.window && last >= c.window ? last - c.window + 1 : 0;
        lowest_first = first < lowest_first ? first : lowest_first;
        highest_last = last > highest_last ? last : highest_last;
    }
    const int64_t tail_at = b.tail_at[u.row], tail_from = b.tail_from[u.row];
    for (int64_t split = lowest_first / SPLIT; split <= highest_last / SPLIT; split++) {
        const int64_t base = split * SPLIT;
        const int64_t keys_here = highest_last - base + 1 < SPLIT ? highest_last - base + 1 : SPLIT;
        const int64_t used = (keys_here + KEYS - 1) / KEYS;
        const float *keys[BLOCKS], *values[BLOCKS];
        const int64_t first_block = lowest_first > base ? (lowest_first - base) / KEYS : 0;
        for (int64_t block = 0; block < used; block++) {
            const int64_t from = base + block * KEYS;
            float* k = own_keys + block * dim * KEYS;
            float* v = own_values + block * KEYS * wide;
            keys[block] = k, values[block] = v;
            if (block < first_block) {
                // Before every row's window: weights are 0, but the memory must hold numbers.
                std::memset(k, 0, static_cast<size_t>(dim * KEYS) * 4);
                std::memset(v, 0, static_cast<size_t>(wide * KEYS) * 4);
            } else if (tail_at >= 0 && from + KEYS > tail_from) {
                const int64_t* slots = b.tail + tail_at - tail_from;
                for (int64_t j = 0; j < KEYS; j++) {
                    const int64_t position = from + j;
                    const int64_t slot = position > highest_last ? 0 : position < tail_from ? position : slots[position];
                    recall(c, s, u.kv_head, slot, k + j, v + j * wide);
                }
            } else if (h.cache_kind == CACHE_F32) {
                const int64_t at = place(h, s, c.layer, u.kv_head, from).block;
                keys[block] = static_cast<const float*>(s.keys) + at * dim * KEYS;
                values[block] = static_cast<const float*>(s.values) + at * KEYS * wide;
                // A few rows come upon keys that the weights have pushed out of the caches.
                if (b.rows <= FEW) {
                    const int64_t there = highest_last - from + 1 < KEYS ? highest_last - from + 1 : KEYS;
                    fetch(keys[block], dim * KEYS);
                    fetch(values[block], there * wide);
                }
            } else {
                widen(c, s, u.kv_head, from / KEYS, k, v);
            }
        }
        const int64_t scored = used * KEYS;
        for (int64_t m = 0; m < count; m += MAX_ROWS) {
            const int64_t rows = count - m < MAX_ROWS ? count - m : MAX_ROWS;
            score_any(rows, q + m * wide, dim, wide, keys, scored, weights + m * SPLIT);
        }
        float split_highest[QUERIES], split_sum[QUERIES];
        for (int64_t m = 0; m < count; m++) {
            // −1: all of the split lies behind this row, which another row of the unit sees.
            const int64_t here = b.position[u.row + m / per_row] - base, last = here < 0 ? -1 : here;
            const int64_t first = c.window && last + base >= c.window ? last - c.window + 1 : 0;
            split_highest[m] = soften(weights + m * SPLIT, scored, first < 0 ? 0 : first < scored ? first : scored,
                                      last < scored ? last : scored - 1, split_sum + m);
        }
        for (int64_t m = 0; m < count; m += MAX_ROWS) {
            const int64_t rows = count - m < MAX_ROWS ? count - m : MAX_ROWS;
            // Together over what all of them see, then each over its own rest: a row never meets a later row's value, not
            // even with weight 0, which would turn an infinity there into a NaN here.
            int64_t seen[QUERIES], common = keys_here;
            for (int64_t i = m; i < m + rows; i++) {
                const int64_t own = b.position[u.row + i / per_row] - base + 1;
                seen[i] = own < 0 ? 0 : own < keys_here ? own : keys_here;
                common = seen[i] < common ? seen[i] : common;
            }
            mix_any(rows, weights + m * SPLIT, values, {0, common, false}, wide, part + m * wide);
            for (int64_t i = m; i < m + rows; i++)
                if (seen[i] > common) mix_any(1, weights + i * SPLIT, values, {common, seen[i], true}, wide, part + i * wide);
        }
        for (int64_t m = 0; m < count; m++) {
            const int64_t last = b.position[u.row + m / per_row];
            const int64_t first = c.window && last >= c.window ? last - c.window + 1 : 0;
            if (last < base || first >= base + SPLIT) continue;  // this row sees nothing of the split
            float* into = whole + m * wide;
            const float* from = part + m * wide;
            if (sum[m] == 0.0f && highest[m] == -INFINITY) {
                std::memcpy(into, from, static_cast<size_t>(wide) * 4);
                highest[m] = split_highest[m], sum[m] = split_sum[m];
                continue;
            }
            const float top = highest[m] > split_highest[m] ? highest[m] : split_highest[m];
            const float old = exp_one(highest[m] - top), add_by = exp_one(split_highest[m] - top);
            for (int64_t d = 0; d < wide; d++) into[d] = into[d] * old + from[d] * add_by;
            sum[m] = sum[m] * old + split_sum[m] * add_by;
            highest[m] = top;
        }
    }
    for (int64_t m = 0; m < count; m++) {
        float* to = c.out + (u.row + m / per_row) * h.heads * dim + (u.head_from + m % per_row) * dim;
        for (int64_t d = 0; d < dim; d++) to[d] = whole[m * wide + d] / sum[m];
    }
}

}  // namespace SPECPRESS_PATH
