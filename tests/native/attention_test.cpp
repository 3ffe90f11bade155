// remember and attend: every cache, head sizes and groups, chains across splits, windows, trees, several requests.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "attention.h"

namespace kernels_test {

namespace {

// A row of keys or values as a cache gives it back.
Floats rounded(const float* x, const float* factor, int64_t dim, int64_t kind) {
    Floats out(x, x + dim);
    if (kind == CACHE_F32) return out;
    const float limit = kind == CACHE_INT4 ? 7.0f : 127.0f;
    float most = 0.0f;
    for (int64_t d = 0; d < dim; d++) {
        if (factor) out[d] = out[d] / factor[d];
        most = std::max(most, std::fabs(out[d]));
    }
    const float scale = most / limit, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int64_t d = 0; d < dim; d++) {
        out[d] = std::clamp(std::nearbyint(out[d] * inverse), -limit, limit) * scale;
        if (factor) out[d] = out[d] * factor[d];
    }
    return out;
}

// One row by the textbook. Returns [heads][dim].
std::vector<double> softmax(const Shape& s, float scaling, const float* query, const std::vector<const Floats*>& keys,
                            const std::vector<const Floats*>& values) {
    std::vector<double> out(static_cast<size_t>(s.heads * s.dim));
    const size_t count = keys.size(), first = s.window && count > static_cast<size_t>(s.window) ? count - static_cast<size_t>(s.window) : 0;
    for (int64_t head = 0; head < s.heads; head++) {
        const int64_t from = head / (s.heads / s.kv_heads) * s.dim;
        std::vector<double> scores;
        double most = -INFINITY, total = 0.0;
        for (size_t j = first; j < count; j++) {
            double dot = 0.0;
            for (int64_t d = 0; d < s.dim; d++) dot += static_cast<double>(query[head * s.dim + d]) * (*keys[j])[from + d];
            scores.push_back(dot * scaling), most = std::max(most, scores.back());
        }
        for (double& score : scores) score = std::exp(score - most), total += score;
        for (size_t j = first; j < count; j++)
            for (int64_t d = 0; d < s.dim; d++) out[head * s.dim + d] += scores[j - first] / total * (*values[j])[from + d];
    }
    return out;
}

// Stores the scene's rows, attends them all, and compares `checked` of them (and the last ones) with the textbook.
void play(const NamedPath& path, const Shape& s, const Scene& scene, int64_t checked, Random& random) {
    const std::string what = describe(path, s);
    const int64_t rows = scene.rows(), size = s.kv_heads * s.dim;
    const int64_t requests = *std::max_element(scene.request.begin(), scene.request.end()) + 1;
    std::vector<std::pair<int64_t, int64_t>> tokens = scene.past;
    for (int64_t i = 0; i < rows; i++) tokens.emplace_back(scene.request[i], scene.slot[i]);
    const int64_t stored = static_cast<int64_t>(tokens.size());
    const Floats keys = random.reals(stored * size, -1.0f, 1.0f), values = random.reals(stored * size, -1.0f, 1.0f);
    const Floats queries = random.reals(rows * s.heads * s.dim, -2.0f, 2.0f), factors = random.reals(LAYERS * size, 0.25f, 2.0f);
    Run run = {path, s, {s.heads, s.kv_heads, s.dim, 0, s.kind, s.factors ? factors.data() : nullptr}, {}, 0.3f};
    std::vector<Memory> memory;
    std::vector<std::vector<Floats>> held_keys(requests), held_values(requests);
    std::vector<int64_t> slots;
    for (int64_t r = 0; r < requests; r++) {
        slots.push_back(scene.slots(r));
        memory.emplace_back(s, blocks_of(slots.back()));
        held_keys[r].resize(scene.slots(r)), held_values[r].resize(scene.slots(r));
    }
    for (Memory& m : memory) run.stores.push_back(m.store);
    Pages pages(s, slots, random);
    Run paged = run;
    paged.stores = pages.stores;
    for (int64_t i = 0; i < stored; i++) {
        const auto [r, slot] = tokens[i];
        for (const Store& store : {run.stores[r], paged.stores[r]})
            path.kernels->remember(run.heads, LAYER, store, slot, keys.data() + i * size, values.data() + i * size, 0, s.kv_heads);
        for (int64_t head = 0; head < s.kv_heads; head++) {
            const float* factor = s.factors ? factors.data() + LAYER * size + head * s.dim : nullptr;
            const Floats k = rounded(keys.data() + i * size + head * s.dim, factor, s.dim, s.kind);
            const Floats v = rounded(values.data() + i * size + head * s.dim, nullptr, s.dim, s.kind);
            held_keys[r][slot].insert(held_keys[r][slot].end(), k.begin(), k.end());
            held_values[r][slot].insert(held_values[r][slot].end(), v.begin(), v.end());
        }
    }
    Pool one(1), two(2);
    const Floats together = run.attend(one, scene, queries, 0, rows);
    expect_same(run.attend(two, scene, queries, 0, rows), together, what + " on two threads");
    expect_same(paged.attend(two, scene, queries, 0, rows), together, what + " from pages");
    expect(run.attend(one, scene, queries, 0, 0).empty(), what + " without rows");
    record(path, "attention" + std::to_string(s.kind), together);
    for (const Memory& m : memory) record(path, "remember", m.keys.data(), m.keys.size()), record(path, "remember", m.values.data(), m.values.size());
    const int64_t wide = s.heads * s.dim;
    for (int64_t i = 0; i < rows; i++) {
        if (i + 6 < rows && i % std::max<int64_t>(1, rows / checked) != 0) continue;
        const Floats among(together.begin() + i * wide, together.begin() + (i + 1) * wide);
        expect_same(run.attend(one, scene, queries, i, 1), among, what + " row " + std::to_string(i) + " alone");
        expect_same(paged.attend(two, scene, queries, i, 1), among, what + " row " + std::to_string(i) + " alone on two threads");
        std::vector<const Floats*> seen_keys, seen_values;
        for (int64_t slot : scene.seen[i]) {
            seen_keys.push_back(&held_keys[scene.request[i]][slot]), seen_values.push_back(&held_values[scene.request[i]][slot]);
        }
        const std::vector<double> wanted = softmax(s, run.scaling, queries.data() + i * wide, seen_keys, seen_values);
        for (int64_t d = 0; d < wide; d++) expect_close(among[d], wanted[d], 2e-5, what + " row " + std::to_string(i));
    }
}

// A branch of a tree is the chain that it stands for, to the bit.
void branch_is_chain(const NamedPath& path, const Shape& s, Random& random) {
    const int64_t start = 100, size = s.kv_heads * s.dim, wide = s.heads * s.dim;
    const Floats keys = random.reals((start + 2) * size, -1.0f, 1.0f), values = random.reals((start + 2) * size, -1.0f, 1.0f);
    const Floats queries = random.reals((start + 4) * wide, -2.0f, 2.0f);
    Scene chain, tree;
    chain.chain(0, start + 2);
    tree.chain(0, start);
    tree.tree(0, start, {-1, -1, 0, 1});  // slots 101 and 103 hold what the chain has at 100 and 101
    Floats outs[2];
    for (int which = 0; which < 2; which++) {
        const Scene& scene = which ? tree : chain;
        Memory memory(s, blocks_of(scene.slots(0)));
        Run run = {path, s, {s.heads, s.kv_heads, s.dim, 0, s.kind, nullptr}, {memory.store}, 0.3f};
        for (int64_t i = 0; i < scene.rows(); i++) {
            const int64_t token = which && i >= start ? (i == start + 1 ? start : i == start + 3 ? start + 1 : 7) : i;
            path.kernels->remember(run.heads, LAYER, memory.store, scene.slot[i], keys.data() + token * size, values.data() + token * size, 0, s.kv_heads);
        }
        Pool pool(1);
        Floats asked = queries;
        // The branch's last row asks what the chain's last row asks.
        if (which) std::copy_n(queries.begin() + (start + 1) * wide, wide, asked.begin() + (start + 3) * wide);
        outs[which] = run.attend(pool, scene, asked, scene.rows() - 1, 1);
    }
    expect_same(outs[1], outs[0], describe(path, s) + ": a branch has the chain's bits");
}

// Numbers far out go through, and a NaN that a row sees stays one.
void edges(const NamedPath& path, const Shape& s, Random& random) {
    Scene scene;
    scene.chain(0, 3);
    const int64_t size = s.kv_heads * s.dim, wide = s.heads * s.dim;
    for (float odd : {1e30f, -1e30f, 1e-42f, INFINITY, NAN}) {
        Floats keys = random.reals(3 * size, -1.0f, 1.0f), values = random.reals(3 * size, -1.0f, 1.0f);
        for (int64_t d = 0; d < size; d += s.dim) keys[size + d] = values[size + d + s.dim - 1] = odd;
        Memory memory(s, 1);
        Run run = {path, s, {s.heads, s.kv_heads, s.dim, 0, s.kind, nullptr}, {memory.store}, 0.3f};
        for (int64_t i = 0; i < 3; i++)
            path.kernels->remember(run.heads, LAYER, memory.store, i, keys.data() + i * size, values.data() + i * size, 0, s.kv_heads);
        Pool pool(1);
        const Floats queries = random.reals(3 * wide, -2.0f, 2.0f);
        const Floats out = run.attend(pool, scene, queries, 0, 3);
        const std::string what = describe(path, s) + " with " + std::to_string(odd);
        record(path, "attention" + std::to_string(s.kind), out);
        if (std::isnan(odd))
            for (int64_t i = wide; i < 3 * wide; i++) expect(std::isnan(out[i]), what + ": a NaN stays one");
        if (odd == 1e-42f)
            for (float v : out) expect(std::isfinite(v), what + ": numbers stay numbers");
    }
}

}  // namespace

void test_attention(const NamedPath& path) {
    Random random(31);
    const int64_t dims[] = {16, 48, 64, 80, 100}, groups[] = {1, 2, 7, 8, 12}, windows[] = {0, 5, 70};
    for (int64_t kind : {CACHE_F32, CACHE_INT8, CACHE_INT4}) {
        for (int64_t turn = 0; turn < 5; turn++) {
            // Each head size with each group size, over the three kinds and the two scenes.
            const int64_t group = groups[(turn + kind) % 5], kv_heads = 1 + turn % 2;
            const Shape s = {kind, group * kv_heads, kv_heads, dims[turn], windows[turn % 3], turn % 2 == 1};
            Scene scene;
            scene.chain(0, 1);
            scene.chain(1, 70 + turn, 40);
            scene.tree(1, 70 + turn, {-1, -1, 0, 0, 1, 4, 5, -1});
            scene.chain(2, 20);
            play(path, s, scene, 12, random);
            branch_is_chain(path, s, random);
            edges(path, s, random);
        }
        for (int64_t window : {0, 40, 600}) {
            // Over the first split of 512 positions, a tree across its end too.
            const Shape s = {kind, 2, 1, 24, window, window == 40};
            Scene scene;
            scene.chain(0, 510, 500);
            scene.tree(0, 510, {-1, 0, 1, 2, -1, 4, 5});
            scene.chain(1, 520, 505);
            scene.chain(2, 1100, 1085);
            const int64_t before = shared_texts;
            play(path, s, scene, 5, random);
            expect(shared_texts > before, describe(path, s) + ": threads share a text of three splits");
        }
    }
}

}  // namespace kernels_test
