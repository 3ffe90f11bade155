// The drafter `block` in one call (speculative/drafters/block_network.py has its meaning).
#pragma once

#include "decoder.h"

namespace specpress {

struct BlockLayer {
    const float *attention_norm, *mlp_norm;
    const Weights *query, *keys_values, *output, *gate_up, *down;
};

struct BlockNetwork {
    int64_t taps, hidden, length, layers, heads, kv_heads, dim, intermediate, window, rank, vocabulary;
    int64_t logits;         // rows of `head`: the vocabulary's, or the frequent tokens'
    float eps;
    const float *tap_norms, *fuse_norm, *places, *norm;  // [taps][hidden], [hidden], [length][hidden], [hidden]
    const Weights *fuse, *common, *of_row, *head;
    const Weights* whole;   // the target's own head, asked where the short one is unsure of a first token
    const int64_t* frequent;                             // [logits]: the tokens of a short head, in order; null: it is not short
    const BlockLayer* layer;
    const float *of_token, *of_memory, *gates;           // [vocabulary][2 * rank], [rank][2 * rank], [2 * rank]
    const uint16_t* adds;                                // [vocabulary][rank] bf16
    const float* sure;                                   // [hidden + rank + 2]
    const void* embedding;                               // [vocabulary][hidden], of a ScaleType
    int64_t embedding_type;
};

// One text; `end` is the place of its last token. Of tokens before it some states may never have come.
struct BlockText {
    float* keys_values;     // [layers]: keys [kv_heads * dim][capacity] and values [capacity][kv_heads * dim]
    float* last;            // [hidden]: the last fused state
    int64_t capacity, held, end;
    const float* unread;    // [fresh][taps * hidden]: states that were not read yet
    const int64_t* at;      // [fresh]: the places of their tokens, in order
    int64_t fresh;          // at most the window
    int64_t token;
    int64_t budget;         // nodes of its tree; 0: it is grown elsewhere
};

// How trees grow: the most children of a node, below which probability a token is not worth a row, and below which one
// of a first token a short head is not believed.
struct BlockGrowth {
    int64_t branch, considered;
    double worth, unsure;
};

// What a draft's places are: [requests * length] rows, what these say of gates, and the head's logits without the memory's part.
struct BlockPlaces {
    float *rows, *of_row, *base;
};

// A tree for each text: tokens and parents [requests][stride], and how many there are.
struct BlockTrees {
    int64_t *tokens, *parents, *counts;
    int64_t stride;
};

class BlockDraft {
   public:
    BlockDraft(const BlockNetwork& network, const Model& workspace, const Path& path, Pool& pool)
        : net_(network), path_(path), pool_(pool), work_(workspace, path, pool), ones_(static_cast<size_t>(network.hidden), 1.0f) {}

    // Reads what texts have not read, computes `length` places behind each, and grows the trees that have a budget. False
    // where logits are not finite.
    bool draft(const float* cos, const float* sin, BlockText* texts, int64_t requests, int64_t length, const BlockGrowth& growth,
               const BlockPlaces& places, const BlockTrees& trees);

   private:
    // The best of the tokens considered behind a node: children in order, and their shares.
    struct Children {
        std::vector<int64_t> tokens;
        std::vector<double> shares;
    };
    // Tokens of a place that the memory chooses among, and their logits without its part.
    struct Considered {
        std::vector<int64_t> tokens;
        std::vector<float> logits;
    };
    struct Node {
        int64_t token, parent, depth;
        double joint;
    };

    void product(const Weights* w, const float* x, int64_t rows, float* y) {
        const Projection one = {1, &w};
        work_.project(one, x, rows, y);
    }
    void norm(const float* x, const float* weight, float* out) {
        path_.norm(x, weight, net_.hidden, net_.eps, 0.0f, out, scratch_.data());
    }
    // Floats of a row's weights: of the text and of the block, each in whole vectors.
    int64_t weights_of_row() const { return (net_.window + net_.length + 3 * LINE) / LINE * LINE; }
    void read(BlockText* texts, int64_t requests);
    void append(BlockText& text, int64_t layer, const float* found);
    void run_layer(const BlockLayer& layer, int64_t number, const BlockText* texts, int64_t requests, int64_t length);
    void grow(const BlockText& text, int64_t length, const BlockGrowth& growth, const BlockPlaces& places, const BlockTrees& trees, int64_t request);
    void consider(const float* base, int64_t size, const int64_t* names, int64_t count, Considered& found);
    void judge(const float* memory, const Considered& found, int64_t branch, Children& out);
    double confidence(const float* row, const float* memory, Children& of) const;
    void expand(const BlockPlaces& places, int64_t depth, int64_t token, const float* before, const BlockGrowth& growth, float* after, Children& out);

    const BlockNetwork net_;
    const float *cos_ = nullptr, *sin_ = nullptr;  // of the draft that is being made: [places][dim / 2]
    const Path& path_;
    Pool& pool_;
    std::mutex one_;
    Decoder work_;
    const std::vector<float> ones_;
    std::vector<float> scratch_, tapped_, fused_, read_, x_, normed_, queries_, own_, mixed_, own_keys_, branch_, gate_up_, gated_, weights_;
    std::vector<float> memories_, gates_, scores_, whole_;
    std::vector<uint8_t> steps_;
    std::vector<Node> nodes_;
    std::vector<Children> children_;
    std::vector<Considered> considered_;
};

}  // namespace specpress
