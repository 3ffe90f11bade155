#include "decoder.h"

#include <algorithm>
#include <cstring>

namespace specpress {

namespace {

bool is_float(const Weights& w) { return w.kind == F32 || w.kind == BF16; }

bool same_want(const Weights& a, const Weights& b) {
    return is_float(a) == is_float(b) && a.inputs == b.inputs && a.group == b.group && a.group_inputs == b.group_inputs &&
           a.perm == b.perm && a.input_scale == b.input_scale && (a.kind == INT8) == (b.kind == INT8);
}

// From how many rows on words are wanted: fewer are as fast as bytes.
constexpr int64_t WIDE_ROWS = 3;

int64_t blocks_of(const Weights& w) { return (w.outputs + BLOCK - 1) / BLOCK; }

int64_t bytes_per_block(const Weights& w) {
    const int64_t bits = w.kind == F32 ? 32 : w.kind == BF16 ? 16 : w.kind == INT8 || w.kind == NESTED ? 8 : w.kind == TERNARY ? 2 : w.kind == TRELLIS ? w.bits : 4;
    return w.groups * w.group * BLOCK * bits / 8;
}

int64_t power_of_two(int64_t size) {
    int64_t width = 1;
    while (width < size) width *= 2;
    return width;
}

template <class T>
void grow(std::vector<T>& v, int64_t size) {
    if (static_cast<int64_t>(v.size()) < size) v.resize(static_cast<size_t>(size));
}

int64_t outputs_of(const Projection& p) {
    int64_t n = 0;
    for (int64_t i = 0; i < p.parts; i++) n += p.weights[i]->outputs;
    return n;
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

void unpack_row(const Weights& w, int64_t n, float* out);

bool sound(const Model& model) {
    // Rows of this many floats, and a few of them multiplied, fit 64 bits.
    constexpr int64_t most = 1 << 26, widest_head = 1024, most_experts = 1024;
    const Heads& h = model.heads;
    auto size = [](int64_t value) { return 1 <= value && value <= most; };
    auto fits = [](const Weights* w, int64_t outputs, int64_t inputs) { return w && w->outputs == outputs && w->inputs == inputs; };
    auto joined = [](const Projection& p, int64_t outputs, int64_t inputs) {
        for (int64_t i = 0; i < p.parts; i++) {
            if (!p.weights[i] || p.weights[i]->inputs != inputs) return false;
            outputs -= p.weights[i]->outputs;
        }
        return outputs == 0;
    };
    // Gates and their factors, whose products are what `down` takes.
    auto mlp = [&](const Projection& gate_up, const Weights* down) {
        return down && size(down->inputs) && down->inputs <= model.intermediate && down->outputs == model.hidden &&
               joined(gate_up, (model.gated ? 2 : 1) * down->inputs, model.hidden);
    };
    auto latent = [&](const Latent& l, const Layer& layer) {
        if (l.rotated != h.rotated || !size(l.plain) || h.kv_heads != 1 || h.dim != l.rotated + h.value_dim || !l.norm) return false;
        const int64_t queries = h.heads * (l.rotated + l.plain), first = layer.qkv.parts == 2 ? layer.qkv.weights[0]->outputs : 0;
        if (l.query ? !l.query_norm || !fits(l.query, queries, first) : first != queries) return false;
        if (!joined(layer.qkv, first + h.dim, model.hidden)) return false;
        const int64_t value = l.values[0]->outputs;
        for (int64_t i = 0; i < h.heads; i++)
            if (!fits(l.keys[i], h.value_dim, l.plain) || !fits(l.values[i], value, h.value_dim) || !is_float(*l.keys[i]) || !is_float(*l.values[i]))
                return false;
        return fits(layer.out, model.hidden, h.heads * value);
    };
    const bool wants_parameters = model.activation == XIELU || model.activation == CLAMPED_SWIGLU;
    // Without layers it only projects (Decoder::project), by sizes that are the weights' own.
    if (!model.layers) return true;
    if (!size(h.heads) || !size(h.kv_heads) || h.heads % h.kv_heads || !size(h.dim) || h.dim > widest_head) return false;
    if (h.rotated < 0 || h.rotated > h.dim || h.rotated % 2 || !size(h.heads * h.dim) || h.value_dim < 0 || h.value_dim > h.dim) return false;
    if (model.layers < 0 || !size(model.hidden) || !size(model.intermediate) || !size(model.vocabulary)) return false;
    if (!fits(model.head, model.vocabulary, model.hidden) || !model.norm.weight) return false;
    if (model.activation < SILU || model.activation > CLAMPED_SWIGLU || (model.activation == CLAMPED_SWIGLU && !model.gated)) return false;
    for (int64_t i = 0; i < model.layers; i++) {
        const Layer& layer = model.layer[i];
        if (layer.rotary >= model.tables || !layer.query_norm != !layer.key_norm) return false;
        if (wants_parameters && !layer.parameters) return false;
        if (layer.window < 0) return false;
        if (layer.convolution) {
            const Convolution& c = *layer.convolution;
            if (c.count < 2 || !size(c.count * model.hidden) || !c.taps) return false;
            if (!fits(layer.out, model.hidden, model.hidden) || !joined(layer.qkv, 3 * model.hidden, model.hidden)) return false;
        } else if (layer.delta) {
            const Delta& d = *layer.delta;
            if (d.count < 2 || !size(d.key_heads) || !size(d.value_heads) || d.value_heads % d.key_heads || !size(d.key_dim) || !size(d.value_dim)) return false;
            const int64_t keys = d.key_heads * d.key_dim, values = d.value_heads * d.value_dim, channels = 2 * keys + values;
            if (!size(keys) || !size(values) || !size(d.count * channels) || !size(values * d.key_dim)) return false;
            if (!d.taps || !d.step || !d.rate || !d.query || !d.key || !d.norm) return false;
            if (!fits(layer.out, model.hidden, values) || !joined(layer.qkv, channels + values + 2 * d.value_heads, model.hidden)) return false;
        } else if (layer.latent) {
            if (layer.gate || !latent(*layer.latent, layer)) return false;
        } else if (h.value_dim || !fits(layer.out, model.hidden, h.heads * h.dim) || !joined(layer.qkv, row_of_heads(h), model.hidden)) {
            return false;
        }
        if (layer.gate && !fits(layer.gate, h.heads * h.dim, model.hidden)) return false;
        if (!layer.mixture) {
            if (!mlp(layer.gate_up, layer.down)) return false;
            continue;
        }
        const Mixture& m = *layer.mixture;
        const Routing& to = m.routing;
        if (to.chosen < 1 || to.chosen > to.experts || to.experts > most_experts || !fits(m.router, to.experts, model.hidden)) return false;
        if (to.groups < 1 || to.groups > to.experts || to.experts % to.groups || to.groups_chosen < 1 || to.groups_chosen > to.groups) return false;
        if (to.group_best < 1 || to.group_best > to.experts / to.groups || to.chosen > to.groups_chosen * (to.experts / to.groups)) return false;
        if (to.scoring < SOFTMAX || to.scoring > SPARSE_MIXER) return false;
        if (m.shared_down && !mlp(m.shared_gate_up, m.shared_down)) return false;
        if (m.shared_gate && !fits(m.shared_gate, 1, model.hidden)) return false;
        for (int64_t e = 0; e < to.experts; e++)
            if (!mlp(m.gate_up[e], m.down[e])) return false;
    }
    return true;
}

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
        if (layer.latent) widen_one(layer.latent->query), widest_ = std::max(widest_, model.heads.dim);
        if (!layer.mixture) continue;
        const Mixture& m = *layer.mixture;
        for (int64_t e = 0; e < m.routing.experts; e++) widen(m.gate_up[e]), widen_one(m.down[e]);
        widen(m.shared_gate_up), widen_one(m.shared_down);
    }
    widen_one(model.head);
    widest_ = std::max(widest_, std::max(model.hidden, model.norm_of_heads ? model.heads.heads * model.heads.dim : 0));
    scratch_size_ = 2 * widest_ + power_of_two(std::max(widest_, model.heads.dim)) + 64;
    if (model.layers) scratch_size_ = std::max(scratch_size_, path.attention_scratch(model.heads) + 64);
    scratch_.resize(static_cast<size_t>(scratch_size_ * pool.threads()));
}

// f(thread, row) for each row; alone where the work (in floats) is not worth waking the others.
template <class F>
void Decoder::rows_of(int64_t rows, int64_t work, F&& f) {
    const int64_t piece = rows * work < 16384 ? rows : std::max<int64_t>(1, std::min<int64_t>(rows / (4 * pool_.threads()), 16));
    pool_.run(rows, piece, [&](int thread, int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) f(thread, row);
    });
}

// Rounds rows to what the parts want. row_of(thread, row) gives a row's values and may use the thread's scratch, of which
// the first `widest_` floats are for the order of inputs.
template <class F>
void Decoder::prepare(const Projection& p, int64_t rows, F&& row_of) {
    int64_t wants = 0;
    grow(want_of_, p.parts);
    if (static_cast<int64_t>(wants_.size()) < p.parts) wants_.resize(static_cast<size_t>(p.parts));
    for (int64_t i = 0; i < p.parts; i++) {
        const Weights& w = *p.weights[i];
        int64_t found = 0;
        while (found < wants && !same_want(*wants_[found].of, w)) found++;
        want_of_[i] = found;
        if (found < wants) continue;
        Want& want = wants_[wants++];
        want.of = &w;
        // A stride that is no power of two: rows of a tile must not fall on the same lines of the cache.
        want.stride = (w.groups * w.group + 63) / 64 * 64 + 64;
        if (is_float(w)) {
            want.stride = (w.group + 15) / 16 * 16 + 16;
            grow(want.values, rows * want.stride);
        } else {
            grow(want.codes, rows * want.stride + LINE);
            grow(want.step, rows * w.groups);
            grow(want.sums, rows * w.groups);
            want.wide = rows >= WIDE_ROWS && path_.widen && (w.kind == INT8 || w.kind == NF4 || w.kind == NESTED || w.kind == TRELLIS);
            if (want.wide) {
                grow(want.words, rows * want.stride);
                grow(want.pairs, rows * w.groups);
            }
        }
    }
    rows_of(rows, p.weights[0]->inputs, [&](int thread, int64_t row) {
        const float* values = row_of(thread, row);
        for (int64_t i = 0; i < wants; i++) {
            Want& want = wants_[i];
            const Weights& w = *want.of;
            if (is_float(w)) {
                float* to = want.values.data() + row * want.stride;
                std::memcpy(to, values, static_cast<size_t>(w.inputs) * 4);
                for (int64_t k = w.inputs; k < w.group; k++) to[k] = 0.0f;
            } else {
                path_.quantize(w, values, want.first_code() + row * want.stride, want.step.data() + row * w.groups,
                               want.sums.data() + row * w.groups, scratch(thread));
                if (want.wide)
                    path_.widen(w, want.first_code() + row * want.stride, want.words.data() + row * want.stride,
                                want.pairs.data() + row * w.groups);
            }
        }
    });
}

// The products of the prepared rows, all parts in one go.
void Decoder::multiply(const Projection& p, int64_t rows, float* y, int64_t stride, bool add) {
    int64_t total = 0, widest = 1;
    for (int64_t i = 0; i < p.parts; i++) {
        total += blocks_of(*p.weights[i]);
        widest = std::max(widest, bytes_per_block(*p.weights[i]));
    }
    // A few pieces a thread, so that one slow core does not hold up the rest; with many rows few enough blocks that they
    // stay in a core's cache from one tile of rows to the next.
    int64_t piece = std::max<int64_t>(1, total / (8 * pool_.threads()));
    if (rows > path_.tile_rows()) piece = std::max<int64_t>(1, std::min<int64_t>(piece, (256 << 10) / widest));
    pool_.run(total, piece, [&](int, int64_t begin, int64_t end) {
        int64_t base = 0, column = 0;
        for (int64_t i = 0; i < p.parts; i++) {
            const Weights& w = *p.weights[i];
            const int64_t blocks = blocks_of(w), first = std::max<int64_t>(begin - base, 0), last = std::min(end - base, blocks);
            if (first < last) {
                Want& want = wants_[want_of_[i]];
                const Inputs in = {rows, want.stride, w.groups, want.values.data(), want.first_code(), want.step.data(), want.sums.data(),
                                   want.wide ? want.words.data() : nullptr, want.pairs.data()};
                path_.linear[w.kind](w, in, first, last, y + column, stride, add);
            }
            base += blocks, column += w.outputs;
        }
    });
}

void Decoder::project(const Projection& p, const float* x, int64_t rows, float* y) {
    std::lock_guard<std::mutex> lock(one_);
    const int64_t inputs = p.weights[0]->inputs;
    prepare(p, rows, [&](int, int64_t row) { return x + row * inputs; });
    multiply(p, rows, y, outputs_of(p), false);
}

void Decoder::embed(const Batch& batch) {
    const int64_t hidden = model_.hidden;
    rows_of(batch.rows, hidden, [&](int, int64_t row) {
        float* out = x_.data() + row * hidden;
        const int64_t token = batch.tokens[row];
        if (!model_.embedding) {
            unpack_row(*model_.head, token, out);
        } else if (model_.embedding_type == SCALE_F32) {
            std::memcpy(out, static_cast<const float*>(model_.embedding) + token * hidden, static_cast<size_t>(hidden) * 4);
        } else {
            const uint16_t* from = static_cast<const uint16_t*>(model_.embedding) + token * hidden;
            for (int64_t i = 0; i < hidden; i++) {
                if (model_.embedding_type == SCALE_F16) {
                    out[i] = half_to_float(from[i]);
                } else {
                    const uint32_t raw = static_cast<uint32_t>(from[i]) << 16;
                    std::memcpy(out + i, &raw, 4);
                }
            }
        }
        if (model_.embedding_scale != 1.0f)
            for (int64_t i = 0; i < hidden; i++) out[i] = out[i] * model_.embedding_scale;
        if (model_.positions) {
            const float* here = model_.positions + batch.position[row] * hidden;
            for (int64_t i = 0; i < hidden; i++) out[i] = out[i] + here[i];
        }
    });
}

void units_of(const Heads& h, const Path& path, const Batch& batch, std::vector<AttentionUnit>& units) {
    const int64_t per_head = h.heads / h.kv_heads, limit = path.tile_rows();
    units.clear();
    for (int64_t row = 0; row < batch.rows;) {
        int64_t rows = 1;
        while (batch.tail_at[row] < 0 && row + rows < batch.rows && (rows + 1) * per_head <= limit &&
               batch.request[row + rows] == batch.request[row] && batch.tail_at[row + rows] < 0)
            rows++;
        for (int64_t head = 0; head < h.kv_heads; head++)
            for (int64_t from = 0; from < per_head; from += limit)
                units.push_back({row, rows, head, head * per_head + from, head * per_head + std::min(per_head, from + limit)});
        row += rows;
    }
}

bool shares_text(const AttentionCall& call, const std::vector<AttentionUnit>& units, int threads, SharedText& text) {
    const int64_t count = static_cast<int64_t>(units.size());
    int64_t total = 0, longest = 0;
    text.first.clear();
    for (const AttentionUnit& unit : units) {
        const Reach all = reach(call, unit);
        const int64_t splits = all.last / SPLIT - all.first / SPLIT + 1;
        text.first.push_back(total);
        total += splits, longest = std::max(longest, splits);
    }
    text.first.push_back(total);
    // Of a few units the pool's shares show who would wait; more of them are taken over from each other.
    int64_t most = longest;
    if (count < 4 * threads)
        for (int i = 0; i < threads; i++) most = std::max(most, text.first[count * (i + 1) / threads] - text.first[count * i / threads]);
    if (longest < 2 || 10 * most * threads <= 11 * total) return false;
    text.pieces.clear();
    for (int64_t u = 0; u < count; u++) {
        const Reach all = reach(call, units[u]);
        for (int64_t split = all.first / SPLIT; split <= all.last / SPLIT; split++) text.pieces.push_back({u, split});
    }
    return true;
}

void Decoder::normalize(const Norm& norm, const float* x, float* out, float* scratch) {
    if (model_.layer_norm)
        path_.layer_norm(x, norm.weight, norm.bias, model_.hidden, model_.norm_eps, out, scratch);
    else
        path_.norm(x, norm.weight, model_.hidden, model_.norm_eps, 0.0f, out, scratch);
}

// A row of the residual stream as what follows reads it: normed in the thread's scratch, or as it is.
const float* Decoder::normed(const Norm& norm, int thread, int64_t row) {
    const float* x = x_.data() + row * model_.hidden;
    if (!norm.weight) return x;
    float* out = scratch(thread) + widest_;
    normalize(norm, x, out, out + widest_);
    return out;
}

// Queries or keys of a row: each head by its own weights, or all heads as one.
void Decoder::norm_heads(const float* weight, float* x, int64_t heads, float* scratch) {
    const int64_t dim = model_.norm_of_heads ? heads * model_.heads.dim : model_.heads.dim;
    for (int64_t at = 0; at < heads * model_.heads.dim; at += dim) {
        if (model_.layer_norm)
            path_.layer_norm(x + at, weight + at, nullptr, dim, model_.norm_eps, x + at, scratch);
        else
            path_.norm(x + at, weight + at, dim, model_.norm_eps, 0.0f, x + at, scratch);
    }
}

void Decoder::attend(const Layer& layer, int64_t number, const Batch& batch, const Angles& angles) {
    const Heads& h = model_.heads;
    const int64_t rows = batch.rows, half = h.rotated / 2, stride = row_of_heads(h);
    rows_of(rows, stride, [&](int thread, int64_t row) {
        float* q = qkv_.data() + row * stride;
        float *k = q + h.heads * h.dim, *v = k + h.kv_heads * h.dim;
        auto norm = [&] {
            if (!layer.query_norm) return;
            norm_heads(layer.query_norm, q, h.heads, scratch(thread));
            norm_heads(layer.key_norm, k, h.kv_heads, scratch(thread));
        };
        if (!model_.norm_rotated) norm();
        if (layer.rotary >= 0) {
            const int64_t at = batch.position[row] * half;
            path_.rotate(q, h.heads + h.kv_heads, h.dim, half, angles.cos[layer.rotary] + at, angles.sin[layer.rotary] + at);
        }
        if (model_.norm_rotated) norm();
        if (angles.growth && layer.grows)
            for (int64_t i = 0; i < h.heads * h.dim; i++) q[i] = q[i] * angles.growth[batch.position[row]];
        if (h.cache_kind != CACHE_INT4) path_.remember(h, number, batch.stores[batch.request[row]], batch.slot[row], k, v);
    });
    // Nibbles of slots 32 apart share a byte: one thread writes both.
    if (h.cache_kind == CACHE_INT4) {
        const int64_t apart = KEYS / 2;
        pool_.run(apart, rows < apart ? apart : 1, [&](int, int64_t begin, int64_t end) {
            for (int64_t row = 0; row < rows; row++) {
                const int64_t place = batch.slot[row] % apart;
                if (place < begin || place >= end) continue;
                const float* k = qkv_.data() + row * stride + h.heads * h.dim;
                path_.remember(h, number, batch.stores[batch.request[row]], batch.slot[row], k, k + h.kv_heads * h.dim);
            }
        });
    }
    const AttentionCall call = {h, number, layer.window, model_.attention_scaling, &batch, qkv_.data(), stride, mixed_.data(), model_.softcap, layer.sinks, model_.chunked};
    attend_all(path_, pool_, call, units_, text_, [&](int thread) { return scratch(thread); });
}

// Products of one layer for each head, each with its own part of the rows.
void Decoder::by_head(const Weights* const* heads, int64_t rows, const float* x, int64_t x_row, int64_t x_head, float* y, int64_t y_row,
                      int64_t y_head) {
    const int64_t stride = (heads[0]->group + 15) / 16 * 16 + 16, room = rows * stride;
    grow(of_head_, room * pool_.threads());
    pool_.run(model_.heads.heads, 1, [&](int thread, int64_t begin, int64_t end) {
        float* in = of_head_.data() + thread * room;
        for (int64_t h = begin; h < end; h++) {
            const Weights& w = *heads[h];
            for (int64_t row = 0; row < rows; row++) {
                std::memcpy(in + row * stride, x + row * x_row + h * x_head, static_cast<size_t>(w.inputs) * 4);
                for (int64_t k = w.inputs; k < w.group; k++) in[row * stride + k] = 0.0f;
            }
            const Inputs inputs = {rows, stride, 1, in, nullptr, nullptr, nullptr, nullptr, nullptr};
            path_.linear[w.kind](w, inputs, 0, blocks_of(w), y + h * y_head, y_row, false);
        }
    });
}

// Queries, keys and values of the prepared rows: what qkv makes of them, or in latent attention queries against a token's
// vector, that behind the key that rotates, and it alone.
void Decoder::make_queries(const Layer& layer, int64_t rows) {
    const Heads& h = model_.heads;
    if (!layer.latent) return multiply(layer.qkv, rows, qkv_.data(), row_of_heads(h), false);
    const Latent& l = *layer.latent;
    const int64_t first = layer.qkv.weights[0]->outputs, made = first + h.dim, each = l.rotated + l.plain, stride = row_of_heads(h);
    grow(latent_, rows * made);
    multiply(layer.qkv, rows, latent_.data(), made, false);
    const float* q = latent_.data();
    int64_t q_row = made;
    if (l.query) {
        const Projection query = {1, &l.query};
        prepare(query, rows, [&](int thread, int64_t row) {
            float* out = scratch(thread) + widest_;
            path_.norm(latent_.data() + row * made, l.query_norm, first, l.eps, 0.0f, out, out + widest_);
            return static_cast<const float*>(out);
        });
        grow(queries_, rows * h.heads * each);
        multiply(query, rows, queries_.data(), h.heads * each, false);
        q = queries_.data(), q_row = h.heads * each;
    }
    rows_of(rows, stride, [&](int thread, int64_t row) {
        const float* token = latent_.data() + row * made + first;
        float *to = qkv_.data() + row * stride, *key = to + h.heads * h.dim, *vector = key + h.dim;
        for (int64_t i = 0; i < h.heads; i++) std::memcpy(to + i * h.dim, q + row * q_row + i * each, static_cast<size_t>(l.rotated) * 4);
        std::memcpy(key, token, static_cast<size_t>(l.rotated) * 4);
        path_.norm(token + l.rotated, l.norm, h.value_dim, l.eps, 0.0f, vector, scratch(thread));
        std::memcpy(key + l.rotated, vector, static_cast<size_t>(h.value_dim) * 4);
    });
    by_head(l.keys, rows, q + l.rotated, q_row, each, qkv_.data() + l.rotated, stride, h.dim);
}

// Sigmoids of a layer's gates, into values_: rows are prepared again, for this layer.
void Decoder::gate(const Layer& layer, int64_t rows) {
    const Projection one = {1, &layer.gate};
    const int64_t wide = layer.gate->outputs;
    grow(values_, rows * wide);
    prepare(one, rows, [&](int thread, int64_t row) { return normed(layer.input_norm, thread, row); });
    multiply(one, rows, values_.data(), wide, false);
    rows_of(rows, wide, [&](int, int64_t row) { path_.sigmoid(values_.data() + row * wide, wide); });
}

// Adds what a branch of a block has made to the residual stream: through its norm, and times the residual's scale.
void Decoder::add_branch(const float* y, const Norm& after, int64_t rows) {
    const int64_t hidden = model_.hidden;
    const float scale = model_.residual_scale;
    rows_of(rows, hidden, [&](int thread, int64_t row) {
        const float* from = y + row * hidden;
        float *to = x_.data() + row * hidden, *out = scratch(thread) + widest_;
        if (after.weight) normalize(after, from, out, out + widest_), from = out;
        if (scale != 1.0f)
            for (int64_t i = 0; i < hidden; i++) to[i] = to[i] + from[i] * scale;
        else
            for (int64_t i = 0; i < hidden; i++) to[i] = to[i] + from[i];
    });
}

// The products of the prepared rows, added to the residual stream.
void Decoder::branch(const Weights* out, const Norm& after, int64_t rows) {
    const Projection one = {1, &out};
    if (!after.weight && model_.residual_scale == 1.0f) return multiply(one, rows, x_.data(), model_.hidden, true);
    multiply(one, rows, branch_.data(), model_.hidden, false);
    add_branch(branch_.data(), after, rows);
}

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

// Some experts a row; each row's are added in the order of their number, and then what all rows go through.
void Decoder::mix(const Layer& layer, int64_t rows) {
    const Mixture& m = *layer.mixture;
    const Routing& to = m.routing;
    const int64_t hidden = model_.hidden, experts = to.experts;
    auto row_of = [&](int, int64_t row) { return static_cast<const float*>(normed_.data() + row * hidden); };
    if (!model_.parallel)
        rows_of(rows, hidden, [&](int thread, int64_t row) {
            std::memcpy(normed_.data() + row * hidden, normed(layer.mlp_norm, thread, row), static_cast<size_t>(hidden) * 4);
        });
    const Projection router = {1, &m.router};
    prepare(router, rows, row_of);
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
    add_branch(sum_.data(), layer.output_norm, rows);
}

void Decoder::forward(const Batch& batch, const Angles& angles, const int64_t* at, int64_t count, float* hidden_out, float* logits) {
    std::lock_guard<std::mutex> lock(one_);
    run(batch, angles);
    read_out(at, count, hidden_out, logits);
}

// All layers: stores keys and values, and leaves the rows in x_.
void Decoder::run(const Batch& batch, const Angles& angles) {
    const Heads& h = model_.heads;
    const int64_t rows = batch.rows, hidden = model_.hidden;
    int64_t attending = 0, state = 0;  // layers of the cache so far, and floats of a state
    grow(x_, rows * hidden);
    grow(qkv_, rows * row_of_heads(h));
    grow(mixed_, rows * h.heads * values_of(h));
    grow(gate_up_, rows * 2 * model_.intermediate);
    bool has_mixture = false, has_branch = model_.residual_scale != 1.0f;
    for (int64_t i = 0; i < model_.layers; i++) {
        const Layer& layer = model_.layer[i];
        has_mixture |= layer.mixture != nullptr;
        has_branch |= layer.attention_norm.weight || layer.output_norm.weight;
    }
    if (has_mixture) grow(expert_, rows * hidden), grow(sum_, rows * hidden);
    if (has_mixture || model_.parallel) grow(normed_, rows * hidden);
    if (has_branch) grow(branch_, rows * hidden);
    embed(batch);
    units_of(h, path_, batch, units_);
    for (int64_t i = 0; i < model_.layers; i++) {
        const Layer& layer = model_.layer[i];
        prepare(layer.qkv, rows, [&](int thread, int64_t row) { return normed(layer.input_norm, thread, row); });
        const bool attends = !layer.convolution && !layer.delta;
        if (attends) make_queries(layer, rows);
        if (attends && layer.gate) gate(layer, rows);
        if (model_.parallel)
            rows_of(rows, hidden, [&](int thread, int64_t row) {
                std::memcpy(normed_.data() + row * hidden, normed(layer.mlp_norm, thread, row), static_cast<size_t>(hidden) * 4);
            });
        if (layer.convolution) {
            convolve(layer, state, batch);
            state += (layer.convolution->count - 1) * hidden;
        } else if (layer.delta) {
            const Delta& d = *layer.delta;
            delta(layer, state, batch);
            state += (d.count - 1) * (2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim) + d.value_heads * d.value_dim * d.key_dim;
        } else {
            attend(layer, attending++, batch, angles);
        }
        const Projection out = {1, &layer.out};
        const float* mixed = mixed_.data();
        if (layer.latent) {
            const int64_t value = layer.latent->values[0]->outputs;
            grow(values_, rows * layer.out->inputs);
            by_head(layer.latent->values, rows, mixed, h.heads * h.value_dim, h.value_dim, values_.data(), layer.out->inputs, value);
            mixed = values_.data();
        }
        prepare(out, rows, [&](int thread, int64_t row) {
            const int64_t wide = layer.out->inputs;
            const float* from = mixed + row * wide;
            if (!attends || !layer.gate) return from;
            const float* gates = values_.data() + row * wide;
            float* to = scratch(thread) + widest_;
            for (int64_t d = 0; d < wide; d++) to[d] = from[d] * gates[d];
            return static_cast<const float*>(to);
        });
        branch(layer.out, layer.attention_norm, rows);
        if (layer.mixture)
            mix(layer, rows);
        else
            mlp(layer, rows);
    }
}

// The last norm and the head, of some rows of x_.
void Decoder::read_out(const int64_t* at, int64_t count, float* hidden_out, float* logits) {
    if (!count) return;
    const int64_t hidden = model_.hidden;
    rows_of(count, hidden, [&](int thread, int64_t i) {
        normalize(model_.norm, x_.data() + at[i] * hidden, hidden_out + i * hidden, scratch(thread));
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
