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

namespace SPECPRESS_PATH {

using namespace specpress;

namespace {

constexpr int TILE = TRELLIS_TILE, STATES = TRELLIS_STATES, STEPS = TILE * TILE;
constexpr int BEYOND = 32;      // steps of the first lap beyond the end
constexpr int DECIDED = 64;     // steps back that are looked up
constexpr int PART = 32;        // steps between two such looks
constexpr float NEVER = 1e30f;  // above every cost

// Figures of as many nodes as a register of the path has room for.
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Reals __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));

template <int BITS>
class Encoder {
   public:
    Encoder(const TrellisTask& task) : task_(task) {
        for (int s = 0; s < STATES; s++) {
            const float level = task.levels[s & 127];
            level_[s % CHILDREN][s / CHILDREN] = s & 128 ? -level : level;
        }
    }

    // Output tile `number`.
    void encode(int64_t number) {
        read(number);
        std::memset(node_, 0, sizeof(node_));
        lap(STEPS + BEYOND);
        const int node = trace(STEPS + BEYOND - 1, STEPS) % NODES;
        alignas(64) float only[NODES];
        for (int q = 0; q < NODES; q++) only[q] = q == node ? 0.0f : NEVER;
        by_child(only, node_);
        lap(STEPS);
        int last = node * CHILDREN;
        for (int a = 1; a < CHILDREN; a++)
            if (cost_of(node * CHILDREN + a) < cost_of(last)) last = node * CHILDREN + a;
        follow(last, STEPS - 1, 0);
        write(number);
    }

   private:
    // A state's node before it is its lower bits, the one after it the upper ones: SHARE nodes lead to each.
    static constexpr int CHILDREN = 1 << BITS, NODES = STATES >> BITS, SHARE = NODES / CHILDREN;
    static constexpr int WIDE = SHARE > LANES ? SHARE : LANES;

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

    // Steps from the first on, four of an output at a time.
    void lap(int steps) {
        for (int t = 0; t < steps; t += 4) step<0>(t), step<1>(t + 1), step<2>(t + 2), step<3>(t + 3);
    }
    // BEFORE: of the four weights of an output that stand side by side, those before t.
    template <int BEFORE>
    void step(int t) {
        if (t) close<BEFORE>(t);
        open<BEFORE>(t % STEPS, t);
    }

    // The better way into each node between t − 1 and t, and the errors that it has made of this output.
    template <int BEFORE>
    void close(int t) {
        alignas(64) float best[NODES], error[3][NODES];
        alignas(64) int32_t ways[NODES];
        const Reals weight = Reals{} + (BEFORE ? weight_[output_of(t % STEPS)][input_of(t % STEPS) - 1] : 0.0f);
        for (int q = 0; q < NODES; q += LANES) {
            Reals least = reals(cost_[0] + q), errors[3];
            Whole way = {};
            for (int i = 0; i < BEFORE; i++) errors[i] = error_before<BEFORE>(weight, i, 0, q);
            for (int a = 1; a < CHILDREN; a++) {
                const Reals cost = reals(cost_[a] + q);
                const Whole less = cost < least;
                least = less ? cost : least;
                way = less ? Whole{} + a : way;
                for (int i = 0; i < BEFORE; i++) errors[i] = less ? error_before<BEFORE>(weight, i, a, q) : errors[i];
            }
            std::memcpy(best + q, &least, sizeof(least));
            for (int i = 0; i < BEFORE; i++) std::memcpy(error[i] + q, &errors[i], sizeof(least));
            std::memcpy(ways + q, &way, sizeof(way));
        }
        for (int q = 0; q < NODES; q++) from_[t][q] = static_cast<uint8_t>(ways[q]);
        by_child(best, node_);
        for (int i = 0; i < BEFORE; i++) by_child(error[i], node_error_[i]);
    }

    // What a survivor has made of this output's neighbour i: the last one's is that of its own level.
    template <int BEFORE>
    Reals error_before(Reals weight, int i, int a, int q) const {
        return i == BEFORE - 1 ? weight - reals(value_[a] + q) : reals(older_[i] + a * WIDE + q % WIDE);
    }

    // Costs of weight t's states; `at`: the same, counted over both ends.
    template <int BEFORE>
    void open(int t, int at) {
        const int o = output_of(t), i = input_of(t);
        if (t % PART == 0 && t >= DECIDED) {
            follow(trace(at - 1, at - 1), at - 1, at - DECIDED);
            for (int s = at - DECIDED; s < at - DECIDED + PART; s++)
                error_[output_of(s)][input_of(s)] = weight_[output_of(s)][input_of(s)] - scale_[output_of(s)] * level_of(state_[s]);
        }
        if (BEFORE == 0)
            for (int a = 0; a < CHILDREN; a++)
                for (int q = 0; q < NODES; q++) value_[a][q] = scale_[o] * level_[a][q];
        const float spread = i < task_.inputs && scale_[o] != 0.0f ? task_.spreads[i] : 0.0f;
        float base = weight_[o][i] + carried_[o][i];
        for (int j = 0; j < i - BEFORE; j++) base += error_[o][j] * task_.corner[j * TILE + i];
        alignas(64) float target[NODES];
        for (int n = 0; n < NODES; n++) target[n] = base;
        for (int j = 0; j < BEFORE; j++) {
            const float by = task_.corner[(i - BEFORE + j) * TILE + i];
            for (int n = 0; n < NODES; n++) target[n] += node_error_[j][n] * by;
        }
        alignas(64) float wanted[CHILDREN * WIDE], so_far[CHILDREN * WIDE];
        over_and_over(target, wanted), over_and_over(node_, so_far);
        for (int j = 0; j < BEFORE; j++) over_and_over(node_error_[j], older_[j]);
        for (int a = 0; a < CHILDREN; a++)
            for (int q = 0; q < NODES; q += LANES) {
                const int from = a * WIDE + q % WIDE;
                const Reals off = reals(wanted + from) - reals(value_[a] + q);
                const Reals cost = reals(so_far + from) + spread * (off * off);
                std::memcpy(cost_[a] + q, &cost, sizeof(cost));
            }
    }

    // Figures of nodes in the order in which `open` reads them: those of one last child side by side.
    static void by_child(const float* nodes, float* to) {
        for (int r = 0; r < SHARE; r++)
            for (int a = 0; a < CHILDREN; a++) to[a * SHARE + r] = nodes[r * CHILDREN + a];
    }

    static Reals reals(const float* from) {
        Reals found;
        std::memcpy(&found, from, sizeof(found));
        return found;
    }

    // What SHARE nodes have, for all that they lead to: over and over, until a register is full.
    static void over_and_over(const float* from, float* to) {
        for (int a = 0; a < CHILDREN; a++)
            for (int r = 0; r < WIDE; r++) to[a * WIDE + r] = from[a * SHARE + r % SHARE];
    }

    float cost_of(int state) const { return cost_[state % CHILDREN][state / CHILDREN]; }
    float level_of(int state) const { return level_[state % CHILDREN][state / CHILDREN]; }

    // The state at step `back` of the best survivor at step `from`, whose costs are at hand.
    int trace(int from, int back) const {
        int s = 0;
        for (int i = 1; i < STATES; i++)
            if (cost_of(i) < cost_of(s)) s = i;
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
                task_.found[input_of(t) * task_.outputs + n] = static_cast<int8_t>(level_of(state_[t]));
        }
    }

    const TrellisTask& task_;
    // Of states: by the last child (the lower bits), then by the node after them. Of nodes: as by_child has them; older_: as
    // over_and_over has them.
    alignas(64) float level_[CHILDREN][NODES], value_[CHILDREN][NODES], cost_[CHILDREN][NODES];
    alignas(64) float node_[NODES], node_error_[3][NODES], older_[3][CHILDREN * WIDE];
    float weight_[TILE][TILE], carried_[TILE][TILE], error_[TILE][TILE], scale_[TILE];
    uint8_t from_[STEPS + BEYOND][NODES], state_[STEPS + BEYOND];
};

template <int BITS>
void encode_some(const TrellisTask& task, int64_t begin, int64_t end) {
    Encoder<BITS> encoder(task);
    for (int64_t number = begin; number < end; number++) encoder.encode(number);
}

}  // namespace

void encode(const TrellisTask& task, int64_t begin, int64_t end) {
    switch (task.bits) {
        case 2: return encode_some<2>(task, begin, end);
        case 3: return encode_some<3>(task, begin, end);
        default: return encode_some<4>(task, begin, end);
    }
}

}  // namespace SPECPRESS_PATH
