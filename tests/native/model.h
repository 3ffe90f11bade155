// Tiny random models of the decoder's family, and what they should say, in plain double arithmetic.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "decoder.h"
#include "layer.h"

namespace kernels_test {

using specpress::CACHE_F32;
using specpress::F32;
using specpress::SCALE_F32;
using specpress::Weights;

struct ModelShape {
    std::string name;
    int64_t kind = F32;       // of the layers
    int64_t cache = CACHE_F32;
    int64_t experts = 0;      // 0: dense
    bool tied = false;        // the embedding is the head's rows
    bool head_norms = false;
    bool gelu = false;
    int64_t window = 0;
    int64_t embedding_type = SCALE_F32;
    int64_t dim = 20;
    int64_t taps = 0;    // of a convolution in the first block's attention's place; 0: there is none
    bool delta = false;  // a delta rule stands there, behind that convolution
    bool gate = false;   // on what attention mixes
    bool by_head = false;  // one for each head, not each dimension
    bool mamba = false;  // that convolution is a state space's, which stands beside attention; the other block has no MLP
    bool shared = false;   // the last block reads the first one's keys and values
    int64_t inputs = 0;    // numbers that each block reads for itself; 0: none
    int64_t attending() const;
    int64_t state() const;  // floats of a state
};

constexpr int64_t HIDDEN = 40, WIDE = 56, VOCABULARY = 70, HEADS = 4, KV_HEADS = 2, DEPTH = 2;
// Of the blocks that keep keys and values.
inline int64_t ModelShape::attending() const { return (taps && !mamba) || shared ? DEPTH - 1 : DEPTH; }
constexpr float BLOCK_SCALE = 0.75f;  // of what stands behind a block with an input of its own
// Of a delta rule: heads and their dimensions, and what goes through its convolution.
constexpr int64_t KEY_HEADS = 2, VALUE_HEADS = 4, KEY_DIM = 20, VALUE_DIM = 12, DELTA_KEYS = KEY_HEADS * KEY_DIM;
constexpr int64_t DELTA_VALUES = VALUE_HEADS * VALUE_DIM, CHANNELS = 2 * DELTA_KEYS + DELTA_VALUES;
// And of a state space.
constexpr int64_t SPACE_HEADS = 4, SPACE_DIM = 20, GROUPS = 2, STATE = 10, SPACE = SPACE_HEADS * SPACE_DIM, VECTORS = GROUPS * STATE;
constexpr int64_t SPACE_CHANNELS = SPACE + 2 * VECTORS, SPACE_MADE = SPACE + SPACE_CHANNELS + SPACE_HEADS;
inline int64_t ModelShape::state() const {
    if (mamba) return (taps - 1) * SPACE_CHANNELS + SPACE * STATE;
    if (delta) return (taps - 1) * CHANNELS + DELTA_VALUES * KEY_DIM;
    return taps ? (taps - 1) * HIDDEN : 0;
}
constexpr int64_t CHOSEN = 2;       // experts of a token
constexpr int64_t POSITIONS = 110;  // that the rotary tables reach

// A projection of several layers.
struct Parts {
    std::vector<std::unique_ptr<TestLayer>> layers;
    std::vector<const Weights*> pointers;
    void add(std::unique_ptr<TestLayer> layer);
    specpress::Projection projection() const { return {static_cast<int64_t>(pointers.size()), pointers.data()}; }
    // What they make of one row, side by side.
    std::vector<double> of(const Floats& x) const;
};

struct TestBlock {
    Floats input_norm, mlp_norm, query_norm, key_norm, query_norms, key_norms;
    Floats taps, tap_bias, step, rate, delta_query, delta_key, delta_norm;
    Floats space_taps, space_bias, space_step, space_rate, skip, space_norm, multipliers;
    specpress::Convolution convolution;
    specpress::Delta delta;
    specpress::Mamba mamba;
    Parts qkv, out, router, gate, into, space_out, own_gate, own_out;
    Floats own_norm;
    specpress::LayerGate own;
    std::vector<Parts> gate_up, down;  // one, or as many as experts
    std::vector<specpress::Projection> gate_up_projections;
    std::vector<const Weights*> down_pointers;
    specpress::Mixture mixture;
};

struct TestModel {
    TestModel(const ModelShape& s, Random& random, specpress::Pool& pool);
    Floats embedding_of(int64_t token) const;

    ModelShape shape;
    std::vector<TestBlock> blocks;
    std::vector<specpress::Layer> layers;
    Parts head, projection;
    specpress::Heads heads;
    Floats input_table, input_norm;
    specpress::LayerInputs inputs;
    Floats norm, embedding32, cos, sin;
    std::vector<uint16_t> embedding16;
    specpress::Model model{};
};

// The model by the textbook, one request, float32 cache: [tokens][vocabulary].
std::vector<double> textbook(const TestModel& m, const std::vector<int64_t>& tokens);

}  // namespace kernels_test
