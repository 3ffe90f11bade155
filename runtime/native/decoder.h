// The decoder on packed weights, as the record says it (checkpoints/record.py): one call is one forward of any rows.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace specpress {

// Layers of one input, side by side in the output.
struct Projection {
    int64_t parts;
    const Weights* const* weights;
};

// What a norm multiplies by and adds; without a weight there is no norm.
struct Norm {
    const float* weight;
    const float* bias;        // or null
};

// An MLP beside a mixture (model/layers.py, MlpBeside).
struct MlpBeside {
    Projection gate_up;
    const Weights* down;
    Norm mlp_output_norm, router_norm, input_norm, output_norm;
};

struct Mixture {
    Routing routing;
    const Weights* router;
    const Projection* gate_up;        // [experts]
    const Weights* const* down;       // [experts]
    // An MLP that every row goes through besides, or null, and what gates it, or null.
    Projection shared_gate_up;
    const Weights* shared_down;
    const Weights* shared_gate;
    const MlpBeside* beside;          // or null
};

// Where the layers' own inputs come from (model/reference.py, layer_inputs): rows of a table, and what a layer makes.
struct LayerInputs {
    const void* table;         // [vocabulary][layers * size]
    int64_t table_type, size;  // SCALE_F32, SCALE_BF16, SCALE_F16
    const Weights* projection;
    Norm norm;                 // of a layer's part of what the projection makes
    float made_scale, row_scale, scale;  // of what is made, of the table's rows, and of both
};

// What a layer does with its own input (model/layers.py, LayerGate).
struct LayerGate {
    const Weights* gate;
    const Weights* out;
    Norm norm;
};

// Latent attention, beside qkv (model/layers.py, LatentHeads); query: from the vector of queries, or null.
struct Latent {
    const float* query_norm;
    const Weights* query;
    const float* norm;
    const Weights* const* keys;    // [heads]
    const Weights* const* values;  // [heads]
    int64_t rotated, plain;        // dimensions of a head's query
    float eps;
};

// In attention's place, beside qkv, which makes gate, second gate and input, and out (checkpoints/mixers.py, Convolution).
struct Convolution {
    const float* taps;   // [count][channels], the oldest input's first
    const float* bias;   // [channels], or null
    int64_t count;
};

// In attention's place, beside qkv and out: a gated delta rule (model/layers.py, DeltaRule). qkv makes queries, keys and
// values, gates, and for each value head a correction and what becomes its decay.
struct Delta {
    const float *taps, *step, *rate, *query, *key, *norm;
    int64_t count, key_heads, value_heads, key_dim, value_dim;
    float eps;  // of the norms of queries and keys
};

// In attention's place or beside it: a state space (model/layers.py, StateSpace). `into` makes gates, inputs, Bs, Cs and steps.
struct Mamba {
    const Weights *into, *out;
    const float *multipliers, *taps, *bias, *step, *rate, *skip, *norm;  // null: no multipliers, bias, norm
    int64_t count, heads, dim, groups, state;
    int64_t gate_first;             // outputs are normed behind their gates
    float low, high, read, added;   // a step's limits; multipliers of what it reads, and of what it adds
};
// Inputs, Bs and Cs of a row.
inline int64_t channels_of(const Mamba& m) { return m.heads * m.dim + 2 * m.groups * m.state; }

struct Layer {
    Norm input_norm, attention_norm, mlp_norm, output_norm;  // before and after attention, before and after the MLP
    const float* query_norm;  // [heads * dim], or null
    const float* key_norm;
    const float* value_norm;
    const float* sinks;       // [heads], or null
    Projection qkv;           // unused without `out`
    const Weights* out;       // null: nothing stands in attention's place
    int64_t window;
    int64_t rotary;           // which table rotates it; below 0: none
    int64_t grows;            // whether queries are multiplied by Angles::growth
    Projection gate_up;       // unused with a mixture and without an MLP
    const Weights* down;      // null: neither of them is there, or a mixture
    const float* parameters;  // of the activation, or null
    const Mixture* mixture;   // or null
    const Latent* latent;     // or null
    const Convolution* convolution;  // or null
    const Delta* delta;       // or null
    const Mamba* mamba;       // or null
    const Weights* gate;      // whose sigmoids multiply what attention mixes, one for each dimension or each head, or null
    // Which of the model's heads it has, and the number of its keys among those of such layers.
    int64_t group, keys;
    int64_t shares;           // keys and values are another layer's: qkv makes queries alone
    int64_t keys_as_values;   // qkv makes queries and keys, and values are the keys before their norm
    const LayerGate* own;     // or null
    float scale = 1.0f;       // what the stream behind it is multiplied by
};

struct Model {
    const Heads* heads;  // [groups]: layers with keys of one shape lie in one memory; all have as many query heads
    int64_t groups;
    int64_t layers, hidden, intermediate, vocabulary;
    int64_t activation, gated;             // Activation; whether there is a gate besides the factor
    int64_t layer_norm, parallel;          // by mean and variance; attention and MLP read the same
    int64_t norm_of_heads, norm_rotated;   // queries and keys are normed all heads as one; after they are rotated
    int64_t tables;                        // of rotary angles
    int64_t chunked;                       // AttentionCall has it
    float norm_eps, embedding_scale, attention_scaling, logits_scale, softcap, final_softcap;
    // Multipliers of what attention reads, of what is added in its place, of an MLP's gates, and of what it adds.
    float attention_read, attention_added, mlp_gates, mlp_added, own_added;
    const Layer* layer;
    Norm norm;
    const Weights* head;
    const void* embedding;    // [vocabulary][hidden], or null: the rows of the head
    int64_t embedding_type;   // SCALE_F32, SCALE_BF16, SCALE_F16
    const float* positions;   // [positions][hidden] that are added to the embedding, or null
    const LayerInputs* inputs;  // or null
};

// What a forward gives besides, of every row: the residual stream behind so many layers (0: the embedding), side by side.
struct Taken {
    int64_t count;
    const int64_t* taps;  // [count]
    float* out;           // [rows][count][hidden]
};

// What depends on positions alone, by position.
struct Angles {
    const float* const* cos;  // [tables][positions][rotated / 2]
    const float* const* sin;
    const float* growth;      // what queries are multiplied by, or null
};

// Whether all sizes fit each other and what the kernels hold: what they write is sized by them.
bool sound(const Model& model);

// How one forward's attention is cut up: rows of one request share a unit where there are few query heads to a key head.
void units_of(const Heads& h, const Path& path, const Batch& batch, std::vector<AttentionUnit>& units);

// The splits of all units and their sums, where threads share a unit.
struct SharedText {
    struct Piece {
        int64_t unit, split;
    };
    std::vector<int64_t> first;  // of a unit's pieces
    std::vector<Piece> pieces;
    std::vector<float> sums;
};

// Whether threads would wait for each other if each took whole units, as with few long texts; if so, lists the pieces.
bool shares_text(const AttentionCall& call, const std::vector<AttentionUnit>& units, int threads, SharedText& text);

// All rows of a batch against their keys; `scratch` gives a thread's floats (Path::attention_scratch of them). The order of
// all sums is the splits', so that no bit depends on who computes them.
template <class Scratch>
void attend_all(const Path& path, Pool& pool, const AttentionCall& call, const std::vector<AttentionUnit>& units, SharedText& text,
                Scratch&& scratch) {
    const int64_t count = static_cast<int64_t>(units.size()), pieces = count / (4 * pool.threads());
    const bool shared = pool.threads() > 1 && shares_text(call, units, pool.threads(), text);
    const int64_t size = shared ? path.attention_part(call.heads) : 0;
    if (shared) {
        const int64_t splits = static_cast<int64_t>(text.pieces.size());
        if (static_cast<int64_t>(text.sums.size()) < splits * size) text.sums.resize(static_cast<size_t>(splits * size));
        pool.run(splits, 1, [&](int thread, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++)
                path.attend_split(call, units[text.pieces[i].unit], text.pieces[i].split, scratch(thread), text.sums.data() + i * size);
        });
    }
    pool.run(count, pieces < 1 ? 1 : pieces > 8 ? 8 : pieces, [&](int thread, int64_t begin, int64_t end) {
        for (int64_t u = begin; u < end; u++)
            path.attend(call, units[u], shared ? text.sums.data() + text.first[u] * size : nullptr, scratch(thread));
    });
}

constexpr int64_t LINE = 64;  // bytes

// Numbers first to first + count of a table of SCALE_F32, SCALE_BF16 or SCALE_F16 (decoder.cpp).
void unpack_floats(const void* table, int64_t type, int64_t first, int64_t count, float* out);

// How a chain is sampled: exponential noise [limit] for each of its steps; without `steps` it is greedy.
struct ChainNoise {
    double temperature;
    const double* const* steps;
};

class Decoder {
   public:
    Decoder(const Model& model, const Path& path, Pool& pool);

    // Runs the rows, stores their keys and values, and gives norms and logits of rows at[0..count). taken: or null.
    // best: or null, and then logits may be: of each of these rows the first of the largest logits, -1 where they are no numbers.
    void forward(const Batch& batch, const Angles& angles, const int64_t* at, int64_t count, float* hidden, float* logits,
                 const Taken* taken, int64_t* best);

    // Continuation (draft.cpp). `first` holds, per request in order, a chain of rows; then each request goes on by
    // itself: the first of the largest logits 0..limit, or what `noise` (null, or one for each request) makes of them,
    // becomes its next row, until tokens[request][0..steps[request]) are known. The last of them is not run. `stride`: the tokens of a row of `tokens`. The caches have room, and the rotary
    // tables reach as far. False where logits are not finite: then nothing in `tokens` is of use.
    bool draft(const Batch& first, const Angles& angles, int64_t requests, const int64_t* steps, int64_t limit,
               int64_t* tokens, int64_t stride, const ChainNoise* noise);

    // y[rows][outputs] = x[rows][inputs] Wᵀ for layers of one input, side by side.
    void project(const Projection& p, const float* x, int64_t rows, float* y);

    // How many experts' weights forwards have read so far: one that several rows share counts once a forward.
    int64_t experts_read() const { return experts_read_; }

   private:
    // Inputs as one of the parts of a projection wants them; parts with equal wants share.
    struct Want {
        const Weights* of;
        std::vector<float> values;
        std::vector<int8_t> codes;
        std::vector<float> step;
        std::vector<int32_t> sums;
        int64_t rows = 0, first = 0, group = -1;  // of all groups, and those of the group that came last
        bool wide = false;                        // whether the path wants words, too
        std::vector<int16_t> words;
        std::vector<int32_t> pairs;
        int64_t stride;
        // At the beginning of a line of the cache: loads of 64 codes then touch one each.
        int8_t* first_code() { return codes.data() + (LINE - reinterpret_cast<uintptr_t>(codes.data()) % LINE) % LINE; }
    };
    // Where a part of a group finds its inputs: of which want, from which of its rows on; known: for an earlier part, too.
    struct Place {
        int64_t want, first;
        bool known;
    };
    // What several rows go through besides others, and where its products go: y[rows][stride].
    struct Group {
        const Projection* p;
        int64_t rows;
        float* y;
        int64_t stride;
    };
    // An MLP, and how many rows it takes.
    struct Fed {
        const Projection* gate_up;
        const Weights* const* down;
        int64_t rows;
        bool scaled;  // a row's factor multiplies what it takes, not what it makes
    };
    // The rows that a draft feeds itself: one per request that still grows.
    struct Growing {
        std::vector<int64_t> owner, token, position, at, zeros, chain;
        std::vector<float> hidden, logits;
        void reach(int64_t requests, int64_t hidden_size, int64_t vocabulary);
    };

    template <class F>
    void rows_of(int64_t rows, int64_t work, F&& f);
    template <class F>
    void prepare(const Projection& p, int64_t rows, F&& row_of);
    template <class F>
    void prepare(const Group* groups, int64_t count, F&& row_of);
    void multiply(const Projection& p, int64_t rows, float* y, int64_t stride, bool add);
    void multiply(const Group* groups, int64_t count, bool add);
    void run(const Batch& batch, const Angles& angles, const Taken* taken = nullptr);
    void take(const Taken* taken, int64_t behind, int64_t rows);
    void read_out(const int64_t* at, int64_t count, float* hidden, float* logits);
    void choose(const float* logits, int64_t count, int64_t* best);
    void embed(const Batch& batch);
    void make_inputs(const Batch& batch);
    void add_input(const Layer& layer, int64_t number, int64_t rows);
    void normalize(const Norm& norm, const float* x, int64_t size, float* out, float* scratch);
    void norm_heads(const float* weight, float* x, int64_t heads, int64_t head_dim, float* scratch);
    const float* normed(const Norm& norm, int thread, int64_t row);
    const float* scaled(const float* x, float scale, int thread);
    void remember(const Layer& layer, const Batch& batch);
    void attend(const Layer& layer, const Batch& batch, const Angles& angles);
    void turn_heads(const Heads& h, const float* basis, int64_t layer, float* x, int64_t size);
    void convolve(const Layer& layer, int64_t state, const Batch& batch);
    void delta(const Layer& layer, int64_t state, const Batch& batch);
    void read_mamba(const Layer& layer, int64_t rows);
    void mamba(const Layer& layer, int64_t state, const Batch& batch);
    void filter(const Batch& batch, int64_t state, const float* input, int64_t stride, int64_t channels, const float* taps,
                int64_t count, const float* bias, float* out);
    void gate(const Layer& layer, int64_t rows);
    void make_queries(const Layer& layer, int64_t rows);
    void by_head(const Weights* const* heads, int64_t rows, const float* x, int64_t x_row, int64_t x_head, float* y, int64_t y_row, int64_t y_head);
    void add_mixed(const Layer& layer, int64_t rows);
    void branch(const Weights* out, const Norm& after, float scale, int64_t rows);
    void add_branch(const float* y, const Norm& after, float scale, int64_t rows);
    void mlp(const Layer& layer, int64_t rows);
    void mix(const Layer& layer, int64_t rows);
    void mix_some(const float* parameters);
    void mix_beside(const Layer& layer, int64_t rows);
    template <class F>
    void feed(const float* parameters, F&& row_of);
    float* scratch(int thread) { return scratch_.data() + thread * scratch_size_; }

    Model model_;
    const Path& path_;
    Pool& pool_;
    std::mutex one_;
    int64_t scratch_size_ = 0, widest_ = 0, experts_read_ = 0;
    std::vector<float> scratch_;
    std::vector<Want> wants_;
    std::vector<Place> places_;
    std::vector<int64_t> first_rows_;
    std::vector<Fed> fed_;
    std::vector<Group> groups_, outs_;
    std::vector<Projection> downs_;
    std::vector<float> x_, qkv_, mixed_, latent_, made_, left_, queries_, of_head_, values_, gate_up_, logits_, normed_, branch_, expert_, sum_, share_, shared_share_, inputs_;
    std::vector<int64_t> chosen_, members_;
    std::vector<float> factors_;
    std::vector<std::vector<AttentionUnit>> units_;  // of each group of layers
    SharedText text_;
    Growing growing_;
};

}  // namespace specpress
