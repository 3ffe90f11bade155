// A gated delta rule in attention's place (kernels/delta.py): each value head's matrix goes from a row's parent to the row.
#include <algorithm>

#include "states.h"

namespace specpress {

// Of the prepared rows into mixed_. What a row is alone, threads share by rows; the convolution by channels and the
// matrices by heads, which do not meet: of each all rows go in their order, so that parents come first.
void Decoder::delta(const Layer& layer, int64_t state, const Batch& batch) {
    const Delta& d = *layer.delta;
    const int64_t rows = batch.rows, keys = d.key_heads * d.key_dim, values = d.value_heads * d.value_dim, channels = 2 * keys + values;
    const int64_t stride = channels + values + 2 * d.value_heads, past = d.count - 1, per = d.value_heads / d.key_heads;
    made_.resize(std::max(made_.size(), static_cast<size_t>(rows * stride)));
    queries_.resize(std::max(queries_.size(), static_cast<size_t>(rows * channels)));
    mixed_.resize(std::max(mixed_.size(), static_cast<size_t>(rows * values)));
    multiply(layer.qkv, rows, made_.data(), stride, false);
    filter(batch, state, made_.data(), stride, channels, d.taps, d.count, nullptr, queries_.data());
    pool_.run(rows, 1, [&](int thread, int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            float *q = queries_.data() + row * channels, *share = made_.data() + row * stride + channels + values, *left = share + d.value_heads;
            path_.gated(q, nullptr, channels, SILU, nullptr, q);
            for (int64_t h = 0; h < 2 * d.key_heads; h++) {
                float* x = q + h * d.key_dim;
                path_.norm(x, h < d.key_heads ? d.query : d.key, d.key_dim, d.eps, 0.0f, x, scratch(thread));
            }
            path_.sigmoid(share, d.value_heads);
            for (int64_t h = 0; h < d.value_heads; h++) left[h] = left[h] + d.step[h];
            path_.decay(left, d.rate, d.value_heads, left);
        }
    });
    const int64_t wide = d.value_dim;
    pool_.run(d.value_heads, 1, [&](int, int64_t begin, int64_t end) {
        for (int64_t h = begin; h < end; h++) {
            StatePart matrix = StatePart::matrix(path_, batch, state, past * channels, h, d.key_dim, wide);
            for (int64_t row = 0; row < rows; row++) {
                const float* q = queries_.data() + row * channels + h / per * d.key_dim;
                const float* v = queries_.data() + row * channels + 2 * keys + h * wide;
                const float *share = made_.data() + row * stride + channels + values + h, left = share[d.value_heads];
                float* out = mixed_.data() + row * values + h * wide;
                path_.delta_step({matrix.before(row), q, q + keys, v, left, *share, d.key_dim, wide, matrix.after(row), out});
                matrix.keep(row);
            }
        }
    });
    pool_.run(rows, 1, [&](int thread, int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            float* out = mixed_.data() + row * values;
            for (int64_t h = 0; h < d.value_heads; h++)
                path_.norm(out + h * wide, d.norm, wide, model_.norm_eps, 0.0f, out + h * wide, scratch(thread));
            path_.gated(made_.data() + row * stride + channels, out, values, SILU, nullptr, out);
        }
    });
}

}  // namespace specpress
