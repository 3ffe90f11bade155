// What the drafter `block` computes row by row (speculative/drafters/block_network.py). Drafts change no text, so that
// sums may have another order than torch's.
#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "vec.h"

namespace SPECPRESS_PATH {

using specpress::BlockLook;
using specpress::BlockSeen;
using specpress::BlockStep;
using specpress::BlockWeigh;

float dot(const float* a, const float* b, int64_t size) {
    F16 sums[2] = {zero(), zero()};
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES)
        for (int n = 0; n < 2; n++) sums[n] = fma(load(a + i + n * LANES), load(b + i + n * LANES), sums[n]);
    for (; i + LANES <= size; i += LANES) sums[0] = fma(load(a + i), load(b + i), sums[0]);
    float lanes[LANES];
    store(lanes, add(sums[0], sums[1]));
    for (int width = LANES / 2; width; width /= 2)
        for (int n = 0; n < width; n++) lanes[n] += lanes[n + width];
    float sum = lanes[0];
    for (; i < size; i++) sum += a[i] * b[i];
    return sum;
}

// A vector of bf16 numbers and a float one: the same on every path.
static float dot_halves(const uint16_t* a, const float* b, int64_t size) {
    F16 sums[2] = {zero(), zero()};
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES)
        for (int n = 0; n < 2; n++) sums[n] = fma(load_bf16(a + i + n * LANES), load(b + i + n * LANES), sums[n]);
    for (; i + LANES <= size; i += LANES) sums[0] = fma(load_bf16(a + i), load(b + i), sums[0]);
    float sum = lane_sum(add(sums[0], sums[1]));
    for (; i < size; i++) {
        const uint32_t raw = static_cast<uint32_t>(a[i]) << 16;
        float x;
        std::memcpy(&x, &raw, 4);
        sum += x * b[i];
    }
    return sum;
}

float weigh(const BlockWeigh& w) {
    float highest = -INFINITY;
    for (int64_t i = 0; i < w.count; i++) {
        w.scores[i] = w.logits[i] + dot_halves(w.adds + w.tokens[i] * w.rank, w.memory, w.rank);
        highest = std::max(highest, w.scores[i]);
    }
    *w.highest = highest;
    F16 total = zero();
    for (int64_t i = w.count; i % LANES; i++) w.scores[i] = -INFINITY;
    for (int64_t i = 0; i < w.count; i += LANES) total = add(total, exp(sub(load(w.scores + i), set(highest))));
    return lane_sum(total);
}

static int64_t whole(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// Scores of V · 16 keys, with S sums of each: one after the other they would wait for each other.
template <int V, int S>
static void score(const float* query, const float* keys, int64_t stride, int64_t dim, F16 scale, float* out) {
    F16 sums[S][V];
#pragma GCC unroll 8
    for (int s = 0; s < S; s++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[s][v] = zero();
    int64_t d = 0;
    for (; d + S <= dim; d += S)
#pragma GCC unroll 8
        for (int s = 0; s < S; s++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++)
                sums[s][v] = fma(set(query[d + s]), load(keys + (d + s) * stride + v * LANES), sums[s][v]);
    for (; d < dim; d++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[0][v] = fma(set(query[d]), load(keys + d * stride + v * LANES), sums[0][v]);
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
#pragma GCC unroll 8
        for (int s = 1; s < S; s++) sums[0][v] = add(sums[0][v], sums[s][v]);
        store(out + v * LANES, mul(sums[0][v], scale));
    }
}

// Scores of all keys, -inf behind them to a whole vector.
static void score_all(const BlockLook& l, const BlockSeen& seen, float* out) {
    int64_t j = 0;
    for (; j + 4 * LANES <= whole(seen.count); j += 4 * LANES)
        score<4, 2>(l.query, seen.keys + j, seen.key_stride, l.dim, set(l.scale), out + j);
    for (; j < seen.count; j += LANES) score<1, 4>(l.query, seen.keys + j, seen.key_stride, l.dim, set(l.scale), out + j);
    for (j = seen.count; j < whole(seen.count); j++) out[j] = -INFINITY;
}

void look(const BlockLook& l) {
    const int64_t text = whole(l.text.count), count = text + whole(l.own.count);
    score_all(l, l.text, l.weights), score_all(l, l.own, l.weights + text);
    F16 most = load(l.weights + text), total = zero();
    for (int64_t j = 0; j < count; j += LANES) most = max(most, load(l.weights + j));
    const F16 highest = set(lane_max(most));
    for (int64_t j = 0; j < count; j += LANES) {
        const F16 e = exp(sub(load(l.weights + j), highest));
        store(l.weights + j, e), total = add(total, e);
    }
    const float sum = lane_sum(total);
    const BlockSeen* const parts[2] = {&l.text, &l.own};
    auto mix = [&](auto vectors, int64_t d) {
        constexpr int V = decltype(vectors)::value;
        F16 mixed[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) mixed[v] = zero();
        for (int part = 0; part < 2; part++)
            for (int64_t j = 0; j < parts[part]->count; j++) {
                const F16 weight = set(l.weights[part * text + j]);
                const float* value = parts[part]->values + j * parts[part]->value_stride + d;
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) mixed[v] = fma(weight, load(value + v * LANES), mixed[v]);
            }
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store(l.out + d + v * LANES, div(mixed[v], set(sum)));
    };
    int64_t d = 0;
    for (; d + 4 * LANES <= l.dim; d += 4 * LANES) mix(std::integral_constant<int, 4>(), d);
    for (; d + LANES <= l.dim; d += LANES) mix(std::integral_constant<int, 1>(), d);
    for (; d < l.dim; d++) {
        float mixed = 0.0f;
        for (int part = 0; part < 2; part++)
            for (int64_t j = 0; j < parts[part]->count; j++)
                mixed += l.weights[part * text + j] * parts[part]->values[j * parts[part]->value_stride + d];
        l.out[d] = mixed / sum;
    }
}

void block_step(const BlockStep& s) {
    const int64_t wide = 2 * s.rank;
    for (int64_t i = 0; i < wide; i++) s.gates[i] = s.of_token[i] + s.of_row[i] + s.constant[i];
    // Half a megabyte of it at a rank of 256: nothing is remembered before a draft's first token.
    const int64_t remembered = s.before ? s.rank : 0;
    auto add_rows = [&](auto vectors, int64_t i) {
        constexpr int V = decltype(vectors)::value;
        F16 sums[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[v] = load(s.gates + i + v * LANES);
        for (int64_t j = 0; j < remembered; j++) {
            const F16 before = set(s.before[j]);
            const float* row = s.of_memory + j * wide + i;
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[v] = fma(before, load(row + v * LANES), sums[v]);
        }
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store(s.gates + i + v * LANES, sums[v]);
    };
    int64_t at = 0;
    for (; at + 8 * LANES <= wide; at += 8 * LANES) add_rows(std::integral_constant<int, 8>(), at);
    for (; at + LANES <= wide; at += LANES) add_rows(std::integral_constant<int, 1>(), at);
    for (; at < wide; at++)
        for (int64_t j = 0; j < remembered; j++) s.gates[at] += s.before[j] * s.of_memory[j * wide + at];
    float opened[LANES], made[LANES];
    for (int64_t i = 0; i < s.rank; i += LANES) {
        const int64_t some = std::min<int64_t>(LANES, s.rank - i);
        for (int64_t n = 0; n < LANES; n++) {
            opened[n] = n < some ? s.gates[i + n] : 0.0f;
            made[n] = n < some ? s.gates[s.rank + i + n] : 0.0f;
        }
        store(opened, div(set(1.0f), add(set(1.0f), exp(sub(zero(), load(opened))))));
        store(made, tanh(load(made)));
        for (int64_t n = 0; n < some; n++) {
            const float before = s.before ? s.before[i + n] : 0.0f;
            s.after[i + n] = before + opened[n] * (made[n] - before);
        }
    }
}

}  // namespace SPECPRESS_PATH
