// A forward: embedding, layers, and the logits of the rows that are asked for.
#include "products.h"
#include "states.h"

namespace specpress {

namespace {

int64_t power_of_two(int64_t size) {
    int64_t width = 1;
    while (width < size) width *= 2;
    return width;
}

float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    uint32_t raw;
    if (exponent == 31) {
        raw = sign | 0x7f800000u | fraction << 13;
    } else if (exponent) {
        raw = sign | (exponent + 112) << 23 | fraction << 13;
    } else {
        const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
        std::memcpy(&raw, &magnitude, 4);
        raw |= sign;
    }
    float out;
    std::memcpy(&out, &raw, 4);
    return out;
}

}  // namespace

void unpack_floats(const void* table, int64_t type, int64_t first, int64_t count, float* out) {
    if (type == SCALE_F32) {
        std::memcpy(out, static_cast<const float*>(table) + first, static_cast<size_t>(count) * 4);
        return;
    }
    const uint16_t* from = static_cast<const uint16_t*>(table) + first;
    for (int64_t i = 0; i < count; i++) {
        if (type == SCALE_F16) {
            out[i] = half_to_float(from[i]);
        } else {
            const uint32_t raw = static_cast<uint32_t>(from[i]) << 16;
            std::memcpy(out + i, &raw, 4);
        }
    }
}

void unpack_row(const Weights& w, int64_t n, float* out);

Decoder::Decoder(const Model& model, const Path& path, Pool& pool) : model_(model), path_(path), pool_(pool) {
    // Per thread: a row twice over (a norm's result, and its order changed) and a norm's halving, or attention's blocks.
    auto widen = [&](const Projection& p) {
        for (int64_t i = 0; i < p.parts; i++) widest_ = std::max(widest_, p.weights[i]->inputs);
    };
    auto widen_one = [&](const Weights* w) {
        if (w) widest_ = std::max(widest_, w->inputs);
    };
    for (int64_t i = 0; i < model.layers; i++) {
        const Layer& layer = model.layer[i];
        widen(layer.qkv), widen_one(layer.out), widen(layer.gate_up), widen_one(layer.down);
        if (layer.delta) widest_ = std::max(widest_, layer.delta->key_dim);
        if (layer.mamba) widen_one(layer.mamba->into), widen_one(layer.mamba->out);
        if (layer.latent) widen_one(layer.latent->query), widest_ = std::max(widest_, model.heads->dim);
        if (layer.own) widen_one(layer.own->gate), widen_one(layer.own->out);
        if (!layer.mixture) continue;
        const Mixture& m = *layer.mixture;
        for (int64_t e = 0; e < m.routing.experts; e++) widen(m.gate_up[e]), widen_one(m.down[e]);
        widen(m.shared_gate_up), widen_one(m.shared_down);
        if (m.beside) widen(m.beside->gate_up), widen_one(m.beside->down);
    }
    widen_one(model.head);
    widest_ = std::max(widest_, model.hidden);
    int64_t attention = 0;
    for (int64_t g = 0; g < model.groups; g++) {
        const Heads& h = model.heads[g];
        widest_ = std::max(widest_, model.norm_of_heads ? h.heads * h.dim : h.dim);
        if (h.heads) attention = std::max(attention, path.attention_scratch(h));
    }
    scratch_size_ = 2 * widest_ + power_of_two(widest_) + 64;
    if (attention) scratch_size_ = std::max(scratch_size_, attention + 64);
    units_.resize(static_cast<size_t>(model.groups));
    scratch_.resize(static_cast<size_t>(scratch_size_ * pool.threads()));
}

void Decoder::embed(const Batch& batch) {
    const int64_t hidden = model_.hidden;
    rows_of(batch.rows, hidden, [&](int, int64_t row) {
        float* out = x_.data() + row * hidden;
        const int64_t token = batch.tokens[row];
        if (!model_.embedding) {
            unpack_row(*model_.head, token, out);
        } else {
            unpack_floats(model_.embedding, model_.embedding_type, token * hidden, hidden, out);
        }
        if (model_.embedding_scale != 1.0f)
            for (int64_t i = 0; i < hidden; i++) out[i] = out[i] * model_.embedding_scale;
        if (model_.positions) {
            const float* here = model_.positions + batch.position[row] * hidden;
            for (int64_t i = 0; i < hidden; i++) out[i] = out[i] + here[i];
        }
    });
}

// Every layer's own input, from the embedding in x_: inputs_ is [rows][layers][size].
void Decoder::make_inputs(const Batch& batch) {
    const LayerInputs& in = *model_.inputs;
    const int64_t size = in.size, whole = model_.layers * size, hidden = model_.hidden;
    const Projection one = {1, &in.projection};
    grow(inputs_, batch.rows * whole);
    prepare(one, batch.rows, [&](int, int64_t row) { return static_cast<const float*>(x_.data() + row * hidden); });
    multiply(one, batch.rows, inputs_.data(), whole, false);
    rows_of(batch.rows, whole, [&](int thread, int64_t row) {
        float *own = scratch(thread), *rest = own + widest_;
        for (int64_t layer = 0; layer < model_.layers; layer++) {
            float* made = inputs_.data() + row * whole + layer * size;
            unpack_floats(in.table, in.table_type, batch.tokens[row] * whole + layer * size, size, own);
            for (int64_t i = 0; i < size; i++) made[i] = made[i] * in.made_scale;
            normalize(in.norm, made, size, made, rest);
            for (int64_t i = 0; i < size; i++) made[i] = (made[i] + own[i] * in.row_scale) * in.scale;
        }
    });
}

// Adds what a layer makes of the residual stream and its own input.
void Decoder::add_input(const Layer& layer, int64_t number, int64_t rows) {
    const LayerGate& own = *layer.own;
    const int64_t size = model_.inputs->size, whole = model_.layers * size, hidden = model_.hidden;
    const Projection gate = {1, &own.gate}, out = {1, &own.out};
    grow(gate_up_, rows * size);
    prepare(gate, rows, [&](int, int64_t row) { return static_cast<const float*>(x_.data() + row * hidden); });
    multiply(gate, rows, gate_up_.data(), size, false);
    prepare(out, rows, [&](int thread, int64_t row) {
        float* to = scratch(thread) + widest_;
        path_.gated(gate_up_.data() + row * size, inputs_.data() + row * whole + number * size, size, model_.activation, nullptr, to);
        return static_cast<const float*>(to);
    });
    branch(own.out, own.norm, model_.own_added, rows);
}

void Decoder::normalize(const Norm& norm, const float* x, int64_t size, float* out, float* scratch) {
    if (model_.layer_norm)
        path_.layer_norm(x, norm.weight, norm.bias, size, model_.norm_eps, out, scratch);
    else
        path_.norm(x, norm.weight, size, model_.norm_eps, 0.0f, out, scratch);
}

// A row of the residual stream as what follows reads it: normed in the thread's scratch, or as it is.
const float* Decoder::normed(const Norm& norm, int thread, int64_t row) {
    const float* x = x_.data() + row * model_.hidden;
    if (!norm.weight) return x;
    float* out = scratch(thread) + widest_;
    normalize(norm, x, model_.hidden, out, out + widest_);
    return out;
}

// A row that was normed, times a multiplier, which may lie where `normed` puts it.
const float* Decoder::scaled(const float* x, float scale, int thread) {
    if (scale == 1.0f) return x;
    float* out = scratch(thread) + widest_;
    for (int64_t i = 0; i < model_.hidden; i++) out[i] = x[i] * scale;
    return out;
}

// Adds what a branch of a block has made to the residual stream: through its norm, and times its multiplier.
void Decoder::add_branch(const float* y, const Norm& after, float scale, int64_t rows) {
    const int64_t hidden = model_.hidden;
    rows_of(rows, hidden, [&](int thread, int64_t row) {
        const float* from = y + row * hidden;
        float *to = x_.data() + row * hidden, *out = scratch(thread) + widest_;
        if (after.weight) normalize(after, from, hidden, out, out + widest_), from = out;
        if (scale != 1.0f)
            for (int64_t i = 0; i < hidden; i++) to[i] = to[i] + from[i] * scale;
        else
            for (int64_t i = 0; i < hidden; i++) to[i] = to[i] + from[i];
    });
}

// The products of the prepared rows, added to the residual stream.
void Decoder::branch(const Weights* out, const Norm& after, float scale, int64_t rows) {
    const Projection one = {1, &out};
    if (!after.weight && scale == 1.0f) return multiply(one, rows, x_.data(), model_.hidden, true);
    multiply(one, rows, branch_.data(), model_.hidden, false);
    add_branch(branch_.data(), after, scale, rows);
}

// The layer behind what stands in attention's place, of mixed_, whose gates are in values_.
void Decoder::add_mixed(const Layer& layer, int64_t rows) {
    const Heads& h = model_.heads[layer.group];
    const Projection out = {1, &layer.out};
    const int64_t wide = layer.out->inputs;
    const float* mixed = mixed_.data();
    if (layer.latent) {
        const int64_t value = layer.latent->values[0]->outputs;
        grow(values_, rows * wide);
        by_head(layer.latent->values, rows, mixed, h.heads * h.value_dim, h.value_dim, values_.data(), wide, value);
        mixed = values_.data();
    }
    prepare(out, rows, [&](int thread, int64_t row) {
        const float* from = mixed + row * wide;
        if (!layer.gate) return from;
        // One for each dimension, or for each head.
        const int64_t gates = layer.gate->outputs, each = wide / gates;
        const float* gate = values_.data() + row * gates;
        float* to = scratch(thread) + widest_;
        if (each == 1)
            for (int64_t d = 0; d < wide; d++) to[d] = from[d] * gate[d];
        else
            for (int64_t g = 0; g < gates; g++)
                for (int64_t d = g * each; d < (g + 1) * each; d++) to[d] = from[d] * gate[g];
        return static_cast<const float*>(to);
    });
    branch(layer.out, layer.attention_norm, model_.attention_added, rows);
}

void Decoder::forward(const Batch& batch, const Angles& angles, const int64_t* at, int64_t count, float* hidden_out, float* logits,
                      const Taken* taken, int64_t* best) {
    std::lock_guard<std::mutex> lock(one_);
    run(batch, angles, taken);
    if (!logits) grow(logits_, count * model_.vocabulary), logits = logits_.data();
    read_out(at, count, hidden_out, logits);
    if (best) choose(logits, count, best);
}

// Of each row of logits the first of the largest; -1 where they are no numbers.
void Decoder::choose(const float* logits, int64_t count, int64_t* best) {
    const int64_t vocabulary = model_.vocabulary;
    rows_of(count, vocabulary, [&](int, int64_t i) { best[i] = path_.largest(logits + i * vocabulary, vocabulary, vocabulary); });
}

// Copies the rows of x_ behind so many layers, where they are asked for.
void Decoder::take(const Taken* taken, int64_t behind, int64_t rows) {
    const int64_t hidden = model_.hidden;
    for (int64_t tap = 0; taken && tap < taken->count; tap++)
        if (taken->taps[tap] == behind)
            for (int64_t row = 0; row < rows; row++)
                std::memcpy(taken->out + (row * taken->count + tap) * hidden, x_.data() + row * hidden, static_cast<size_t>(hidden) * 4);
}

// All layers: stores keys and values, and leaves the rows in x_.
void Decoder::run(const Batch& batch, const Angles& angles, const Taken* taken) {
    const int64_t rows = batch.rows, hidden = model_.hidden;
    int64_t state = 0;  // what a state takes in the layers so far
    grow(x_, rows * hidden);
    for (int64_t g = 0; g < model_.groups; g++) {
        const Heads& h = model_.heads[g];
        if (!h.heads) continue;
        grow(qkv_, rows * row_of_heads(h));
        grow(mixed_, rows * h.heads * values_of(h));
        units_of(h, path_, batch, units_[static_cast<size_t>(g)]);
    }
    bool has_mixture = false, has_branch = model_.attention_added != 1.0f || model_.mlp_added != 1.0f || model_.own_added != 1.0f;
    for (int64_t i = 0; i < model_.layers; i++) {
        const Layer& layer = model_.layer[i];
        has_mixture |= layer.mixture != nullptr;
        has_branch |= layer.attention_norm.weight || layer.output_norm.weight || (layer.mamba && layer.mamba->added != 1.0f);
        has_branch |= layer.own && layer.own->norm.weight;
    }
    if (has_mixture) grow(sum_, rows * hidden);
    if (has_mixture || model_.parallel) grow(normed_, rows * hidden);
    if (has_branch) grow(branch_, rows * hidden);
    embed(batch);
    if (model_.inputs) make_inputs(batch);
    take(taken, 0, rows);
    for (int64_t i = 0; i < model_.layers; i++) {
        const Layer& layer = model_.layer[i];
        const bool attends = layer.out && !layer.convolution && !layer.delta;
        // Whatever stands side by side reads its rows before any of it is added to them.
        if (layer.mamba) read_mamba(layer, rows);
        if (layer.out)
            prepare(layer.qkv, rows, [&](int thread, int64_t row) {
                return scaled(normed(layer.input_norm, thread, row), attends ? model_.attention_read : 1.0f, thread);
            });
        if (attends) make_queries(layer, rows);
        if (attends && layer.gate) gate(layer, rows);
        if (model_.parallel)
            rows_of(rows, hidden, [&](int thread, int64_t row) {
                std::memcpy(normed_.data() + row * hidden, normed(layer.mlp_norm, thread, row), static_cast<size_t>(hidden) * 4);
            });
        if (layer.mamba) mamba(layer, state, batch);
        if (layer.convolution)
            convolve(layer, state, batch);
        else if (layer.delta)
            delta(layer, state, batch);
        else if (attends)
            attend(layer, batch, angles);
        if (layer.out) add_mixed(layer, rows);
        state += state_shape(layer, hidden).size(state_kind(batch));
        if (layer.mixture)
            mix(layer, rows);
        else if (layer.down)
            mlp(layer, rows);
        if (layer.own) add_input(layer, i, rows);
        if (layer.scale != 1.0f)
            rows_of(rows, hidden, [&](int, int64_t row) {
                for (float* x = x_.data() + row * hidden; x < x_.data() + (row + 1) * hidden; x++) *x = *x * layer.scale;
            });
        take(taken, i + 1, rows);
    }
}

// The last norm and the head, of some rows of x_.
void Decoder::read_out(const int64_t* at, int64_t count, float* hidden_out, float* logits) {
    if (!count) return;
    const int64_t hidden = model_.hidden;
    rows_of(count, hidden, [&](int thread, int64_t i) {
        normalize(model_.norm, x_.data() + at[i] * hidden, hidden, hidden_out + i * hidden, scratch(thread));
    });
    const Projection head = {1, &model_.head};
    prepare(head, count, [&](int, int64_t i) { return static_cast<const float*>(hidden_out + i * hidden); });
    multiply(head, count, logits, model_.vocabulary, false);
    if (model_.logits_scale == 1.0f && model_.final_softcap == 0.0f) return;
    rows_of(count, model_.vocabulary, [&](int, int64_t i) {
        float* row = logits + i * model_.vocabulary;
        if (model_.logits_scale != 1.0f)
            for (int64_t n = 0; n < model_.vocabulary; n++) row[n] = row[n] * model_.logits_scale;
        if (model_.final_softcap != 0.0f) path_.capped(row, model_.vocabulary, model_.final_softcap);
    });
}

}  // namespace specpress
