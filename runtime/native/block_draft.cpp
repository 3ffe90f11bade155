// The network of the drafter `block`: what texts have not read, and the rows of all places.
#include "block_draft.h"

#include <cmath>

#include "products.h"

namespace specpress {

// Adds keys and values of fresh tokens, [fresh][2][kv_heads * dim], to a layer's; those that nobody sees any more go.
void BlockDraft::append(BlockText& text, int64_t layer, const float* found) {
    const int64_t size = net_.kv_heads * net_.dim;
    const int64_t kept = text.held + text.fresh <= text.capacity ? text.held : std::min(text.held, net_.window - text.fresh);
    float *keys = text.keys_values + layer * 2 * text.capacity * size, *values = keys + text.capacity * size;
    const int64_t gone = text.held - kept;
    for (int64_t d = 0; d < size; d++) {
        float* of = keys + d * text.capacity;
        if (gone) std::memmove(of, of + gone, static_cast<size_t>(kept) * 4);
        for (int64_t i = 0; i < text.fresh; i++) of[kept + i] = found[i * 2 * size + d];
    }
    if (gone) std::memmove(values, values + gone * size, static_cast<size_t>(kept * size) * 4);
    for (int64_t i = 0; i < text.fresh; i++)
        std::memcpy(values + (kept + i) * size, found + (i * 2 + 1) * size, static_cast<size_t>(size) * 4);
    if (layer + 1 == net_.layers) text.held = kept + text.fresh;
}

// Fuses the states that came since the last draft, all texts' at once.
void BlockDraft::read(BlockText* texts, int64_t requests) {
    const int64_t hidden = net_.hidden, wide = net_.taps * hidden, size = net_.kv_heads * net_.dim, half = net_.dim / 2;
    int64_t fresh = 0;
    for (int64_t r = 0; r < requests; r++) fresh += texts[r].fresh;
    if (!fresh) return;
    specpress::grow(tapped_, fresh * wide), specpress::grow(fused_, fresh * hidden), specpress::grow(own_, fresh * 2 * size);
    int64_t row = 0;
    for (int64_t r = 0; r < requests; r++)
        for (int64_t i = 0; i < texts[r].fresh; i++, row++)
            for (int64_t tap = 0; tap < net_.taps; tap++)
                norm(texts[r].unread + i * wide + tap * hidden, net_.tap_norms + tap * hidden, tapped_.data() + row * wide + tap * hidden);
    product(net_.fuse, tapped_.data(), fresh, fused_.data());
    for (int64_t i = 0; i < fresh; i++) norm(fused_.data() + i * hidden, net_.fuse_norm, fused_.data() + i * hidden);
    for (int64_t layer = 0; layer < net_.layers; layer++) {
        product(net_.layer[layer].keys_values, fused_.data(), fresh, own_.data());
        row = 0;
        for (int64_t r = 0; r < requests; r++) {
            float* first = own_.data() + row * 2 * size;
            for (int64_t i = 0; i < texts[r].fresh; i++, row++) {
                const int64_t place = texts[r].at[i];
                path_.rotate(own_.data() + row * 2 * size, net_.kv_heads, net_.dim, half, cos_ + place * half, sin_ + place * half);
            }
            if (texts[r].fresh) append(texts[r], layer, first);
        }
    }
    row = 0;
    for (int64_t r = 0; r < requests; r++) {
        row += texts[r].fresh;
        if (texts[r].fresh) std::memcpy(texts[r].last, fused_.data() + (row - 1) * hidden, static_cast<size_t>(hidden) * 4);
    }
}

void BlockDraft::run_layer(const BlockLayer& layer, int64_t number, const BlockText* texts, int64_t requests, int64_t length) {
    const int64_t rows = requests * length, hidden = net_.hidden, size = net_.kv_heads * net_.dim, heads = net_.heads * net_.dim;
    const int64_t half = net_.dim / 2, room = weights_of_row(), own_room = (length + LINE - 1) / LINE * LINE;
    for (int64_t i = 0; i < rows; i++) norm(x_.data() + i * hidden, layer.attention_norm, normed_.data() + i * hidden);
    product(layer.query, normed_.data(), rows, queries_.data());
    product(layer.keys_values, normed_.data(), rows, own_.data());
    for (int64_t i = 0; i < rows; i++) {
        const int64_t place = texts[i / length].end + i % length;
        path_.rotate(queries_.data() + i * heads, net_.heads, net_.dim, half, cos_ + place * half, sin_ + place * half);
        path_.rotate(own_.data() + i * 2 * size, net_.kv_heads, net_.dim, half, cos_ + place * half, sin_ + place * half);
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < size; d++) own_keys_[(i / length * size + d) * own_room + i % length] = own_[i * 2 * size + d];
    const float scale = 1.0f / std::sqrt(static_cast<float>(net_.dim));
    pool_.run(rows * net_.heads, net_.heads, [&](int thread, int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t row = unit / net_.heads, head = unit % net_.heads, shared = head / (net_.heads / net_.kv_heads) * net_.dim;
            const BlockText& text = texts[row / length];
            const int64_t seen = std::min(text.held, net_.window);
            const float* keys = text.keys_values + number * 2 * text.capacity * size;
            const float* own = own_.data() + row / length * length * 2 * size + size;
            path_.look({queries_.data() + row * heads + head * net_.dim,
                        {keys + shared * text.capacity + text.held - seen, keys + (text.capacity + text.held - seen) * size + shared, seen, text.capacity, size},
                        {own_keys_.data() + (row / length * size + shared) * own_room, own + shared, length, own_room, 2 * size},
                        net_.dim, scale, weights_.data() + thread * room, mixed_.data() + row * heads + head * net_.dim});
        }
    });
    product(layer.output, mixed_.data(), rows, branch_.data());
    for (int64_t i = 0; i < rows * hidden; i++) x_[i] += branch_[i];
    for (int64_t i = 0; i < rows; i++) norm(x_.data() + i * hidden, layer.mlp_norm, normed_.data() + i * hidden);
    product(layer.gate_up, normed_.data(), rows, gate_up_.data());
    const int64_t wide = net_.intermediate;
    for (int64_t i = 0; i < rows; i++)
        path_.gated(gate_up_.data() + i * 2 * wide, gate_up_.data() + i * 2 * wide + wide, wide, SILU, nullptr, gated_.data() + i * wide);
    product(layer.down, gated_.data(), rows, branch_.data());
    for (int64_t i = 0; i < rows * hidden; i++) x_[i] += branch_[i];
}

bool BlockDraft::draft(const float* cos, const float* sin, BlockText* texts, int64_t requests, int64_t length, const BlockGrowth& growth,
                       const BlockPlaces& places, const BlockTrees& trees) {
    std::lock_guard<std::mutex> lock(one_);
    const int64_t rows = requests * length, hidden = net_.hidden, heads = net_.heads * net_.dim;
    cos_ = cos, sin_ = sin;
    int64_t power = 1;
    while (power < hidden) power *= 2;
    specpress::grow(scratch_, power + 64);
    read(texts, requests);
    specpress::grow(read_, requests * 2 * hidden), specpress::grow(x_, rows * hidden), specpress::grow(normed_, rows * hidden), specpress::grow(branch_, rows * hidden);
    specpress::grow(queries_, rows * heads), specpress::grow(mixed_, rows * heads), specpress::grow(own_, rows * 2 * net_.kv_heads * net_.dim);
    specpress::grow(gate_up_, rows * 2 * net_.intermediate), specpress::grow(gated_, rows * net_.intermediate);
    specpress::grow(own_keys_, requests * net_.kv_heads * net_.dim * ((length + LINE - 1) / LINE * LINE));
    specpress::grow(weights_, pool_.threads() * weights_of_row());
    for (int64_t r = 0; r < requests; r++) {
        float* to = read_.data() + r * 2 * hidden;
        unpack_floats(net_.embedding, net_.embedding_type, texts[r].token * hidden, hidden, to);
        norm(to, ones_.data(), to);
        std::memcpy(to + hidden, texts[r].last, static_cast<size_t>(hidden) * 4);
    }
    product(net_.common, read_.data(), requests, branch_.data());
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < hidden; i++)
            x_[row * hidden + i] = branch_[row / length * hidden + i] + net_.places[row % length * hidden + i];
    for (int64_t layer = 0; layer < net_.layers; layer++) run_layer(net_.layer[layer], layer, texts, requests, length);
    for (int64_t i = 0; i < rows; i++) norm(x_.data() + i * hidden, net_.norm, places.rows + i * hidden);
    product(net_.of_row, places.rows, rows, places.of_row);
    product(net_.head, places.rows, rows, places.base);
    for (int64_t i = 0; i < rows; i++)
        if (path_.largest(places.base + i * net_.logits, net_.logits, net_.logits) < 0) return false;
    for (int64_t r = 0; r < requests; r++) {
        const int64_t first = r * length;
        const BlockPlaces own = {places.rows + first * hidden, places.of_row + first * 2 * net_.rank, places.base + first * net_.logits};
        trees.counts[r] = 0;
        if (texts[r].budget > 0) grow(texts[r], length, growth, own, trees, r);
    }
    return true;
}

}  // namespace specpress
