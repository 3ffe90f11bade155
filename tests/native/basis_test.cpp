// Keys and values in a basis: what is stored and attended does not depend on what was there, on pages or on threads.
#include "attention.h"

namespace kernels_test {

namespace {

// Matrices of every layer and head: into the basis, the feedback below the diagonal, and back.
Floats random_bases(const Shape& s, Random& random) {
    Floats out = random.reals(LAYERS * s.kv_heads * 3 * s.dim * s.dim, -1.0f, 1.0f);
    for (float& v : out) v = v * 2.0f / std::sqrt(static_cast<float>(s.dim));
    return out;
}

void remember_all(const NamedPath& path, const Heads& heads, const Store& store, const Floats& keys, const Floats& values, int64_t from) {
    const int64_t size = heads.kv_heads * heads.dim, count = static_cast<int64_t>(keys.size()) / size;
    for (int64_t i = from; i < count; i++) path.kernels->remember(heads, LAYER, store, i, keys.data() + i * size, values.data() + i * size, 0, heads.kv_heads);
}

void expect_equal(const Memory& found, const Memory& wanted, const std::string& what) {
    expect(found.keys == wanted.keys && found.values == wanted.values, what + ": the same codes");
    expect_same(found.key_scale, wanted.key_scale, what + ": keys");
    expect_same(found.value_scale, wanted.value_scale, what + ": values");
}

void chain(const NamedPath& path, const Shape& s, int64_t count, Random& random) {
    const std::string what = describe(path, s) + " in a basis";
    const int64_t size = s.kv_heads * s.dim, wide = s.heads * s.dim, kept = count / 2;
    const Floats bases[] = {random_bases(s, random), random_bases(s, random)};
    const Heads heads = {s.heads, s.kv_heads, s.dim, 0, s.kind, nullptr, 0, bases[0].data(), bases[1].data()};
    Floats keys = random.reals(count * size, -1.0f, 1.0f), values = random.reals(count * size, -1.0f, 1.0f);
    for (int64_t d = 0; d < s.dim; d++) keys[d] = 0.0f, values[size + d] *= 1e-42f, keys[2 * size + d] *= 1e30f;
    Memory memory(s, blocks_of(count)), again(s, blocks_of(count));
    remember_all(path, heads, memory.store, keys, values, 0);
    // Slots that others had: of the same request, which was rolled back.
    Floats others = random.reals(count * size, -50.0f, 50.0f);
    others[kept * size] = NAN, others[(kept + 1) * size] = INFINITY;
    remember_all(path, heads, again.store, others, others, 0);
    if (s.dim > 1) expect(again.keys != memory.keys, what + ": other keys have other codes");
    remember_all(path, heads, again.store, keys, values, 0);
    expect_equal(again, memory, what);

    Scene scene;
    scene.chain(0, count, kept);
    Random own(7);
    Pages pages(s, {count}, own);
    remember_all(path, heads, pages.stores[0], keys, values, 0);
    const Run run = {path, s, heads, {memory.store}, 0.3f}, paged = {path, s, heads, {pages.stores[0]}, 0.3f};
    const Floats queries = random.reals(scene.rows() * wide, -2.0f, 2.0f);
    Pool one(1), two(2);
    const Floats together = run.attend(one, scene, queries, 0, scene.rows());
    expect_same(run.attend(two, scene, queries, 0, scene.rows()), together, what + " on two threads");
    expect_same(paged.attend(two, scene, queries, 0, scene.rows()), together, what + " from pages");
    for (int64_t i = 0; i < scene.rows(); i += 3) {
        const Floats among(together.begin() + i * wide, together.begin() + (i + 1) * wide);
        expect_same(run.attend(one, scene, queries, i, 1), among, what + " row " + std::to_string(i) + " alone");
    }
    Scene tree;
    tree.chain(0, count - 3, count - 3);
    tree.tree(0, count - 3, {-1, 0, 1});
    const Floats branch = run.attend(one, tree, Floats(queries.end() - 3 * wide, queries.end()), 0, 3);
    expect_same(branch, Floats(together.end() - 3 * wide, together.end()), what + ": a branch has the chain's bits");
    for (const Floats& part : {together, memory.key_scale, memory.value_scale}) record(path, "basis" + std::to_string(s.kind), part);
    for (const auto& part : {memory.keys, memory.values}) record(path, "basis" + std::to_string(s.kind), part.data(), part.size());
}

}  // namespace

void test_basis(const NamedPath& path) {
    Random random(47);
    for (int64_t kind : {CACHE_INT4, CACHE_INT3}) {
        chain(path, {kind, 4, 2, 64, 0, false}, 130, random);
        chain(path, {kind, 3, 3, 36, 20, false}, 70, random);
        chain(path, {kind, 2, 1, 17, 0, false}, 67, random);
    }
}

}  // namespace kernels_test
