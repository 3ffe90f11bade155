// A state space in attention's place or beside it (kernels/mamba.py): each head's matrix goes from a row's parent to the row.
#include "products.h"
#include "states.h"

namespace specpress {

// What `into` makes of the rows, into made_.
void Decoder::read_mamba(const Layer& layer, int64_t rows) {
    const Mamba& m = *layer.mamba;
    const Projection into = {1, &m.into};
    grow(made_, rows * m.into->outputs);
    prepare(into, rows, [&](int thread, int64_t row) { return scaled(normed(layer.input_norm, thread, row), m.read, thread); });
    multiply(into, rows, made_.data(), m.into->outputs, false);
}

// Of made_ into mixed_, and from there to the residual stream. What a row is alone, threads share by rows; the convolution
// by channels and the matrices by heads, which do not meet: of each all rows go in their order, so that parents come first.
void Decoder::mamba(const Layer& layer, int64_t state, const Batch& batch) {
    const Mamba& m = *layer.mamba;
    const int64_t rows = batch.rows, values = m.heads * m.dim, vectors = m.groups * m.state, channels = channels_of(m);
    const int64_t stride = m.into->outputs, steps = values + channels, past = m.count - 1, size = m.dim * m.state;
    grow(queries_, rows * channels), grow(mixed_, rows * values), grow(left_, rows * m.heads);
    rows_of(rows, stride, [&](int, int64_t row) {
        float *made = made_.data() + row * stride, *step = made + steps;
        if (m.multipliers)
            for (int64_t i = 0; i < stride; i++) made[i] = made[i] * m.multipliers[i];
        for (int64_t h = 0; h < m.heads; h++) step[h] = step[h] + m.step[h];
        path_.mamba_steps(step, m.rate, m.heads, m.low, m.high, left_.data() + row * m.heads);
    });
    filter(batch, state, made_.data() + values, stride, channels, m.taps, m.count, m.bias, queries_.data());
    rows_of(rows, channels, [&](int, int64_t row) {
        float* x = queries_.data() + row * channels;
        path_.gated(x, nullptr, channels, SILU, nullptr, x);
    });
    pool_.run(m.heads, rows * m.heads * size < 16384 ? m.heads : 1, [&](int, int64_t begin, int64_t end) {
        for (int64_t h = begin; h < end; h++) {
            StatePart matrix = StatePart::matrix(path_, batch, state, past * channels, h, m.state, m.dim);
            for (int64_t row = 0; row < rows; row++) {
                const float *x = queries_.data() + row * channels, *b = x + values + h / (m.heads / m.groups) * m.state;
                float* out = mixed_.data() + row * values + h * m.dim;
                const float step = made_[row * stride + steps + h], left = left_[row * m.heads + h];
                path_.mamba_step(
                    {matrix.before(row), x + h * m.dim, b, b + vectors, step, left, m.skip[h], m.state, m.dim, matrix.after(row), out});
                matrix.keep(row);
            }
        }
    });
    const int64_t group = values / m.groups;
    rows_of(rows, values, [&](int thread, int64_t row) {
        float *out = mixed_.data() + row * values, *gates = made_.data() + row * stride;
        auto norm = [&] {
            for (int64_t at = 0; m.norm && at < values; at += group)
                path_.norm(out + at, m.norm + at, group, model_.norm_eps, 0.0f, out + at, scratch(thread));
        };
        if (!m.gate_first) norm();
        path_.gated(gates, out, values, SILU, nullptr, out);
        if (m.gate_first) norm();
    });
    const Projection out = {1, &m.out};
    prepare(out, rows, [&](int, int64_t row) { return static_cast<const float*>(mixed_.data() + row * values); });
    branch(m.out, Norm{}, m.added, rows);
}

}  // namespace specpress
