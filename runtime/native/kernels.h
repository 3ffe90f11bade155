// What passes between the decoder, the kernels of each instruction path, and Python (binding.py mirrors it).
#pragma once

#include <cstdint>

namespace specpress {

// NESTED is int8 in two planes of nibbles, of which UPPER reads the upper one alone: the draft's product (nested.cpp).
enum Kind : int64_t { F32 = 0, BF16 = 1, INT8 = 2, INT4 = 3, NF4 = 4, TERNARY = 5, NESTED = 6, UPPER = 7, TRELLIS = 8, THREE_OF_FOUR = 9, KINDS = 10 };
enum ScaleType : int64_t { SCALE_F32 = 0, SCALE_BF16 = 1, SCALE_F16 = 2 };

constexpr int64_t BLOCK = 32;  // outputs of one small product

// A linear layer, laid out in blocks of 32 outputs (pack.cpp). 64 bytes hold 16 outputs times 1 (f32), 2 (bf16),
// 4 (int8), 8 (int4, nf4, a plane of nested) or 16 (ternary) inputs; two such vectors stand side by side. Of a trellis
// two sequences do, of 16 outputs by 16 inputs each; of three_of_four.h's patterns five vectors and then five.
struct Weights {
    int64_t kind;
    int64_t outputs, inputs;
    int64_t group;         // inputs that share a scale, padded to whole vectors; float kinds: all of them
    int64_t group_inputs;  // the same, not padded
    int64_t groups;
    int64_t zero;          // what a stored code of 0 stands for, negated: int4 8 or 0
    int64_t scale_type;
    int64_t bits;          // of a trellis: 2, 3 or 4 a weight
    const uint8_t* codes;
    const void* scale;     // [blocks][groups][32]
    const float* offset;   // [blocks][groups][32] or null
    const int32_t* sums;   // int8: −128 Σ codes, [blocks][groups][32]
    const float* bias;     // [outputs padded to 32] or null
    const int32_t* perm;   // [inputs] or null: codes[:, j] belongs to input perm[j]
    const float* input_scale;  // static activations, or null
    const int8_t* levels;      // what codes stand for: [16] of nf4 and what is stored alike, [128] of a trellis; else null
};

// Whether all sixteen levels are within ±LOW, as mxfp4's are, which are twice what they stand for.
constexpr int LOW = 12;
inline bool low_levels(const Weights& w) {
    for (int i = 0; i < 16; i++)
        if (w.levels[i] < -LOW || w.levels[i] > LOW) return false;
    return true;
}

// Bytes of one plane of a nested layer; the lower plane follows the upper one.
inline int64_t plane_bytes(const Weights& w) { return (w.outputs + BLOCK - 1) / BLOCK * w.groups * (w.group / 8) * 128; }

// Inputs as a layer wants them. Two layers with equal keys can share them.
struct Inputs {
    int64_t rows, stride, groups;
    const float* values;  // float kinds: [rows][stride]
    const int8_t* codes;  // others: [rows][stride]
    const float* step;    // [rows][groups]
    const int32_t* sums;  // [rows][groups]
    // Of paths that multiply words (Path::widen), else null: the codes once more, of each four the second and fourth, then
    // the first and third, and Σ of the products of the first two and of the last two.
    const int16_t* wide;   // [rows][stride]
    const int32_t* pairs;  // [rows][groups]
};

// Where keys and values of one request lie. Float: keys [layers][blocks][heads][dim][64], values [layers][blocks][heads][64][their
// dimensions padded to 16]. Quantised: the same in bytes (int8) or nibbles (int4: key j beside key j + 32, dimension i beside
// i + dim/2), or in groups of sixteen three-bit codes (int3: six bytes, vec.h), with one scale per key and head,
// [layers][blocks][heads][64].
struct Store {
    void* keys;
    void* values;
    float* key_scale;
    float* value_scale;
    int64_t blocks;
    const int64_t* table;  // [the request's blocks]: which of `blocks` each of them is (a page); null: the same
    // States of layers that carry one: [held][width] floats, that after a slot at the slot modulo `held` (cache/states.py);
    // as halves, in 16 bits each; or in bytes, of which `width` counts.
    void* states = nullptr;
    int64_t held = 0, width = 0, state_kind = 0;
};
enum StateKind : int64_t { STATES_F32 = 0, STATES_F16 = 1, STATES_INT8 = 2 };
enum CacheKind : int64_t { CACHE_F32 = 0, CACHE_INT8 = 1, CACHE_INT4 = 2, CACHE_INT3 = 3 };

struct Heads {
    int64_t heads, kv_heads, dim;
    int64_t rotated;      // dimensions that rotate, even
    int64_t cache_kind;
    const float* key_factor;  // [layers][kv_heads][dim]: keys are divided by it before they are quantised; null: 1
    int64_t value_dim = 0;    // dimensions of values; 0: as many as of keys
    // What keys and values are written in (basis.cpp): [layers][kv_heads][3][dim][dim], of values their dimensions; null: as they are.
    const float *key_basis = nullptr, *value_basis = nullptr;
};
inline int64_t values_of(const Heads& h) { return h.value_dim ? h.value_dim : h.dim; }
// Queries, keys and values of a row, side by side.
inline int64_t row_of_heads(const Heads& h) { return (h.heads + h.kv_heads) * h.dim + h.kv_heads * values_of(h); }

// Slots from[i] of the memory of a cache in floats or int8 to to[i], in all layers; all are read first (moves.cpp).
void move_slots(const Heads& h, int64_t layers, const Store& s, int64_t count, const int64_t* from, const int64_t* to);

// One forward's rows. A row sees keys first..position of its request (first by the window).
struct Batch {
    int64_t rows;
    const int64_t* tokens;
    const int64_t* request;   // index into stores
    const int64_t* position;
    const int64_t* slot;      // where its key goes
    const int64_t* tail_from;   // position from which `tail` says the slots; before it slot = position
    const int64_t* tail_at;     // index of its tail in `tail`, -1: none (a chain)
    const int64_t* tail;
    const Store* stores;
    const int64_t* before = nullptr;  // the slot of what a row follows, below 0: nothing; null: all are chains
    // Where layers have keys of several shapes: stores are [shapes][requests], the states in the first.
    int64_t requests = 0;
};

// What follows a gate, or stands between two layers. binding.py has the same numbers.
enum Activation : int64_t { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3, RELU2 = 4, XIELU = 5, CLAMPED_SWIGLU = 6 };

// How a mixture chooses (kernels/routing.py); `correction` [experts] is added to choose by, or null.
enum Scoring : int64_t { SOFTMAX = 0, SIGMOID = 1, SPARSE_MIXER = 2 };
struct Routing {
    int64_t experts, chosen, renormalize, scoring = SOFTMAX;
    int64_t groups = 1, groups_chosen = 1, group_best = 1;
    float scale = 1.0f, tolerance = 0.0f;
    const float* correction = nullptr;
    int64_t scaled_inputs = 0;  // a share multiplies what its expert reads
    const float* expert_scale = nullptr;  // [experts], what an expert's share is multiplied by in the end, or null
};

struct AttentionCall {
    Heads heads;
    int64_t layer;
    int64_t window;   // 0: none
    float scaling;
    const Batch* batch;
    const float* queries;  // [rows][stride], rotated
    int64_t stride;
    float* out;            // [rows][heads * values_of(heads)]
    float softcap;         // of the scores; 0: none
    const float* sinks;    // [heads] scores that have no values; or null
    int64_t chunked = 0;   // windows do not slide: a row sees the chunk of so many positions that it is in
};
// The first position that a row sees.
inline int64_t first_seen(const AttentionCall& c, int64_t position) {
    if (!c.window) return 0;
    return c.chunked ? position / c.window * c.window : position >= c.window ? position - c.window + 1 : 0;
}

// A piece of attention: rows first..first+count of one request and one key head; heads of the queries from..to.
struct AttentionUnit {
    int64_t row, rows, kv_head, head_from, head_to;
};

// Positions that some row of a unit sees.
struct Reach {
    int64_t first, last;
};
inline Reach reach(const AttentionCall& c, const AttentionUnit& u) {
    Reach all = {INT64_MAX, -1};
    for (int64_t row = u.row; row < u.row + u.rows; row++) {
        const int64_t last = c.batch->position[row], first = first_seen(c, last);
        all.first = first < all.first ? first : all.first;
        all.last = last > all.last ? last : all.last;
    }
    return all;
}

constexpr int64_t KEYS = 64;     // keys of a cache block
constexpr int64_t SPLIT = 512;   // positions whose weights share a maximum: a fixed split, by logical position

// What a path offers.
struct TrellisTask;

// A row of one head's gated delta rule: matrices are [keys][values]; without `from` the one before is all zeros.
struct DeltaStep {
    const float *from, *q, *k, *v;
    float left, share;  // what stays of the matrix, and by how much of what it lacks it is corrected
    int64_t keys, values;
    float *to, *out;
};

// A row of one head's state space: matrices are [state][dim]; without `from` the one before is all zeros.
struct MambaStep {
    const float *from, *x, *b, *c;
    float step, left, skip;  // what the input is multiplied by, what stays of the matrix, and how much of x is added
    int64_t state, dim;
    float *to, *out;
};

// Keys of the drafter `block`, dimension by dimension, as far as whole vectors of them; and values, row by row.
struct BlockSeen {
    const float *keys, *values;
    int64_t count, key_stride, value_stride;
};
// A row and head: what it sees of the text, and then of the block's own rows.
struct BlockLook {
    const float* query;
    BlockSeen text, own;
    int64_t dim;
    float scale;
    float *weights, *out;  // [count of both, each in whole vectors], [dim]
};

// What it remembers behind a token, having remembered `before` (null: nothing, which is zeros): of_token, of_row and constant [2 * rank], of_memory [rank][2 * rank].
struct BlockStep {
    const float *of_token, *of_row, *constant, *of_memory, *before;
    int64_t rank;
    float *gates, *after;  // [2 * rank], [rank]
};

// What its memory [rank] makes of the logits of tokens [count]: adds [vocabulary][rank] bf16, scores [count, in whole vectors].
struct BlockWeigh {
    const uint16_t* adds;
    const float *memory, *logits;
    const int64_t* tokens;
    int64_t count, rank;
    float *scores, *highest;
};

struct Path {
    // y[row][n] (+)= product of inputs and the blocks first..last of w; y has `stride` floats a row.
    void (*linear[KINDS])(const Weights& w, const Inputs& x, int64_t first, int64_t last, float* y, int64_t stride, bool add);
    // One row of inputs as layer w wants them. `values` has w.inputs floats; scratch as many.
    void (*quantize)(const Weights& w, const float* values, int8_t* codes, float* step, int32_t* sums, float* scratch);
    // One row's codes as words, where w's products want them (words.h); null where the path multiplies bytes.
    void (*widen)(const Weights& w, const int8_t* codes, int16_t* wide, int32_t* pairs);
    // out = x / rms(x) · (weight + offset); scratch: the next power of two above `size` floats.
    void (*norm)(const float* x, const float* weight, int64_t size, float eps, float offset, float* out, float* scratch);
    // (x − mean) / sqrt(variance + eps) · weight + bias (or null); scratch as for `norm`.
    void (*layer_norm)(const float* x, const float* weight, const float* bias, int64_t size, float eps, float* out, float* scratch);
    // act(gate) · up, or act(gate) where `up` is null; parameters of activations that have some.
    void (*gated)(const float* gate, const float* up, int64_t size, int64_t activation, const float* parameters, float* out);
    // In place: cap · tanh(x / cap); 1 / (1 + e^−x).
    void (*capped)(float* x, int64_t size, float cap);
    void (*sigmoid)(float* x, int64_t size);
    // e^(rate · ln(1 + e^x)), as kernels/delta.py has it.
    void (*decay)(const float* x, const float* rate, int64_t size, float* out);
    void (*delta_step)(const DeltaStep& step);
    // Each head's step, in place, of what it is made of, and what it leaves of its matrix (kernels/mamba.py, steps).
    void (*mamba_steps)(float* x, const float* rate, int64_t size, float low, float high, float* left);
    void (*mamba_step)(const MambaStep& step);
    // To the nearest half, of two the even one, and back (halves.cpp).
    void (*to_halves)(const float* x, int64_t size, uint16_t* out);
    void (*from_halves)(const uint16_t* x, int64_t size, float* out);
    // Rows of `size` floats, each to its scale and as many codes in int8, and back (rows.cpp).
    void (*to_codes)(const float* x, int64_t rows, int64_t size, uint8_t* out);
    void (*from_codes)(const uint8_t* x, int64_t rows, int64_t size, float* out);
    void (*rotate)(float* x, int64_t heads, int64_t dim, int64_t half, const float* cos, const float* sin);
    // out = x · matrix, of [size] by [size][size]: each sum first to last, no product fused.
    void (*turn)(const float* x, const float* matrix, int64_t size, float* out);
    void (*remember)(const Heads& h, int64_t layer, const Store& s, int64_t slot, const float* key, const float* value, int64_t first, int64_t last);
    // A unit's rows; `parts`: the sums of its splits, one after the other, from attend_split, or null: they are made here.
    void (*attend)(const AttentionCall& call, const AttentionUnit& unit, float* parts, float* scratch);
    void (*attend_split)(const AttentionCall& call, const AttentionUnit& unit, int64_t split, float* scratch, float* part);
    // Router scores to shares, in place (0 for experts that are not chosen), and the chosen experts of each row.
    void (*choose)(float* scores, int64_t rows, const Routing& routing, int64_t* which);
    int64_t (*attention_scratch)(const Heads& h);  // floats
    int64_t (*attention_part)(const Heads& h);     // floats of one split's sums
    int64_t (*tile_rows)();
    // Where the first `limit` of `size` logits are largest, the first of equals; -1: among all of them is a NaN or +inf, or
    // among the first nothing above -inf.
    int64_t (*largest)(const float* x, int64_t size, int64_t limit);
    // The sequences of tiles begin..end of a column of a trellis (trellis_encode.cpp).
    void (*encode)(const TrellisTask& task, int64_t begin, int64_t end);
    // Of the drafter `block` (block_math.cpp): an inner product; scores, whose sum of e^(score − highest) it returns; attention;
    // its memory.
    float (*dot)(const float* a, const float* b, int64_t size);
    float (*weigh)(const BlockWeigh& w);
    void (*look)(const BlockLook& l);
    void (*block_step)(const BlockStep& s);
    // Reads a multiple of 256 bytes once, as fast as it can (memory.cpp).
    int64_t (*read)(const uint8_t* data, int64_t size);
    bool unsigned_dot;
};

}  // namespace specpress
