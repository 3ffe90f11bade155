// Viterbi's algorithm over the tiles of a column, with GPTQ's feedback inside of them.
//
// Weight t of a tile is output t % 64 / 4, input 4 (t / 64) + t % 4. Its state is the sequence's bits [bits t, bits t + 8),
// so two neighbours share a node: the upper 8 − bits of the one are the lower of the other. The error of an input changes
// the targets of later inputs of its output. Four neighbours of an output are next to each other in the sequence: each
// survivor carries the errors of its own. The inputs before lie 61 weights and more back, where the survivors have long met:
// what the best one did there is taken for decided.
//
// The sequence is circular. A first lap, which goes a little beyond its end into its beginning again, finds the node at
// which it shall close; the second starts and ends there.
#include "trellis.h"

#include <cstring>

namespace specpress {

namespace {

constexpr int TILE = TRELLIS_TILE, STATES = TRELLIS_STATES, STEPS = TILE * TILE;
constexpr int BEYOND = 32;      // steps of the first lap beyond the end
constexpr int DECIDED = 64;     // steps back that are looked up
constexpr int PART = 32;        // steps between two such looks
constexpr float NEVER = 1e30f;  // above every cost

template <int BITS>
class Encoder {
   public:
    Encoder(const TrellisTask& task) : task_(task) {
        for (int s = 0; s < STATES; s++) {
            const float level = task.levels[s & 127];
            level_[s] = s & 128 ? -level : level;
        }
    }

    // Output tile `number`.
    void encode(int64_t number) {
        read(number);
        for (float& node : node_) node = 0.0f;
        for (int t = 0; t < STEPS + BEYOND; t++) {
            if (t) close(t);
            open(t % STEPS, t);
        }
        const int node = trace(STEPS + BEYOND - 1, STEPS) % NODES;
        for (int q = 0; q < NODES; q++) node_[q] = q == node ? 0.0f : NEVER;
        for (int t = 0; t < STEPS; t++) {
            if (t) close(t);
            open(t, t);
        }
        int last = node * CHILDREN;
        for (int a = 1; a < CHILDREN; a++)
            if (cost_[node * CHILDREN + a] < cost_[last]) last = node * CHILDREN + a;
        follow(last, STEPS - 1, 0);
        write(number);
    }

   private:
    static constexpr int CHILDREN = 1 << BITS, NODES = STATES >> BITS;

    static int output_of(int t) { return t % 64 / 4; }
    static int input_of(int t) { return t / 64 * 4 + t % 4; }

    void read(int64_t number) {
        for (int o = 0; o < TILE; o++) {
            const int64_t n = number * TILE + o;
            const bool there = n < task_.outputs;
            scale_[o] = there ? task_.scale[n] : 0.0f;
            for (int i = 0; i < TILE; i++) {
                const bool real = there && i < task_.inputs;
                weight_[o][i] = real ? task_.weights[i * task_.outputs + n] : 0.0f;
                carried_[o][i] = real ? task_.carried[i * task_.outputs + n] : 0.0f;
                error_[o][i] = 0.0f;
            }
        }
    }

    // The better way into each node between t − 1 and t, and the errors that it has made of this output.
    void close(int t) {
        uint8_t* from = from_[t];
        for (int q = 0; q < NODES; q++) {
            float best = cost_[q * CHILDREN];
            int way = 0;
            for (int a = 1; a < CHILDREN; a++) {
                const bool less = cost_[q * CHILDREN + a] < best;
                best = less ? cost_[q * CHILDREN + a] : best;
                way = less ? a : way;
            }
            node_[q] = best;
            from[q] = static_cast<uint8_t>(way);
        }
        for (int i = 0; i < t % 4; i++)
            for (int q = 0; q < NODES; q++) node_error_[i][q] = survivor_error_[i][q * CHILDREN + from[q]];
    }

    // Costs of weight t's states; `at`: the same, counted over both ends.
    void open(int t, int at) {
        const int o = output_of(t), i = input_of(t), before = t % 4;
        if (t % PART == 0 && t >= DECIDED) {
            follow(trace(at - 1, at - 1), at - 1, at - DECIDED);
            for (int s = at - DECIDED; s < at - DECIDED + PART; s++)
                error_[output_of(s)][input_of(s)] = weight_[output_of(s)][input_of(s)] - scale_[output_of(s)] * level_[state_[s]];
        }
        if (before == 0)
            for (int s = 0; s < STATES; s++) value_[s] = scale_[o] * level_[s];
        const float spread = i < task_.inputs && scale_[o] != 0.0f ? task_.spreads[i] : 0.0f;
        float base = weight_[o][i] + carried_[o][i];
        for (int j = 0; j < i - before; j++) base += error_[o][j] * task_.corner[j * TILE + i];
        float target[NODES];
        for (int q = 0; q < NODES; q++) target[q] = base;
        for (int j = 0; j < before; j++) {
            const float by = task_.corner[(i - before + j) * TILE + i];
            for (int q = 0; q < NODES; q++) target[q] += node_error_[j][q] * by;
        }
        const float weight = weight_[o][i];
        for (int c = 0; c < CHILDREN; c++) {
            const int first = c * NODES;
            for (int q = 0; q < NODES; q++) {
                const float off = target[q] - value_[first + q];
                cost_[first + q] = node_[q] + spread * (off * off);
            }
            if (before == 3) continue;
            for (int q = 0; q < NODES; q++) survivor_error_[before][first + q] = weight - value_[first + q];
            for (int j = 0; j < before; j++) std::memcpy(survivor_error_[j] + first, node_error_[j], sizeof(node_error_[j]));
        }
    }

    // The state at step `back` of the best survivor at step `from`, whose costs are at hand.
    int trace(int from, int back) const {
        int s = 0;
        for (int i = 1; i < STATES; i++)
            if (cost_[i] < cost_[s]) s = i;
        for (int t = from; t > back; t--) s = s % NODES * CHILDREN + from_[t][s % NODES];
        return s;
    }

    // The states on the way to `s` at step `from`, down to step `back`.
    void follow(int s, int from, int back) {
        for (int t = from;; t--) {
            state_[t] = static_cast<uint8_t>(s);
            if (t == back) return;
            s = s % NODES * CHILDREN + from_[t][s % NODES];
        }
    }

    void write(int64_t number) const {
        uint8_t* tile = task_.tiles + number * task_.stride;
        std::memset(tile, 0, STEPS * BITS / 8);
        for (int t = 0; t < STEPS; t++) {
            const int own = state_[t] % CHILDREN, at = BITS * t;
            tile[at / 8] = static_cast<uint8_t>(tile[at / 8] | own << at % 8);
            if (at % 8 + BITS > 8) tile[at / 8 + 1] = static_cast<uint8_t>(tile[at / 8 + 1] | own >> (8 - at % 8));
            const int64_t n = number * TILE + output_of(t);
            if (n < task_.outputs && input_of(t) < task_.inputs)
                task_.found[input_of(t) * task_.outputs + n] = static_cast<int8_t>(level_[state_[t]]);
        }
    }

    const TrellisTask& task_;
    alignas(64) float level_[STATES], value_[STATES], cost_[STATES], node_[NODES];
    alignas(64) float survivor_error_[3][STATES], node_error_[3][NODES];
    float weight_[TILE][TILE], carried_[TILE][TILE], error_[TILE][TILE], scale_[TILE];
    uint8_t from_[STEPS + BEYOND][NODES], state_[STEPS + BEYOND];
};

template <int BITS>
void encode_all(Pool& pool, const TrellisTask& task) {
    pool.run((task.outputs + TILE - 1) / TILE, 1, [&](int, int64_t begin, int64_t end) {
        Encoder<BITS> encoder(task);
        for (int64_t number = begin; number < end; number++) encoder.encode(number);
    });
}

}  // namespace

void encode_tiles(Pool& pool, const TrellisTask& task) {
    switch (task.bits) {
        case 2: return encode_all<2>(pool, task);
        case 3: return encode_all<3>(pool, task);
        default: return encode_all<4>(pool, task);
    }
}

}  // namespace specpress
