// Attention in a layer: queries, keys and values, who computes what of their scores, and gates.
#include "products.h"

namespace specpress {

void units_of(const Heads& h, const Path& path, const Batch& batch, std::vector<AttentionUnit>& units) {
    const int64_t per_head = h.heads / h.kv_heads, limit = path.tile_rows();
    units.clear();
    for (int64_t row = 0; row < batch.rows;) {
        // Rows of a chain, or of one tree: what came before it is all that its rows have in common.
        const bool tree = batch.tail_at[row] >= 0;
        auto alike = [&](int64_t other) {
            return batch.request[other] == batch.request[row] && (batch.tail_at[other] >= 0) == tree &&
                   (!tree || batch.tail_from[other] == batch.tail_from[row]);
        };
        int64_t rows = 1;
        while (row + rows < batch.rows && (rows + 1) * per_head <= limit && alike(row + rows)) rows++;
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

// Queries or keys of a row: each head by its own weights, or all heads as one.
void Decoder::norm_heads(const float* weight, float* x, int64_t heads, int64_t head_dim, float* scratch) {
    const int64_t dim = model_.norm_of_heads ? heads * head_dim : head_dim;
    for (int64_t at = 0; at < heads * head_dim; at += dim) {
        if (model_.layer_norm)
            path_.layer_norm(x + at, weight + at, nullptr, dim, model_.norm_eps, x + at, scratch);
        else
            path_.norm(x + at, weight + at, dim, model_.norm_eps, 0.0f, x + at, scratch);
    }
}

// Queries into the basis of their keys, or mixed values back from theirs; [heads][size] in place.
void Decoder::turn_heads(const Heads& h, const float* basis, int64_t layer, float* x, int64_t size) {
    float turned[1024];  // sound.cpp, widest_head
    for (int64_t head = 0; head < h.heads; head++, x += size) {
        const int64_t of = layer * h.kv_heads + head / (h.heads / h.kv_heads);
        path_.turn(x, basis + (of * 3 + 2) * size * size, size, turned);
        std::memcpy(x, turned, static_cast<size_t>(size) * 4);
    }
}

// Keys and values of qkv_ into the cache. Slots of a block share its lines, and of codes even bytes: one thread writes them.
void Decoder::remember(const Layer& layer, const Batch& batch) {
    if (layer.shares) return;
    const Heads& h = model_.heads[layer.group];
    const int64_t rows = batch.rows, stride = row_of_heads(h), work = rows * stride;
    const int64_t parts = h.kv_heads >= 4 * pool_.threads() ? 1 : 8, count = h.kv_heads * parts;
    pool_.run(count, work < 8192 ? count : 1, [&](int, int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at++)
            for (int64_t row = 0; row < rows; row++) {
                if (batch.slot[row] / KEYS % parts != at % parts) continue;
                const float* k = qkv_.data() + row * stride + h.heads * h.dim;
                path_.remember(h, layer.keys, batch.stores[batch.request[row]], batch.slot[row], k, k + h.kv_heads * h.dim, at / parts, at / parts + 1);
            }
    });
}

void Decoder::attend(const Layer& layer, const Batch& all, const Angles& angles) {
    const Heads& h = model_.heads[layer.group];
    Batch batch = all;
    batch.stores += layer.group * all.requests;
    const int64_t rows = batch.rows, half = h.rotated / 2, stride = row_of_heads(h), kv_heads = layer.shares ? 0 : h.kv_heads;
    rows_of(rows, stride, [&](int thread, int64_t row) {
        float* q = qkv_.data() + row * stride;
        float *k = q + h.heads * h.dim, *v = k + h.kv_heads * h.dim;
        auto norm = [&] {
            if (!layer.query_norm) return;
            norm_heads(layer.query_norm, q, h.heads, h.dim, scratch(thread));
            norm_heads(layer.key_norm, k, kv_heads, h.dim, scratch(thread));
        };
        if (layer.keys_as_values) std::memcpy(v, k, static_cast<size_t>(kv_heads * h.dim) * 4);
        if (layer.value_norm) norm_heads(layer.value_norm, v, kv_heads, h.dim, scratch(thread));
        if (!model_.norm_rotated) norm();
        if (layer.rotary >= 0) {
            const int64_t at = batch.position[row] * half;
            path_.rotate(q, h.heads + kv_heads, h.dim, half, angles.cos[layer.rotary] + at, angles.sin[layer.rotary] + at);
        }
        if (model_.norm_rotated) norm();
        if (angles.growth && layer.grows)
            for (int64_t i = 0; i < h.heads * h.dim; i++) q[i] = q[i] * angles.growth[batch.position[row]];
        if (h.key_basis) turn_heads(h, h.key_basis, layer.keys, q, h.dim);
    });
    remember(layer, batch);
    const AttentionCall call = {h, layer.keys, layer.window, model_.attention_scaling, &batch, qkv_.data(), stride, mixed_.data(), model_.softcap, layer.sinks, model_.chunked};
    attend_all(path_, pool_, call, units_[layer.group], text_, [&](int thread) { return scratch(thread); });
    if (!h.value_basis) return;
    const int64_t values = values_of(h);
    rows_of(rows, h.heads * values, [&](int, int64_t row) {
        turn_heads(h, h.value_basis, layer.keys, mixed_.data() + row * h.heads * values, values);
    });
}

// Products of one layer for each head, each with its own part of the rows.
void Decoder::by_head(const Weights* const* heads, int64_t rows, const float* x, int64_t x_row, int64_t x_head, float* y, int64_t y_row,
                      int64_t y_head) {
    const int64_t stride = (heads[0]->group + 15) / 16 * 16 + 16, room = rows * stride;
    grow(of_head_, room * pool_.threads());
    pool_.run(model_.heads->heads, 1, [&](int thread, int64_t begin, int64_t end) {
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
    const Heads& h = model_.heads[layer.group];
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
    prepare(one, rows, [&](int thread, int64_t row) { return scaled(normed(layer.input_norm, thread, row), model_.attention_read, thread); });
    multiply(one, rows, values_.data(), wide, false);
    rows_of(rows, wide, [&](int, int64_t row) { path_.sigmoid(values_.data() + row * wide, wide); });
}

}  // namespace specpress
