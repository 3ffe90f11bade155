// MLPs and mixtures of experts.
#include "products.h"

namespace specpress {

// Prepares what `down` takes: the activation of a gate and its factor, or of one layer, of rows that row_of gives.
template <class F>
void Decoder::feed(const Projection& gate_up, const Weights* down, const float* parameters, int64_t rows, F&& row_of) {
    const int64_t wide = down->inputs, stride = model_.gated ? 2 * wide : wide;
    prepare(gate_up, rows, row_of);
    multiply(gate_up, rows, gate_up_.data(), stride, false);
    const Projection one = {1, &down};
    prepare(one, rows, [&](int thread, int64_t row) {
        float* out = scratch(thread) + widest_;
        const float* gate = gate_up_.data() + row * stride;
        path_.gated(gate, model_.gated ? gate + wide : nullptr, wide, model_.activation, parameters, out);
        return static_cast<const float*>(out);
    });
}

void Decoder::mlp(const Layer& layer, int64_t rows) {
    // What stands beside attention has been normed before attention was added.
    feed(layer.gate_up, layer.down, layer.parameters, rows, [&](int thread, int64_t row) {
        return model_.parallel ? static_cast<const float*>(normed_.data() + row * model_.hidden) : normed(layer.mlp_norm, thread, row);
    });
    branch(layer.down, layer.output_norm, rows);
}

// The MLP beside a mixture, whose own output stands in sum_: both through their norms, added.
void Decoder::mix_beside(const Layer& layer, int64_t rows) {
    const MlpBeside& b = *layer.mixture->beside;
    const int64_t hidden = model_.hidden;
    feed(b.gate_up, b.down, layer.parameters, rows, [&](int thread, int64_t row) { return normed(layer.mlp_norm, thread, row); });
    const Projection down = {1, &b.down};
    multiply(down, rows, expert_.data(), hidden, false);
    rows_of(rows, hidden, [&](int thread, int64_t row) {
        float *made = expert_.data() + row * hidden, *mixed = sum_.data() + row * hidden, *own = scratch(thread);
        normalize(b.mlp_output_norm, made, hidden, made, own);
        normalize(b.output_norm, mixed, hidden, mixed, own);
        for (int64_t d = 0; d < hidden; d++) mixed[d] = made[d] + mixed[d];
    });
}

// Some experts a row; each row's are added in the order of their number, and then what all rows go through.
void Decoder::mix(const Layer& layer, int64_t rows) {
    const Mixture& m = *layer.mixture;
    const Routing& to = m.routing;
    const int64_t hidden = model_.hidden, experts = to.experts;
    const Norm& before = m.beside ? m.beside->input_norm : layer.mlp_norm;
    auto row_of = [&](int, int64_t row) { return static_cast<const float*>(normed_.data() + row * hidden); };
    if (!model_.parallel)
        rows_of(rows, hidden, [&](int thread, int64_t row) {
            std::memcpy(normed_.data() + row * hidden, normed(before, thread, row), static_cast<size_t>(hidden) * 4);
        });
    const Projection router = {1, &m.router};
    prepare(router, rows, [&](int thread, int64_t row) { return m.beside ? normed(m.beside->router_norm, thread, row) : row_of(thread, row); });
    grow(share_, rows * experts);
    multiply(router, rows, share_.data(), experts, false);
    grow(chosen_, rows * to.chosen);
    path_.choose(share_.data(), rows, to, chosen_.data());
    std::fill(sum_.begin(), sum_.begin() + rows * hidden, 0.0f);
    std::vector<int64_t>& members = members_;
    for (int64_t e = 0; e < experts; e++) {
        members.clear();
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < to.chosen; i++)
                if (chosen_[row * to.chosen + i] == e) members.push_back(row);
        if (members.empty()) continue;
        experts_read_++;
        const int64_t count = static_cast<int64_t>(members.size());
        feed(m.gate_up[e], m.down[e], layer.parameters, count, [&](int thread, int64_t i) {
            const float* x = row_of(thread, members[i]);
            if (!to.scaled_inputs) return x;
            const float share = share_[members[i] * experts + e];
            float* out = scratch(thread) + widest_;
            for (int64_t d = 0; d < hidden; d++) out[d] = x[d] * share;
            return static_cast<const float*>(out);
        });
        const Projection down = {1, &m.down[e]};
        multiply(down, count, expert_.data(), hidden, false);
        for (int64_t i = 0; i < count; i++) {
            float* sum = sum_.data() + members[i] * hidden;
            const float share = to.scaled_inputs ? 1.0f : share_[members[i] * experts + e];
            for (int64_t d = 0; d < hidden; d++) sum[d] = sum[d] + expert_[i * hidden + d] * share;
        }
    }
    if (m.shared_down) {
        if (m.shared_gate) {
            const Projection gate = {1, &m.shared_gate};
            prepare(gate, rows, row_of);
            multiply(gate, rows, share_.data(), 1, false);
            path_.sigmoid(share_.data(), rows);
        }
        feed(m.shared_gate_up, m.shared_down, layer.parameters, rows, row_of);
        const Projection down = {1, &m.shared_down};
        multiply(down, rows, expert_.data(), hidden, false);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t d = row * hidden; d < (row + 1) * hidden; d++)
                sum_[d] = sum_[d] + (m.shared_gate ? expert_[d] * share_[row] : expert_[d]);
    }
    if (m.beside) mix_beside(layer, rows);
    add_branch(sum_.data(), layer.output_norm, rows);
}

}  // namespace specpress
