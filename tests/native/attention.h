// What tests of attention share: caches and pages of them, conversations, and attending those.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "decoder.h"

namespace kernels_test {

using namespace specpress;

inline constexpr int64_t LAYERS = 2, LAYER = 1;

struct Shape {
    int64_t kind, heads, kv_heads, dim, window;
    bool factors;
};

inline std::string describe(const NamedPath& path, const Shape& s) {
    return path.name + " attention, cache " + std::to_string(s.kind) + ", " + std::to_string(s.heads) + "/" + std::to_string(s.kv_heads) +
           " heads of " + std::to_string(s.dim) + ", window " + std::to_string(s.window);
}

inline int64_t blocks_of(int64_t slots) { return (slots + KEYS - 1) / KEYS; }

// Memory as the kernels hold it; what was never written is not a number where it can be.
struct Memory {
    Memory(const Shape& s, int64_t blocks) {
        const int64_t heads = LAYERS * blocks * s.kv_heads, wide = (s.dim + 15) / 16 * 16;
        const int64_t bits = s.kind == CACHE_F32 ? 32 : s.kind == CACHE_INT8 ? 8 : s.kind == CACHE_INT4 ? 4 : 3;
        keys.resize(static_cast<size_t>(heads * s.dim * KEYS * bits / 8), 0xff);
        values.resize(static_cast<size_t>(heads * KEYS * wide * bits / 8), 0xff);
        if (s.kind != CACHE_F32) key_scale.resize(static_cast<size_t>(heads * KEYS), NAN), value_scale = key_scale;
        store = {keys.data(), values.data(), key_scale.data(), value_scale.data(), blocks, nullptr};
    }
    std::vector<uint8_t> keys, values;
    Floats key_scale, value_scale;
    Store store;
};

// One memory for requests of so many slots: the pages of each lie in any order between those of the others.
struct Pages {
    Pages(const Shape& s, const std::vector<int64_t>& slots, Random& random) : memory(s, total(slots)) {
        const std::vector<int32_t> order = random.order(total(slots));
        auto next = order.begin() + 1;  // one page stays unused
        for (int64_t count : slots) {
            tables.emplace_back(next, next + blocks_of(count));
            next += blocks_of(count);
        }
        for (const auto& table : tables) stores.push_back(memory.store), stores.back().table = table.data();
    }
    static int64_t total(const std::vector<int64_t>& slots) {
        int64_t blocks = 1;
        for (int64_t count : slots) blocks += blocks_of(count);
        return blocks;
    }
    Memory memory;
    std::vector<std::vector<int64_t>> tables;
    std::vector<Store> stores;
};

// A conversation: per request its tokens in slots, each with a logical position and the slots that it sees.
struct Scene {
    std::vector<std::pair<int64_t, int64_t>> past;  // requests and slots that are stored, but ask nothing
    std::vector<int64_t> request, position, slot, tail_from, tail_at, tail;
    std::vector<std::vector<int64_t>> seen;  // slots in the order of their positions

    // Tokens 0..count−1, of which the first `silent` ask nothing.
    void chain(int64_t of, int64_t count, int64_t silent = 0) {
        for (int64_t i = 0; i < silent; i++) past.emplace_back(of, i);
        for (int64_t i = silent; i < count; i++) {
            request.push_back(of), position.push_back(i), slot.push_back(i), tail_from.push_back(0), tail_at.push_back(-1);
            seen.emplace_back();
            for (int64_t j = 0; j <= i; j++) seen.back().push_back(j);
        }
    }
    // Nodes behind a chain of `start` tokens; parents by node, −1: the chain's end.
    void tree(int64_t of, int64_t start, const std::vector<int64_t>& parents) {
        std::vector<std::vector<int64_t>> ways;
        for (size_t node = 0; node < parents.size(); node++) {
            ways.push_back(parents[node] < 0 ? std::vector<int64_t>() : ways[parents[node]]);
            ways.back().push_back(start + static_cast<int64_t>(node));
            request.push_back(of), slot.push_back(start + static_cast<int64_t>(node));
            position.push_back(start + static_cast<int64_t>(ways.back().size()) - 1);
            tail_from.push_back(start), tail_at.push_back(static_cast<int64_t>(tail.size()));
            tail.insert(tail.end(), ways.back().begin(), ways.back().end());
            seen.emplace_back();
            for (int64_t j = 0; j < start; j++) seen.back().push_back(j);
            seen.back().insert(seen.back().end(), ways.back().begin(), ways.back().end());
        }
    }
    int64_t rows() const { return static_cast<int64_t>(request.size()); }
    int64_t slots(int64_t of) const {
        int64_t most = 0;
        for (const auto& [who, at] : past)
            if (who == of) most = std::max(most, at + 1);
        for (int64_t i = 0; i < rows(); i++)
            if (request[i] == of) most = std::max(most, slot[i] + 1);
        return most;
    }
    Batch batch(const Store* stores, int64_t first, int64_t count) const {
        return {count, nullptr, request.data() + first, position.data() + first, slot.data() + first,
                tail_from.data() + first, tail_at.data() + first, tail.data(), stores};
    }
};

inline int64_t shared_texts = 0;  // calls in which threads shared a text

struct Run {
    const NamedPath& path;
    const Shape& s;
    Heads heads;
    std::vector<Store> stores;
    float scaling;

    // Rows first..first + count, their queries `stride` floats apart.
    Floats attend(Pool& pool, const Scene& scene, const Floats& queries, int64_t first, int64_t count) const {
        const int64_t size = s.heads * s.dim, stride = size + 3;
        Floats spread(static_cast<size_t>(count ? (count - 1) * stride + size : 0), NAN), out(static_cast<size_t>(count * size), NAN);
        for (int64_t i = 0; i < count; i++) std::copy_n(queries.begin() + (first + i) * size, size, spread.begin() + i * stride);
        const Batch batch = scene.batch(stores.data(), first, count);
        std::vector<AttentionUnit> units;
        units_of(heads, *path.kernels, batch, units);
        std::vector<Floats> scratch;
        for (int i = 0; i < pool.threads(); i++) scratch.emplace_back(path.kernels->attention_scratch(heads), NAN);
        const AttentionCall call = {heads, LAYER, s.window, scaling, &batch, spread.data(), stride, out.data(), 0.0f, nullptr, 0};
        SharedText text;
        attend_all(*path.kernels, pool, call, units, text, [&](int thread) { return scratch[thread].data(); });
        if (!text.pieces.empty()) shared_texts++;
        return out;
    }
};

}  // namespace kernels_test
