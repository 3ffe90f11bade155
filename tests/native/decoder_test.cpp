// The whole decoder on tiny random models: its numbers, and its bits at any width and on any number of threads.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "model.h"

namespace kernels_test {

using namespace specpress;

namespace {

// A cache's memory, zeros as Python makes it.
struct Memory {
    Memory(const ModelShape& s, int64_t blocks) {
        const int64_t heads = s.attending() * blocks * KV_HEADS, wide = (s.dim + 15) / 16 * 16;
        const int64_t unit = s.cache == CACHE_F32 ? 4 : 1, halves = s.cache == CACHE_INT4 ? 2 : 1;
        keys.resize(static_cast<size_t>(heads * s.dim * KEYS * unit / halves));
        values.resize(static_cast<size_t>(heads * KEYS * wide * unit / halves));
        if (s.cache != CACHE_F32) key_scale.resize(static_cast<size_t>(heads * KEYS)), value_scale = key_scale;
        store = {keys.data(), values.data(), key_scale.data(), value_scale.data(), blocks, nullptr};
    }
    std::vector<uint8_t> keys, values;
    Floats key_scale, value_scale;
    Store store;
};

// The states of one request, which are no numbers until they are written.
struct States {
    explicit States(const ModelShape& s, int64_t most) : held(most), width(s.state()), memory(static_cast<size_t>(most * width), NAN) {}
    void give(Store& store) { store.states = memory.data(), store.held = held, store.width = width; }
    int64_t held, width;
    Floats memory;
};

struct Result {
    Floats hidden, logits;
};

// Requests of the given tokens, every row's norms and logits; `width` rows of each request a call. `paged`: their blocks
// lie in one memory, the first request's last in it and each from its last to its first.
Result run(const NamedPath& path, const TestModel& m, int threads, const std::vector<std::vector<int64_t>>& requests, int64_t width,
           bool paged = false) {
    Pool pool(threads);
    Decoder decoder(m.model, *path.kernels, pool);
    std::vector<Memory> memory;
    std::vector<Store> stores;
    int64_t longest = 0, total = 0, all_blocks = 0;
    std::vector<int64_t> base;
    for (const auto& tokens : requests) {
        const int64_t length = static_cast<int64_t>(tokens.size());
        const int64_t blocks = (length + KEYS - 1) / KEYS;
        if (!paged) memory.emplace_back(m.shape, blocks);
        base.push_back(total), total += length, longest = std::max(longest, length), all_blocks += blocks;
    }
    std::vector<std::vector<int64_t>> tables;
    if (paged) memory.emplace_back(m.shape, all_blocks);
    std::vector<States> states(requests.size(), States(m.shape, 3));
    for (const auto& tokens : requests) {
        stores.push_back(memory[paged ? 0 : stores.size()].store);
        states[stores.size() - 1].give(stores.back());
        if (!paged) continue;
        tables.emplace_back();
        for (size_t slot = 0; slot < tokens.size(); slot += KEYS) tables.back().push_back(--all_blocks);
        stores.back().table = tables.back().data();
    }
    Result result = {Floats(static_cast<size_t>(total * HIDDEN), NAN), Floats(static_cast<size_t>(total * VOCABULARY), NAN)};
    for (int64_t from = 0; from < longest; from += width) {
        std::vector<int64_t> tokens, request, position, where;
        for (size_t r = 0; r < requests.size(); r++)
            for (int64_t i = from; i < std::min<int64_t>(from + width, static_cast<int64_t>(requests[r].size())); i++) {
                tokens.push_back(requests[r][i]), request.push_back(static_cast<int64_t>(r)), position.push_back(i);
                where.push_back(base[r] + i);
            }
        const int64_t rows = static_cast<int64_t>(tokens.size());
        const std::vector<int64_t> chain(static_cast<size_t>(rows), -1), zeros(static_cast<size_t>(rows));
        std::vector<int64_t> at(static_cast<size_t>(rows));
        // In the other order, to see that `at` is heeded.
        for (int64_t i = 0; i < rows; i++) at[i] = rows - 1 - i;
        const Batch batch = {rows,         tokens.data(), request.data(), position.data(), position.data(),
                             zeros.data(), chain.data(),  nullptr,        stores.data()};
        Floats hidden(static_cast<size_t>(rows * HIDDEN)), logits(static_cast<size_t>(rows * VOCABULARY));
        const float *cosines = m.cos.data(), *sines = m.sin.data();
        std::vector<int64_t> best(static_cast<size_t>(rows), -2);
        decoder.forward(batch, {&cosines, &sines, nullptr}, at.data(), rows, hidden.data(), logits.data(), nullptr, best.data());
        for (int64_t i = 0; i < rows; i++) {
            const auto row = logits.begin() + i * VOCABULARY;
            const bool finite = std::all_of(row, row + VOCABULARY, [](float logit) { return std::isfinite(logit); });
            const int64_t largest = finite ? std::max_element(row, row + VOCABULARY) - row : -1;
            expect(best[i] == largest, path.name + " " + m.shape.name + ": the most probable token of a row");
        }
        for (int64_t i = 0; i < rows; i++) {
            std::copy_n(hidden.begin() + i * HIDDEN, HIDDEN, result.hidden.begin() + where[at[i]] * HIDDEN);
            std::copy_n(logits.begin() + i * VOCABULARY, VOCABULARY, result.logits.begin() + where[at[i]] * VOCABULARY);
        }
    }
    return result;
}

std::vector<int64_t> random_tokens(int64_t count, Random& random) {
    std::vector<int64_t> out(static_cast<size_t>(count));
    for (int64_t& token : out) token = random.whole(0, VOCABULARY - 1);
    return out;
}

// Three prompts of different lengths, drafted to different lengths in one call on `threads`.
bool draft(const NamedPath& path, const TestModel& m, int threads, const std::vector<std::vector<int64_t>>& prompts,
           const std::vector<int64_t>& steps, int64_t limit, std::vector<int64_t>& drafted, const ChainNoise* noise = nullptr) {
    Pool pool(threads);
    Decoder decoder(m.model, *path.kernels, pool);
    std::vector<Memory> memory;
    std::vector<Store> stores;
    std::vector<int64_t> tokens, request, position;
    for (size_t r = 0; r < prompts.size(); r++) {
        // Room for what is fed and no more.
        memory.emplace_back(m.shape, static_cast<int64_t>(prompts[r].size()) + steps[r] - 1);
        for (size_t i = 0; i < prompts[r].size(); i++)
            tokens.push_back(prompts[r][i]), request.push_back(static_cast<int64_t>(r)), position.push_back(static_cast<int64_t>(i));
    }
    std::vector<States> states(prompts.size(), States(m.shape, 2));
    for (Memory& one : memory) stores.push_back(one.store), states[stores.size() - 1].give(stores.back());
    const int64_t rows = static_cast<int64_t>(tokens.size()), longest = *std::max_element(steps.begin(), steps.end());
    const std::vector<int64_t> chain(tokens.size(), -1), zeros(tokens.size());
    const Batch batch = {rows,         tokens.data(), request.data(), position.data(), position.data(),
                         zeros.data(), chain.data(),  nullptr,        stores.data()};
    drafted.assign(prompts.size() * static_cast<size_t>(longest), -1);
    const float *cosines = m.cos.data(), *sines = m.sin.data();
    return decoder.draft(batch, {&cosines, &sines, nullptr}, static_cast<int64_t>(prompts.size()), steps.data(), limit, drafted.data(), longest,
                         noise);
}

// What was drafted is what whole forwards choose, and nothing is written behind it.
void drafts(const NamedPath& path, const TestModel& m, Random& random) {
    const std::vector<std::vector<int64_t>> prompts = {random_tokens(3, random), random_tokens(70, random), random_tokens(1, random)};
    const std::vector<int64_t> steps = {2, 6, 1};
    for (int64_t limit : {VOCABULARY, static_cast<int64_t>(33)})
        for (int threads : {1, 2}) {
            const std::string what = path.name + " draft " + m.shape.name + " below " + std::to_string(limit);
            std::vector<int64_t> drafted;
            expect(draft(path, m, threads, prompts, steps, limit, drafted), what + ": finite");
            for (size_t r = 0; r < prompts.size(); r++) {
                std::vector<int64_t> text = prompts[r];
                for (int64_t i = 0; i < 6; i++) {
                    const int64_t found = drafted[r * 6 + static_cast<size_t>(i)];
                    if (i < steps[r]) text.push_back(found);
                    else expect(found == -1, what + ": no token behind the last");
                }
                const Floats logits = run(path, m, 1, {text}, POSITIONS).logits;
                for (int64_t i = 0; i < steps[r]; i++) {
                    const auto row = logits.begin() + (static_cast<int64_t>(prompts[r].size()) + i - 1) * VOCABULARY;
                    const int64_t wanted = std::max_element(row, row + limit) - row;
                    expect(drafted[r * 6 + static_cast<size_t>(i)] == wanted, what + ": the largest logit");
                }
            }
        }
}

// A token with hardly any noise arrives first, in a request that is sampled; noise that is the same for all is none, and
// what no request of the call has is not read. The noise has room for the tokens below the limit and no more.
void sampled(const NamedPath& path, const TestModel& m, Random& random) {
    const std::vector<std::vector<int64_t>> prompts = {random_tokens(3, random), random_tokens(9, random), random_tokens(1, random)};
    const std::vector<int64_t> steps = {2, 6, 1};
    const int64_t limit = 33;
    std::vector<int64_t> greedy, drafted;
    expect(draft(path, m, 2, prompts, steps, limit, greedy), path.name + " greedy chains: finite");
    const std::vector<double> same(static_cast<size_t>(limit), 1.0);
    std::vector<double> early = same;
    early[17] = 1e-280;
    const std::vector<const double*> favoured(6, early.data()), even(1, same.data());
    const ChainNoise noise[] = {{1.0, nullptr}, {0.8, favoured.data()}, {1.3, even.data()}};
    expect(draft(path, m, 2, prompts, steps, limit, drafted, noise), path.name + " sampled chains: finite");
    for (size_t i = 0; i < 6; i++) {
        expect(drafted[i] == greedy[i] && drafted[12 + i] == greedy[12 + i], path.name + " sampled chains: those without noise");
        expect(drafted[6 + i] == 17, path.name + " sampled chains: who arrives first");
    }
}

// A tree behind one request's text, beside a chain: each of its rows has the logits of the chain that it ends.
void tree(const NamedPath& path, const TestModel& m, Random& random) {
    const std::vector<int64_t> text = random_tokens(9, random), branches = random_tokens(6, random), other = random_tokens(3, random);
    const std::vector<int64_t> parents = {-1, -1, 0, 0, 2, 1};
    const int64_t before = static_cast<int64_t>(text.size()), count = static_cast<int64_t>(parents.size());
    Pool pool(2);
    Decoder decoder(m.model, *path.kernels, pool);
    std::vector<Memory> memory;
    std::vector<States> states(2, States(m.shape, count + 1));
    std::vector<Store> stores;
    for (int r = 0; r < 2; r++) memory.emplace_back(m.shape, 1);
    for (int r = 0; r < 2; r++) stores.push_back(memory[r].store), states[r].give(stores[r]);
    const float *cosines = m.cos.data(), *sines = m.sin.data();
    std::vector<int64_t> request(text.size()), position, slot, from, at, tail, above;
    for (int64_t i = 0; i < before; i++) position.push_back(i);
    const std::vector<int64_t> chain(text.size(), -1), zeros(text.size());
    decoder.forward({before, text.data(), request.data(), position.data(), position.data(), zeros.data(), chain.data(), nullptr, stores.data()},
                    {&cosines, &sines, nullptr}, nullptr, 0, nullptr, nullptr, nullptr, nullptr);
    std::vector<int64_t> tokens = branches;
    request.assign(branches.size(), 0), position.clear();
    std::vector<std::vector<int64_t>> paths;
    for (int64_t row = 0; row < count; row++) {
        paths.push_back(parents[row] < 0 ? std::vector<int64_t>() : paths[parents[row]]);
        paths.back().push_back(row);
        position.push_back(before - 1 + static_cast<int64_t>(paths.back().size())), slot.push_back(before + row), from.push_back(before);
        at.push_back(static_cast<int64_t>(tail.size())), above.push_back(parents[row] < 0 ? before - 1 : before + parents[row]);
        for (int64_t node : paths.back()) tail.push_back(before + node);
    }
    for (int64_t i = 0; i < static_cast<int64_t>(other.size()); i++) {
        tokens.push_back(other[i]), request.push_back(1), position.push_back(i), slot.push_back(i), from.push_back(0), at.push_back(-1);
        above.push_back(i - 1);
    }
    const int64_t rows = static_cast<int64_t>(tokens.size());
    Batch batch = {rows, tokens.data(), request.data(), position.data(), slot.data(), from.data(), at.data(), tail.data(), stores.data()};
    batch.before = above.data();
    std::vector<int64_t> all(tokens.size());
    for (int64_t i = 0; i < rows; i++) all[i] = i;
    Floats hidden(static_cast<size_t>(rows * HIDDEN)), logits(static_cast<size_t>(rows * VOCABULARY));
    decoder.forward(batch, {&cosines, &sines, nullptr}, all.data(), rows, hidden.data(), logits.data(), nullptr, nullptr);
    auto same = [&](int64_t row, const std::vector<int64_t>& whole) {
        const Floats wanted = run(path, m, 1, {whole}, POSITIONS).logits;
        expect_same(Floats(logits.begin() + row * VOCABULARY, logits.begin() + (row + 1) * VOCABULARY), Floats(wanted.end() - VOCABULARY, wanted.end()),
                    path.name + " " + m.shape.name + " row " + std::to_string(row) + " of a tree");
    };
    for (int64_t row = 0; row < count; row++) {
        std::vector<int64_t> whole = text;
        for (int64_t node : paths[row]) whole.push_back(branches[node]);
        same(row, whole);
    }
    same(rows - 1, other);
}

// A row that is not a number, beside others: all memory holds, the row stays NaN, the others keep their bits.
void not_a_number(const NamedPath& path, TestModel& m, Random& random) {
    if (m.shape.tied) return;
    const std::vector<std::vector<int64_t>> requests = {{3, 4}, {5, 6}, {7}};
    const Result before = run(path, m, 1, requests, 2);
    const int64_t poisoned = 4 * HIDDEN + random.whole(0, HIDDEN - 1);
    if (m.embedding16.empty()) m.embedding32[poisoned] = NAN;
    else m.embedding16[poisoned] = 0x7fff;  // a NaN in either 16-bit form
    const Result after = run(path, m, 1, requests, 2);
    const std::string what = path.name + " " + m.shape.name;
    for (int64_t i = 0; i < VOCABULARY; i++) expect(std::isnan(after.logits[VOCABULARY + i]), what + ": a NaN stays one");
    const Floats others(after.logits.begin() + 2 * VOCABULARY, after.logits.end());
    expect_same(others, Floats(before.logits.begin() + 2 * VOCABULARY, before.logits.end()), what + " beside a NaN");
    std::vector<int64_t> drafted;
    expect(!draft(path, m, 1, {{5}, {3, 4}}, {3, 3}, VOCABULARY, drafted), what + ": no draft from a NaN");
}

// Sizes that a damaged configuration could bring, each of which would be written beyond something.
void sizes(const TestModel& m) {
    expect(sound(m.model), m.shape.name + ": a whole model is sound");
    auto refused = [&](const char* what, auto&& change) {
        Model model = m.model;
        Heads heads = m.heads;
        LayerInputs inputs = m.inputs;
        std::vector<Layer> layers(m.layers);
        model.heads = &heads, model.layer = layers.data();
        if (model.inputs) model.inputs = &inputs;
        change(model, layers[m.shape.taps ? 0 : 1], heads, inputs);
        expect(!sound(model), m.shape.name + ": " + what);
    };
    refused("odd rotation", [](Model&, Layer&, Heads& heads, LayerInputs&) { heads.rotated--; });
    refused("more rotated than there is", [](Model&, Layer&, Heads& heads, LayerInputs&) { heads.rotated = heads.dim + 2; });
    refused("no head", [](Model&, Layer&, Heads& heads, LayerInputs&) { heads.heads = 0; });
    refused("heads that share nothing", [](Model&, Layer&, Heads& heads, LayerInputs&) { heads.kv_heads = 3; });
    refused("a head too wide", [](Model&, Layer&, Heads& heads, LayerInputs&) { heads.dim = 4096; });
    refused("another hidden size", [](Model& model, Layer&, Heads&, LayerInputs&) { model.hidden++; });
    refused("another vocabulary", [](Model& model, Layer&, Heads&, LayerInputs&) { model.vocabulary += 32; });
    refused("a window before the text", [](Model&, Layer& layer, Heads&, LayerInputs&) { layer.window = -1; });
    refused("no way out", [](Model&, Layer& layer, Heads&, LayerInputs&) { layer.out = nullptr; });
    refused("a part of the keys missing", [](Model&, Layer& layer, Heads&, LayerInputs&) { layer.qkv.parts--; });
    refused("heads of a group that is not there", [](Model&, Layer& layer, Heads&, LayerInputs&) { layer.group = 1; });
    refused("more keys than there are layers", [](Model&, Layer& layer, Heads&, LayerInputs&) { layer.keys = DEPTH; });
    if (m.shape.shared) refused("keys that are made", [](Model&, Layer& layer, Heads&, LayerInputs&) { layer.shares = 0; });
    else if (!m.shape.taps) refused("keys of another layer beside its own", [](Model&, Layer& layer, Heads&, LayerInputs&) { layer.shares = 1; });
    if (m.shape.inputs) {
        refused("larger inputs of layers", [](Model&, Layer&, Heads&, LayerInputs& inputs) { inputs.size++; });
        refused("inputs of layers from nowhere", [](Model& model, Layer&, Heads&, LayerInputs&) { model.inputs = nullptr; });
        refused("inputs of layers without a table", [](Model&, Layer&, Heads&, LayerInputs& inputs) { inputs.table = nullptr; });
    }
    if (m.shape.delta) {
        auto changed = [&](const char* what, auto&& change) {
            Delta other = m.blocks[0].delta;
            change(other);
            refused(what, [&](Model&, Layer& layer, Heads&, LayerInputs&) { layer.delta = &other; });
        };
        changed("a delta rule of one tap", [](Delta& other) { other.count = 1; });
        changed("no rates", [](Delta& other) { other.rate = nullptr; });
        changed("a larger state", [](Delta& other) { other.value_dim++; });
        changed("value heads that share nothing", [](Delta& other) { other.key_heads = 3; });
    } else if (m.shape.mamba) {
        auto changed = [&](const char* what, auto&& change) {
            Mamba other = m.blocks[0].mamba;
            change(other);
            refused(what, [&](Model&, Layer& layer, Heads&, LayerInputs&) { layer.mamba = &other; });
        };
        changed("a state space of one tap", [](Mamba& other) { other.count = 1; });
        changed("no rates", [](Mamba& other) { other.rate = nullptr; });
        changed("wider heads", [](Mamba& other) { other.dim++; });
        changed("larger vectors", [](Mamba& other) { other.state++; });
        changed("heads that share nothing", [](Mamba& other) { other.groups = 3; });
    } else if (m.shape.taps) {
        Convolution other = m.blocks[0].convolution;
        refused("one tap", [&](Model&, Layer& layer, Heads&, LayerInputs&) { other.count = 1, layer.convolution = &other; });
        refused("no taps", [&](Model&, Layer& layer, Heads&, LayerInputs&) { other.count = m.shape.taps, other.taps = nullptr, layer.convolution = &other; });
    }
    if (!m.shape.experts) {
        refused("a smaller intermediate size", [](Model& model, Layer&, Heads&, LayerInputs&) { model.intermediate--; });
        refused("gates without factors", [](Model&, Layer& layer, Heads&, LayerInputs&) { layer.gate_up.parts--; });
        return;
    }
    for (int64_t chosen : {int64_t{0}, m.shape.experts + 1}) {
        Mixture mixture = *m.layers[1].mixture;
        mixture.routing.chosen = chosen;
        refused("other experts than there are", [&](Model&, Layer& layer, Heads&, LayerInputs&) { layer.mixture = &mixture; });
    }
}

void check(const NamedPath& path, const ModelShape& shape, Random& random, Pool& pool) {
    TestModel m(shape, random, pool);
    const std::string what = path.name + " decoder " + shape.name;
    const std::vector<std::vector<int64_t>> requests = {random_tokens(POSITIONS, random), random_tokens(5, random), random_tokens(40, random)};
    const Result whole = run(path, m, 1, requests, POSITIONS);
    for (float v : whole.logits) expect(std::isfinite(v), what + ": numbers");
    record(path, "decoder", whole.hidden);
    record(path, "decoder", whole.logits);
    // Enough rows for the threads to share them.
    expect_same(run(path, m, 2, requests, POSITIONS).logits, whole.logits, what + " on two threads");
    for (int64_t width : {1, 7}) {
        const Result narrow = run(path, m, width == 7 ? 2 : 1, requests, width);
        expect_same(narrow.hidden, whole.hidden, what + " hidden at width " + std::to_string(width));
        expect_same(narrow.logits, whole.logits, what + " at width " + std::to_string(width));
    }
    for (int64_t width : {static_cast<int64_t>(7), POSITIONS})
        expect_same(run(path, m, 2, requests, width, true).logits, whole.logits, what + " from pages, width " + std::to_string(width));
    // Rounded inputs differ by a whole code where the textbook's differ by a hair: only float models are compared.
    if (shape.cache == CACHE_F32 && shape.kind < INT8) {
        const std::vector<double> wanted = textbook(m, requests[2]);
        for (size_t i = 0; i < wanted.size(); i++)
            expect_close(whole.logits[(POSITIONS + 5) * VOCABULARY + i], wanted[i], 2e-4, what + " logit " + std::to_string(i));
    }
    sizes(m);
    drafts(path, m, random);
    sampled(path, m, random);
    tree(path, m, random);
    not_a_number(path, m, random);  // last: it spoils the model
}

// Layers of every kind and order of inputs on one input, side by side: each gets the inputs that it wants.
void projections(const NamedPath& path, Random& random, Pool& pool) {
    constexpr int64_t INPUTS = 77;
    Parts parts;
    for (int64_t kind : {INT4, F32, INT8, INT4, BF16, NF4, INT8, TERNARY, INT4, NESTED, UPPER, TRELLIS, THREE_OF_FOUR}) {
        LayerShape s = {kind, random.whole(1, 70), INPUTS};
        s.bias = true, s.zero = kind == INT4 ? 8 : 0, s.permuted = kind == INT4;
        if (kind == TRELLIS) s.bits = 3;
        if (parts.pointers.size() == 6) s.input_scale = 0.02f;
        if (parts.pointers.size() == 8) s.group = 32;
        parts.add(std::make_unique<TestLayer>(s, random, pool));
    }
    Model nothing{};
    nothing.hidden = INPUTS, nothing.head = parts.pointers[0];
    Pool two(2);
    Decoder decoder(nothing, *path.kernels, two);
    for (int64_t rows : {0, 1, 19}) {
        const Floats x = random.reals(rows * INPUTS, -2.0f, 2.0f);
        int64_t outputs = 0;
        for (const Weights* w : parts.pointers) outputs += w->outputs;
        Floats y(static_cast<size_t>(rows * outputs), NAN);
        decoder.project(parts.projection(), x.data(), rows, y.data());
        for (int64_t row = 0; row < rows; row++) {
            const std::vector<double> wanted = parts.of(Floats(x.begin() + row * INPUTS, x.begin() + (row + 1) * INPUTS));
            for (int64_t n = 0; n < outputs; n++)
                expect_close(y[row * outputs + n], wanted[n], 1e-4 * (1.0 + std::fabs(wanted[n])), path.name + " projection of many kinds");
        }
    }
}

}  // namespace

void test_decoder(const NamedPath& path) {
    Random random(41);
    Pool pool(1);
    std::vector<ModelShape> shapes(15);
    shapes[0].name = "dense", shapes[0].embedding_type = SCALE_F16;
    shapes[1].name = "mixture", shapes[1].experts = 5, shapes[1].embedding_type = SCALE_BF16;
    ModelShape& gemma = shapes[2];
    gemma.name = "bf16, tied, gelu, head norms, window", gemma.kind = BF16;
    gemma.gelu = gemma.tied = gemma.head_norms = true, gemma.window = 30, gemma.dim = 36;
    shapes[3].name = "nf4 mixture, gelu", shapes[3].kind = NF4, shapes[3].experts = 5, shapes[3].gelu = true;
    shapes[4].name = "int8, int8 cache", shapes[4].kind = INT8, shapes[4].cache = CACHE_INT8;
    shapes[5].name = "int4, int4 cache, window", shapes[5].kind = INT4, shapes[5].cache = CACHE_INT4;
    shapes[5].window = 40, shapes[5].dim = 64;
    shapes[6].name = "ternary, int4 cache", shapes[6].kind = TERNARY, shapes[6].cache = CACHE_INT4;
    shapes[7].name = "convolution, a gate for each head", shapes[7].taps = 4, shapes[7].head_norms = true;
    shapes[7].gate = shapes[7].by_head = true;
    shapes[8].name = "convolution, int4 mixture, int8 cache", shapes[8].taps = 2, shapes[8].kind = INT4, shapes[8].experts = 5;
    shapes[8].cache = CACHE_INT8;
    shapes[9].name = "delta rule, gate", shapes[9].taps = 4, shapes[9].delta = shapes[9].gate = true;
    shapes[10].name = "delta rule, int8, int4 cache", shapes[10].taps = 2, shapes[10].delta = true, shapes[10].kind = INT8;
    shapes[10].cache = CACHE_INT4;
    shapes[11].name = "state space", shapes[11].taps = 4, shapes[11].mamba = true;
    shapes[12].name = "state space, gates first, int8 cache", shapes[12].taps = 2, shapes[12].mamba = shapes[12].gate = true;
    shapes[12].kind = INT8, shapes[12].cache = CACHE_INT8;
    shapes[13].name = "shared keys, inputs of layers", shapes[13].shared = shapes[13].head_norms = true, shapes[13].inputs = 13;
    shapes[14].name = "the same, int8, int4 cache, window", shapes[14].shared = true, shapes[14].inputs = 12, shapes[14].kind = INT8;
    shapes[14].cache = CACHE_INT4, shapes[14].window = 30;
    for (const ModelShape& shape : shapes) check(path, shape, random, pool);
    projections(path, random, pool);
}

}  // namespace kernels_test
