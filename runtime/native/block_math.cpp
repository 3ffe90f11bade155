// What the drafter `block` computes row by row (speculative/drafters/block_network.py). Drafts change no text, so that
// sums may have another order than torch's.
#include <algorithm>

#include "kernels.h"
#include "vec.h"

namespace SPECPRESS_PATH {

using specpress::BlockLook;
using specpress::BlockStep;

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

// The largest of each 64 numbers; of fewer at the end.
void maxima(const float* x, int64_t size, float* out) {
    for (int64_t first = 0; first < size; first += 64) {
        const int64_t last = std::min(first + 64, size);
        int64_t i = first;
        float most = x[first];
        if (last - first >= LANES) {
            F16 most_of = load(x + i);
            for (i += LANES; i + LANES <= last; i += LANES) most_of = max(most_of, load(x + i));
            float lanes[LANES];
            store(lanes, most_of);
            most = *std::max_element(lanes, lanes + LANES);
        }
        for (; i < last; i++) most = std::max(most, x[i]);
        out[first / 64] = most;
    }
}

void look(const BlockLook& l) {
    float highest = -INFINITY;
    const int64_t whole = (l.count + LANES - 1) / LANES * LANES;
    for (int64_t j = 0; j < l.count; j++) {
        const float* key = j < l.text ? l.keys + j * l.stride : l.own_keys + (j - l.text) * l.own_stride;
        l.weights[j] = dot(l.query, key, l.dim) * l.scale;
        highest = std::max(highest, l.weights[j]);
    }
    for (int64_t j = l.count; j < whole; j++) l.weights[j] = -INFINITY;
    for (int64_t j = 0; j < whole; j += LANES) store(l.weights + j, exp(sub(load(l.weights + j), set(highest))));
    float sum = 0.0f;
    for (int64_t j = 0; j < l.count; j++) sum += l.weights[j];
    auto value = [&](int64_t j) { return j < l.text ? l.values + j * l.stride : l.own_values + (j - l.text) * l.own_stride; };
    int64_t d = 0;
    for (; d + LANES <= l.dim; d += LANES) {
        F16 mixed = zero();
        for (int64_t j = 0; j < l.count; j++) mixed = fma(set(l.weights[j]), load(value(j) + d), mixed);
        store(l.out + d, div(mixed, set(sum)));
    }
    for (; d < l.dim; d++) {
        float mixed = 0.0f;
        for (int64_t j = 0; j < l.count; j++) mixed += l.weights[j] * value(j)[d];
        l.out[d] = mixed / sum;
    }
}

void block_step(const BlockStep& s) {
    for (int64_t i = 0; i < 2 * s.rank; i++)
        s.gates[i] = s.of_token[i] + s.of_row[i] + s.constant[i] + dot(s.of_memory + i * s.rank, s.before, s.rank);
    float opened[LANES], made[LANES];
    for (int64_t i = 0; i < s.rank; i += LANES) {
        const int64_t some = std::min<int64_t>(LANES, s.rank - i);
        for (int64_t n = 0; n < LANES; n++) {
            opened[n] = n < some ? s.gates[i + n] : 0.0f;
            made[n] = n < some ? s.gates[s.rank + i + n] : 0.0f;
        }
        store(opened, div(set(1.0f), add(set(1.0f), exp(sub(zero(), load(opened))))));
        store(made, tanh(load(made)));
        for (int64_t n = 0; n < some; n++) s.after[i + n] = s.before[i + n] + opened[n] * (made[n] - s.before[i + n]);
    }
}

}  // namespace SPECPRESS_PATH
