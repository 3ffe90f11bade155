// MLPs and mixtures of experts.
#include "products.h"

namespace specpress {

namespace {

// Rows of experts that are computed together: of more, as in long prompts, what lies in between would take memory.
constexpr int64_t TOGETHER = 2048;

}  // namespace

// Prepares what the last layers of fed_'s MLPs take: the activation of a gate and its factor, or of one layer, of rows
// that row_of(thread, mlp, row) gives. Their products go where the caller has outs_ put them.
template <class F>
void Decoder::feed(const float* parameters, F&& row_of) {
    const int64_t count = static_cast<int64_t>(fed_.size()), layers = model_.gated ? 2 : 1;
    int64_t size = 0;
    for (const Fed& f : fed_) size += f.rows * layers * (*f.down)->inputs;
    grow(gate_up_, size);
    groups_.clear(), downs_.clear(), outs_.clear();
    float* y = gate_up_.data();
    for (const Fed& f : fed_) {
        const int64_t stride = layers * (*f.down)->inputs;
        groups_.push_back({f.gate_up, f.rows, y, stride});
        downs_.push_back({1, f.down});
        y += f.rows * stride;
    }
    for (int64_t i = 0; i < count; i++) outs_.push_back({&downs_[i], fed_[i].rows, nullptr, model_.hidden});
    prepare(groups_.data(), count, row_of);
    multiply(groups_.data(), count, false);
    prepare(outs_.data(), count, [&](int thread, int64_t mlp, int64_t row) {
        const int64_t wide = (*fed_[mlp].down)->inputs;
        float* out = scratch(thread) + widest_;
        float* gate = groups_[mlp].y + row * groups_[mlp].stride;
        if (model_.mlp_gates != 1.0f)
            for (int64_t d = 0; d < wide; d++) gate[d] = gate[d] * model_.mlp_gates;
        path_.gated(gate, model_.gated ? gate + wide : nullptr, wide, model_.activation, parameters, out);
        return static_cast<const float*>(out);
    });
}

void Decoder::mlp(const Layer& layer, int64_t rows) {
    fed_.assign(1, {&layer.gate_up, &layer.down, rows, false});
    // What stands beside attention has been normed before attention was added.
    feed(layer.parameters, [&](int thread, int64_t, int64_t row) {
        return model_.parallel ? static_cast<const float*>(normed_.data() + row * model_.hidden) : normed(layer.mlp_norm, thread, row);
    });
    branch(layer.down, layer.output_norm, model_.mlp_added, rows);
}

// The MLP beside a mixture, whose own output stands in sum_: both through their norms, added.
void Decoder::mix_beside(const Layer& layer, int64_t rows) {
    const MlpBeside& b = *layer.mixture->beside;
    const int64_t hidden = model_.hidden;
    fed_.assign(1, {&b.gate_up, &b.down, rows, false});
    feed(layer.parameters, [&](int thread, int64_t, int64_t row) { return normed(layer.mlp_norm, thread, row); });
    fed_.clear();
    grow(expert_, rows * hidden);
    outs_[0].y = expert_.data();
    multiply(outs_.data(), 1, false);
    rows_of(rows, hidden, [&](int thread, int64_t row) {
        float *made = expert_.data() + row * hidden, *mixed = sum_.data() + row * hidden, *own = scratch(thread);
        normalize(b.mlp_output_norm, made, hidden, made, own);
        normalize(b.output_norm, mixed, hidden, mixed, own);
        for (int64_t d = 0; d < hidden; d++) mixed[d] = made[d] + mixed[d];
    });
}

// Some experts a row; each row's are added in the order of their number, and then what all rows go through. Each expert's
// weights are read once for all of its rows, and threads go from expert to expert without waiting for each other.
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
    members_.clear(), factors_.clear(), fed_.clear();
    for (int64_t e = 0; e < experts; e++) {
        int64_t count = 0;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < to.chosen; i++)
                if (chosen_[row * to.chosen + i] == e) members_.push_back(row), factors_.push_back(share_[row * experts + e]), count++;
        if (!count) continue;
        experts_read_++;
        fed_.push_back({&m.gate_up[e], &m.down[e], count, to.scaled_inputs != 0});
        if (static_cast<int64_t>(members_.size()) >= TOGETHER) mix_some(layer.parameters);
    }
    if (m.shared_down) {
        grow(shared_share_, rows);
        std::fill(shared_share_.begin(), shared_share_.begin() + rows, 1.0f);
        if (m.shared_gate) {
            const Projection gate = {1, &m.shared_gate};
            prepare(gate, rows, row_of);
            multiply(gate, rows, shared_share_.data(), 1, false);
            path_.sigmoid(shared_share_.data(), rows);
        }
        for (int64_t row = 0; row < rows; row++) members_.push_back(row), factors_.push_back(shared_share_[row]);
        fed_.push_back({&m.shared_gate_up, &m.shared_down, rows, false});
    }
    mix_some(layer.parameters);
    if (m.beside) mix_beside(layer, rows);
    add_branch(sum_.data(), layer.output_norm, model_.mlp_added, rows);
}

// Adds to sum_ what fed_'s experts make of the rows members_, each times its factor: an input's or an output's.
void Decoder::mix_some(const float* parameters) {
    if (fed_.empty()) return;
    const int64_t hidden = model_.hidden, all = static_cast<int64_t>(members_.size());
    feed(parameters, [&](int thread, int64_t mlp, int64_t row) {
        const int64_t at = first_rows_[mlp] + row;
        const float* x = normed_.data() + members_[at] * hidden;
        if (!fed_[mlp].scaled) return x;
        float* out = scratch(thread) + widest_;
        for (int64_t d = 0; d < hidden; d++) out[d] = x[d] * factors_[at];
        return static_cast<const float*>(out);
    });
    grow(expert_, all * hidden);
    for (int64_t i = 0, first = 0; i < static_cast<int64_t>(outs_.size()); first += outs_[i].rows, i++) outs_[i].y = expert_.data() + first * hidden;
    multiply(outs_.data(), static_cast<int64_t>(outs_.size()), false);
    pool_.run(hidden, all * hidden < 16384 ? hidden : 256, [&](int, int64_t begin, int64_t end) {
        int64_t at = 0;
        for (const Fed& f : fed_)
            for (int64_t row = 0; row < f.rows; row++, at++) {
                float* sum = sum_.data() + members_[at] * hidden;
                const float *made = expert_.data() + at * hidden, factor = f.scaled ? 1.0f : factors_[at];
                for (int64_t d = begin; d < end; d++) sum[d] = sum[d] + made[d] * factor;
            }
    });
    members_.clear(), factors_.clear(), fed_.clear();
}

}  // namespace specpress
