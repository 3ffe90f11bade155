#include "model.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace kernels_test {

using namespace specpress;

void Parts::add(std::unique_ptr<TestLayer> layer) {
    pointers.push_back(&layer->weights);
    layers.push_back(std::move(layer));
}

std::vector<double> Parts::of(const Floats& x) const {
    std::vector<double> out;
    for (const auto& layer : layers)
        for (const Expected& y : layer->expected(x.data())) out.push_back(y.value);
    return out;
}

namespace {

std::unique_ptr<TestLayer> random_layer(int64_t kind, int64_t outputs, int64_t inputs, Random& random, Pool& pool, bool bias = false) {
    LayerShape s = {kind, outputs, inputs};
    s.bias = bias, s.zero = kind == INT4 ? 8 : 0;
    if (kind == INT4 || kind == NF4) s.group = 32, s.permuted = kind == INT4 && inputs == WIDE;
    return std::make_unique<TestLayer>(s, random, pool);
}

}  // namespace

TestModel::TestModel(const ModelShape& s, Random& random, Pool& pool) : shape(s), blocks(DEPTH) {
    for (TestBlock& b : blocks) {
        b.input_norm = random.reals(HIDDEN, 0.1f, 0.3f), b.mlp_norm = random.reals(HIDDEN, 0.1f, 0.3f);
        b.query_norm = random.reals(s.dim, 0.5f, 1.5f), b.key_norm = random.reals(s.dim, 0.5f, 1.5f);
        // The decoder takes a weight for every head.
        for (int64_t head = 0; head < HEADS; head++) b.query_norms.insert(b.query_norms.end(), b.query_norm.begin(), b.query_norm.end());
        for (int64_t head = 0; head < KV_HEADS; head++) b.key_norms.insert(b.key_norms.end(), b.key_norm.begin(), b.key_norm.end());
        const bool stateful = s.taps && !s.mamba && &b == &blocks[0], convolved = stateful && !s.delta;
        std::vector<int64_t> made = {HEADS * s.dim, KV_HEADS * s.dim, KV_HEADS * s.dim};
        if (s.shared && &b != &blocks[0]) made = {HEADS * s.dim};
        if (stateful) made = s.delta ? std::vector<int64_t>{CHANNELS, DELTA_VALUES, VALUE_HEADS, VALUE_HEADS} : std::vector<int64_t>(3, HIDDEN);
        for (int64_t outputs : made) b.qkv.add(random_layer(s.kind, outputs, HIDDEN, random, pool, true));
        b.out.add(random_layer(s.kind, HIDDEN, !stateful ? HEADS * s.dim : s.delta ? DELTA_VALUES : HIDDEN, random, pool));
        if (convolved) b.taps = random.reals(s.taps * HIDDEN, -1.0f, 1.0f), b.tap_bias = random.reals(HIDDEN, -0.5f, 0.5f);
        if (stateful && s.delta) {
            b.taps = random.reals(s.taps * CHANNELS, -1.0f, 1.0f), b.delta_norm = random.reals(VALUE_DIM, 0.5f, 1.5f);
            b.step = random.reals(VALUE_HEADS, -1.0f, 1.0f), b.rate = random.reals(VALUE_HEADS, -0.5f, -0.01f);
            b.delta_query = random.reals(KEY_DIM, 0.1f, 0.3f), b.delta_key = random.reals(KEY_DIM, 0.1f, 0.3f);
        }
        if (s.mamba && &b == &blocks[0]) {
            b.into.add(random_layer(s.kind, SPACE_MADE, HIDDEN, random, pool, true)), b.space_out.add(random_layer(s.kind, HIDDEN, SPACE, random, pool));
            b.space_taps = random.reals(s.taps * SPACE_CHANNELS, -1.0f, 1.0f), b.space_bias = random.reals(SPACE_CHANNELS, -0.5f, 0.5f);
            b.space_step = random.reals(SPACE_HEADS, -1.0f, 1.0f), b.space_rate = random.reals(SPACE_HEADS, -0.5f, -0.01f);
            b.skip = random.reals(SPACE_HEADS, 0.5f, 1.5f), b.space_norm = random.reals(SPACE, 0.5f, 1.5f);
            b.multipliers = random.reals(SPACE_MADE, 0.5f, 1.5f);
        }
        if (!stateful && s.gate) b.gate.add(random_layer(s.kind, s.by_head ? HEADS : HEADS * s.dim, HIDDEN, random, pool));
        for (int64_t e = 0; e < std::max<int64_t>(1, s.experts); e++) {
            b.gate_up.emplace_back(), b.down.emplace_back();
            b.gate_up.back().add(random_layer(s.kind, WIDE, HIDDEN, random, pool));
            b.gate_up.back().add(random_layer(s.kind, WIDE, HIDDEN, random, pool));
            b.down.back().add(random_layer(s.kind, HIDDEN, WIDE, random, pool));
        }
        if (s.experts) b.router.add(random_layer(F32, s.experts, HIDDEN, random, pool));
        if (!s.inputs) continue;
        b.own_gate.add(random_layer(s.kind, s.inputs, HIDDEN, random, pool)), b.own_out.add(random_layer(s.kind, HIDDEN, s.inputs, random, pool));
        b.own_norm = random.reals(HIDDEN, 0.5f, 1.5f);
    }
    int64_t keys = 0;
    for (TestBlock& b : blocks) {
        for (size_t e = 0; e < b.gate_up.size(); e++)
            b.gate_up_projections.push_back(b.gate_up[e].projection()), b.down_pointers.push_back(b.down[e].pointers[0]);
        Layer layer{};
        layer.input_norm.weight = b.input_norm.data(), layer.mlp_norm.weight = b.mlp_norm.data();
        if (s.head_norms) layer.query_norm = b.query_norms.data(), layer.key_norm = b.key_norms.data();
        layer.qkv = b.qkv.projection(), layer.out = b.out.pointers[0], layer.window = layers.empty() ? s.window : 0;
        if (!b.tap_bias.empty()) b.convolution = {b.taps.data(), b.tap_bias.data(), s.taps}, layer.convolution = &b.convolution;
        if (!b.step.empty()) {
            b.delta = {b.taps.data(),       b.step.data(), b.rate.data(), b.delta_query.data(), b.delta_key.data(),
                       b.delta_norm.data(), s.taps,        KEY_HEADS,     VALUE_HEADS,          KEY_DIM,
                       VALUE_DIM,           1e-5f};
            layer.delta = &b.delta;
        }
        if (!b.skip.empty()) {
            b.mamba = {b.into.pointers[0], b.space_out.pointers[0], b.multipliers.data(), b.space_taps.data(), b.space_bias.data(), b.space_step.data(),
                       b.space_rate.data(), b.skip.data(), b.space_norm.data(), s.taps, SPACE_HEADS, SPACE_DIM, GROUPS, STATE, s.gate, 0.3f, 1.1f, 1.3f, 0.7f};
            layer.mamba = &b.mamba;
        }
        if (!b.gate.pointers.empty()) layer.gate = b.gate.pointers[0];
        if (s.shared && &b != &blocks[0])
            layer.shares = 1, layer.key_norm = nullptr;
        else if (b.taps.empty())
            layer.keys = keys++;
        if (s.inputs) b.own = {b.own_gate.pointers[0], b.own_out.pointers[0], {b.own_norm.data(), nullptr}}, layer.own = &b.own, layer.scale = BLOCK_SCALE;
        if (s.experts) {
            b.mixture = {{s.experts, CHOSEN, s.gelu ? 0 : 1}, b.router.pointers[0], b.gate_up_projections.data(), b.down_pointers.data(), {}, nullptr, nullptr, nullptr};
            layer.mixture = &b.mixture;
        } else if (!s.mamba || layers.empty()) {
            layer.gate_up = b.gate_up[0].projection(), layer.down = b.down[0].pointers[0];
        }
        layers.push_back(layer);
    }
    norm = random.reals(HIDDEN, 0.5f, 1.5f);
    // A tied head is float; a ternary model's is int8.
    const int64_t head_kind = s.tied && s.kind >= INT8 ? BF16 : s.kind == TERNARY ? INT8 : s.kind;
    head.add(random_layer(head_kind, VOCABULARY, HIDDEN, random, pool));
    if (!s.tied && s.embedding_type == SCALE_F32) embedding32 = random.reals(VOCABULARY * HIDDEN, -1.0f, 1.0f);
    for (int64_t i = 0; i < VOCABULARY * HIDDEN && !s.tied && s.embedding_type != SCALE_F32; i++) {
        // Numbers between 2^-4 and 1, float16's subnormal ones too, of either sign.
        int64_t raw = random.whole(0x3d80, 0x3f80);
        if (s.embedding_type == SCALE_F16) raw = i % 9 ? random.whole(11 << 10, 15 << 10) : random.whole(0, 1023);
        embedding16.push_back(static_cast<uint16_t>(raw | random.whole(0, 1) << 15));
    }
    const int64_t half = s.dim / 2;
    for (int64_t position = 0; position < POSITIONS; position++)
        for (int64_t i = 0; i < half; i++) {
            const double angle = static_cast<double>(position) * std::pow(100.0, -static_cast<double>(i) / static_cast<double>(half));
            cos.push_back(static_cast<float>(std::cos(angle))), sin.push_back(static_cast<float>(std::sin(angle)));
        }
    heads = {HEADS, KV_HEADS, s.dim, 2 * half, s.cache, nullptr};
    model.heads = &heads, model.groups = 1;
    model.layers = DEPTH, model.hidden = HIDDEN, model.intermediate = WIDE, model.vocabulary = VOCABULARY, model.activation = s.gelu ? specpress::GELU_TANH : specpress::SILU;
    model.norm_eps = 1e-5f, model.embedding_scale = s.gelu ? 1.5f : 1.0f;
    model.attention_scaling = 0.25f, model.layer = layers.data(), model.norm.weight = norm.data(), model.gated = model.tables = 1, model.logits_scale = model.attention_read = model.attention_added = model.mlp_gates = model.mlp_added = model.own_added = 1.0f, model.head = head.pointers[0];
    if (s.mamba) model.attention_read = 0.8f, model.attention_added = 1.2f, model.mlp_gates = 0.6f, model.mlp_added = 1.4f;
    if (!s.tied) model.embedding = embedding16.empty() ? static_cast<const void*>(embedding32.data()) : embedding16.data();
    model.embedding_type = s.embedding_type;
    if (!s.inputs) return;
    projection.add(random_layer(s.kind, DEPTH * s.inputs, HIDDEN, random, pool));
    input_table = random.reals(VOCABULARY * DEPTH * s.inputs, -1.0f, 1.0f), input_norm = random.reals(s.inputs, 0.5f, 1.5f);
    inputs = {input_table.data(), SCALE_F32, s.inputs, projection.pointers[0], {input_norm.data(), nullptr}, 0.5f, 1.25f, 0.75f};
    model.inputs = &inputs;
}

Floats TestModel::embedding_of(int64_t token) const {
    Floats out(HIDDEN);
    Floats axis(HIDDEN, 0.0f);
    for (int64_t i = 0; i < HIDDEN; i++) {
        if (shape.tied) {
            axis[i] = 1.0f;
            out[i] = static_cast<float>(head.of(axis)[token]);
            axis[i] = 0.0f;
        } else if (shape.embedding_type == SCALE_F32) {
            out[i] = embedding32[token * HIDDEN + i];
        } else {
            const uint16_t raw = embedding16[token * HIDDEN + i];
            const int bits = shape.embedding_type == SCALE_F16 ? 10 : 7, bias = shape.embedding_type == SCALE_F16 ? 15 : 127;
            const int exponent = (raw & 0x7fff) >> bits, fraction = raw & ((1 << bits) - 1);
            const double size =
                exponent ? std::ldexp((1 << bits) + fraction, exponent - bias - bits) : std::ldexp(fraction, 1 - bias - bits);
            out[i] = static_cast<float>(raw & 0x8000 ? -size : size);
        }
        out[i] *= model.embedding_scale;
    }
    return out;
}

namespace {

Floats normed(const std::vector<double>& x, const Floats& weight, float offset) {
    double squares = 0.0;
    for (double v : x) squares += v * v;
    const double root = std::sqrt(squares / static_cast<double>(x.size()) + 1e-5);
    Floats out;
    for (size_t i = 0; i < x.size(); i++) out.push_back(static_cast<float>(x[i] / root * (static_cast<double>(weight[i]) + offset)));
    return out;
}

std::vector<double> mlp(const TestModel& m, const TestBlock& b, size_t expert, const Floats& x) {
    const std::vector<double> both = b.gate_up[expert].of(x);
    Floats mixed;
    for (int64_t i = 0; i < WIDE; i++) {
        const double g = both[i] * m.model.mlp_gates;
        const double gate = m.shape.gelu ? 0.5 * g * (1.0 + std::tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) : g / (1.0 + std::exp(-g));
        mixed.push_back(static_cast<float>(gate * both[WIDE + i]));
    }
    return b.down[expert].of(mixed);
}

std::vector<double> mixture(const TestModel& m, const TestBlock& b, const Floats& x) {
    if (!m.shape.experts) return mlp(m, b, 0, x);
    std::vector<double> odds = b.router.of(x), out(HIDDEN);
    std::vector<size_t> order(odds.size());
    double total = 0.0, kept = 0.0;
    for (size_t e = 0; e < odds.size(); e++) order[e] = e, odds[e] = std::exp(odds[e]), total += odds[e];
    std::sort(order.begin(), order.end(), [&](size_t i, size_t j) { return odds[i] > odds[j]; });
    for (int64_t i = 0; i < CHOSEN; i++) kept += odds[order[i]];
    for (int64_t i = 0; i < CHOSEN; i++) {
        const std::vector<double> own = mlp(m, b, order[i], x);
        for (int64_t d = 0; d < HIDDEN; d++) out[d] += own[d] * odds[order[i]] / (b.mixture.routing.renormalize ? kept : total);
    }
    return out;
}

}  // namespace

std::vector<double> textbook(const TestModel& m, const std::vector<int64_t>& tokens) {
    const int64_t dim = m.shape.dim, half = dim / 2;
    std::vector<std::vector<Floats>> keys(DEPTH), values(DEPTH);
    std::vector<std::vector<double>> inputs;  // of the convolution
    std::vector<double> matrices(static_cast<size_t>(DELTA_VALUES * KEY_DIM));
    std::vector<double> logits;
    auto heads_of = [&](const std::vector<double>& qkv, int64_t first, int64_t heads, const Floats* norm, bool turn, int64_t position) {
        Floats out;
        for (int64_t h = 0; h < heads; h++) {
            std::vector<double> one(qkv.begin() + (first + h) * dim, qkv.begin() + (first + h + 1) * dim);
            Floats x = norm ? normed(one, *norm, 0.0f) : Floats(one.begin(), one.end());
            for (int64_t i = 0; turn && i < half; i++) {
                const double a = x[i], b = x[half + i], c = m.cos[position * half + i], s = m.sin[position * half + i];
                x[i] = static_cast<float>(a * c - b * s), x[half + i] = static_cast<float>(b * c + a * s);
            }
            out.insert(out.end(), x.begin(), x.end());
        }
        return out;
    };
    // What a block adds of its own input.
    auto own_input = [&](int64_t l, int64_t token, const std::vector<double>& inputs, std::vector<double>& x) {
        const TestBlock& b = m.blocks[l];
        const int64_t size = m.shape.inputs;
        std::vector<double> made(inputs.begin() + l * size, inputs.begin() + (l + 1) * size);
        for (double& v : made) v *= m.inputs.made_scale;
        const Floats even = normed(made, m.input_norm, 0.0f);
        const std::vector<double> gates = b.own_gate.of(Floats(x.begin(), x.end()));
        Floats gated;
        for (int64_t i = 0; i < size; i++) {
            const double row = m.input_table[(token * DEPTH + l) * size + i] * m.inputs.row_scale;
            gated.push_back(static_cast<float>(gates[i] / (1.0 + std::exp(-gates[i])) * (even[i] + row) * m.inputs.scale));
        }
        const Floats added = normed(b.own_out.of(gated), b.own_norm, 0.0f);
        for (int64_t d = 0; d < HIDDEN; d++) x[d] = (x[d] + added[d]) * BLOCK_SCALE;
    };
    // What attention makes of a row's queries, keys and values, before the layer behind it.
    auto attend = [&](int64_t l, const std::vector<double>& qkv, int64_t at) {
        const TestBlock& b = m.blocks[l];
        const Floats q = heads_of(qkv, 0, HEADS, m.shape.head_norms ? &b.query_norm : nullptr, true, at);
        const int64_t window = m.layers[l].window, first = window && at >= window ? at - window + 1 : 0;
        if (m.layers[l].shares) {
            l = 0;
        } else {
            keys[l].push_back(heads_of(qkv, HEADS, KV_HEADS, m.shape.head_norms ? &b.key_norm : nullptr, true, at));
            values[l].push_back(heads_of(qkv, HEADS + KV_HEADS, KV_HEADS, nullptr, false, at));
        }
        Floats mixed;
        for (int64_t h = 0; h < HEADS; h++) {
            const int64_t from = h / (HEADS / KV_HEADS) * dim;
            std::vector<double> weights, sum(static_cast<size_t>(dim));
            double total = 0.0;
            for (int64_t j = first; j <= at; j++) {
                double dot = 0.0;
                for (int64_t d = 0; d < dim; d++) dot += static_cast<double>(q[h * dim + d]) * keys[l][j][from + d];
                weights.push_back(std::exp(dot * m.model.attention_scaling)), total += weights.back();
            }
            for (int64_t j = first; j <= at; j++)
                for (int64_t d = 0; d < dim; d++) sum[d] += weights[j - first] / total * values[l][j][from + d];
            mixed.insert(mixed.end(), sum.begin(), sum.end());
        }
        return mixed;
    };
    // A channel's last inputs, the row's own among them, times its taps.
    auto tapped = [&](const Floats& taps, int64_t channels, int64_t channel, int64_t at) {
        double sum = 0.0;
        for (int64_t tap = 0; tap < m.shape.taps; tap++) {
            const int64_t seen = at - m.shape.taps + 1 + tap;
            if (seen >= 0) sum += taps[tap * channels + channel] * inputs[seen][channel];
        }
        return sum;
    };
    // And what a convolution makes of its gate, second gate and input.
    auto convolve = [&](const TestBlock& b, const std::vector<double>& made, int64_t at) {
        Floats mixed;
        inputs.emplace_back();
        for (int64_t d = 0; d < HIDDEN; d++) {
            inputs.back().push_back(made[d] * made[2 * HIDDEN + d]);
            mixed.push_back(static_cast<float>(made[HIDDEN + d] * (b.tap_bias[d] + tapped(b.taps, HIDDEN, d, at))));
        }
        return mixed;
    };
    // And a delta rule of its queries, keys and values, gates, corrections and decays.
    auto correct = [&](const TestBlock& b, const std::vector<double>& made, int64_t at) {
        auto silu = [](double v) { return v / (1.0 + std::exp(-v)); };
        inputs.emplace_back(made.begin(), made.begin() + CHANNELS);
        std::vector<double> qkv;
        for (int64_t d = 0; d < CHANNELS; d++) qkv.push_back(silu(tapped(b.taps, CHANNELS, d, at)));
        Floats mixed;
        for (int64_t h = 0; h < VALUE_HEADS; h++) {
            const auto first = qkv.begin() + h / (VALUE_HEADS / KEY_HEADS) * KEY_DIM;
            const Floats q = normed({first, first + KEY_DIM}, b.delta_query, 0.0f);
            const Floats k = normed({first + DELTA_KEYS, first + DELTA_KEYS + KEY_DIM}, b.delta_key, 0.0f);
            const double share = 1.0 / (1.0 + std::exp(-made[CHANNELS + DELTA_VALUES + h]));
            const double left = std::exp(b.rate[h] * std::log1p(std::exp(made[CHANNELS + DELTA_VALUES + VALUE_HEADS + h] + b.step[h])));
            std::vector<double> out;
            for (int64_t j = 0; j < VALUE_DIM; j++) {
                double known = 0.0, sum = 0.0;
                double* column = matrices.data() + h * KEY_DIM * VALUE_DIM + j;
                for (int64_t i = 0; i < KEY_DIM; i++) column[i * VALUE_DIM] *= left, known += column[i * VALUE_DIM] * k[i];
                const double lacking = (qkv[2 * DELTA_KEYS + h * VALUE_DIM + j] - known) * share;
                for (int64_t i = 0; i < KEY_DIM; i++) column[i * VALUE_DIM] += k[i] * lacking, sum += column[i * VALUE_DIM] * q[i];
                out.push_back(sum);
            }
            const Floats even = normed(out, b.delta_norm, 0.0f);
            for (int64_t j = 0; j < VALUE_DIM; j++) mixed.push_back(static_cast<float>(even[j] * silu(made[CHANNELS + h * VALUE_DIM + j])));
        }
        return mixed;
    };
    // And a state space of its gates, inputs, Bs, Cs and steps.
    std::vector<double> spaces(static_cast<size_t>(SPACE * STATE));
    auto advance = [&](const TestBlock& b, std::vector<double> made, int64_t at) {
        auto silu = [](double v) { return v / (1.0 + std::exp(-v)); };
        for (int64_t d = 0; d < SPACE_MADE; d++) made[d] *= b.multipliers[d];
        inputs.emplace_back(made.begin() + SPACE, made.begin() + SPACE + SPACE_CHANNELS);
        std::vector<double> x, mixed(static_cast<size_t>(SPACE));
        for (int64_t d = 0; d < SPACE_CHANNELS; d++) x.push_back(silu(b.space_bias[d] + tapped(b.space_taps, SPACE_CHANNELS, d, at)));
        for (int64_t h = 0; h < SPACE_HEADS; h++) {
            const double steps = std::log1p(std::exp(made[SPACE + SPACE_CHANNELS + h] + b.space_step[h]));
            const double step = std::min<double>(std::max<double>(steps, b.mamba.low), b.mamba.high), left = std::exp(b.space_rate[h] * step);
            const double* vectors = x.data() + SPACE + h / (SPACE_HEADS / GROUPS) * STATE;
            for (int64_t d = h * SPACE_DIM; d < (h + 1) * SPACE_DIM; d++) {
                mixed[d] = x[d] * b.skip[h];
                for (int64_t n = 0; n < STATE; n++) {
                    double& place = spaces[d * STATE + n];
                    place = place * left + step * x[d] * vectors[n], mixed[d] += place * vectors[VECTORS + n];
                }
                if (b.mamba.gate_first) mixed[d] *= silu(made[d]);
            }
        }
        Floats out;
        for (int64_t g = 0; g < GROUPS; g++) {
            const int64_t first = g * (SPACE / GROUPS), last = first + SPACE / GROUPS;
            const Floats even = normed({mixed.begin() + first, mixed.begin() + last}, {b.space_norm.begin() + first, b.space_norm.begin() + last}, 0.0f);
            for (int64_t d = first; d < last; d++) out.push_back(static_cast<float>(even[d - first] * (b.mamba.gate_first ? 1.0 : silu(made[d]))));
        }
        return out;
    };
    auto times = [](Floats x, float factor) {
        for (float& v : x) v *= factor;
        return x;
    };
    for (size_t position = 0; position < tokens.size(); position++) {
        const Floats start = m.embedding_of(tokens[position]);
        std::vector<double> x(start.begin(), start.end());
        const std::vector<double> own = m.projection.of(start);
        for (int64_t l = 0; l < DEPTH; l++) {
            const TestBlock& b = m.blocks[l];
            const Floats first = normed(x, b.input_norm, 0.0f), read = times(first, m.model.attention_read);
            const std::vector<double> made = b.qkv.of(read), gates = b.gate.of(read);
            const int64_t at = static_cast<int64_t>(position);
            Floats mixed = b.taps.empty() ? attend(l, made, at) : b.step.empty() ? convolve(b, made, at) : correct(b, made, at);
            for (size_t d = 0; gates.size() && d < mixed.size(); d++)
                mixed[d] = static_cast<float>(mixed[d] / (1.0 + std::exp(-gates[d * gates.size() / mixed.size()])));
            const std::vector<double> attended = b.out.of(mixed);
            for (int64_t d = 0; d < HIDDEN; d++) x[d] += attended[d] * m.model.attention_added;
            if (!b.skip.empty()) {
                const std::vector<double> added = b.space_out.of(advance(b, b.into.of(times(first, b.mamba.read)), at));
                for (int64_t d = 0; d < HIDDEN; d++) x[d] += added[d] * b.mamba.added;
            }
            if (!m.layers[l].down && !m.layers[l].mixture) continue;
            const std::vector<double> moved = mixture(m, b, normed(x, b.mlp_norm, 0.0f));
            for (int64_t d = 0; d < HIDDEN; d++) x[d] += moved[d] * m.model.mlp_added;
            if (m.shape.inputs) own_input(l, tokens[position], own, x);
        }
        for (double logit : m.head.of(normed(x, m.norm, 0.0f))) logits.push_back(logit);
    }
    return logits;
}

}  // namespace kernels_test
