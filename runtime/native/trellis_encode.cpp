// Viterbi's algorithm over the tiles of a column, with GPTQ's feedback inside of them.
//
// Weight t of a tile is output t % 64 / 4, input 4 (t / 64) + t % 4. Its state is the sequence's bits [bits t, bits t + 8),
// so two neighbours share a node: the upper 8 − bits of the one are the lower of the other. The error of an input changes
// the targets of later inputs of its output. Four neighbours of an output are next to each other in the sequence: each
// survivor carries the errors of its own. The inputs before lie 61 weights and more back, where the survivors have long met:
// what the best one did there is taken for decided.
//
// The sequence is circular. A first lap, which goes a little beyond its end into its beginning again, finds the node at
// which it shall close; the second starts and ends there. Where a tile has a sequence already, one lap starts and ends where
// that one does.
#include "trellis.h"

#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <utility>

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
typedef float Four __attribute__((vector_size(16)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));

// Figures of two registers by constant places; compilers have names of their own for it.
#if defined(__clang__)
#define SPECPRESS_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SPECPRESS_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Whole{__VA_ARGS__})
#endif
using Lanes = std::make_integer_sequence<int, LANES>;

// Figures of a and b by turns, from the lower and the upper halves; every second one of both, from the first and the next.
template <int... I>
Reals low(Reals a, Reals b, std::integer_sequence<int, I...>) {
    return SPECPRESS_SHUFFLE(a, b, (I % 2 * LANES + I / 2)...);
}
template <int... I>
Reals high(Reals a, Reals b, std::integer_sequence<int, I...>) {
    return SPECPRESS_SHUFFLE(a, b, (I % 2 * LANES + I / 2 + LANES / 2)...);
}
template <int... I>
Reals even(Reals a, Reals b, std::integer_sequence<int, I...>) {
    return SPECPRESS_SHUFFLE(a, b, 2 * I...);
}
template <int... I>
Reals odd(Reals a, Reals b, std::integer_sequence<int, I...>) {
    return SPECPRESS_SHUFFLE(a, b, (2 * I + 1)...);
}
Reals low(Reals a, Reals b) { return low(a, b, Lanes{}); }
Reals high(Reals a, Reals b) { return high(a, b, Lanes{}); }
Reals even(Reals a, Reals b) { return even(a, b, Lanes{}); }
Reals odd(Reals a, Reals b) { return odd(a, b, Lanes{}); }

// SHARE figures over and over.
template <int SHARE>
Reals repeated(const float* from) {
    if constexpr (SHARE == 1) return *from - Reals{};
#if defined(__AVX512F__)
    if constexpr (SHARE == 4) return _mm512_broadcast_f32x4(_mm_loadu_ps(from));
#elif defined(__AVX2__)
    if constexpr (SHARE == 4) return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(from));
#endif
    Reals found = {};
    for (int l = 0; l < LANES; l++) found[l] = from[l % SHARE];
    return found;
}

template <int BITS>
class Encoder {
   public:
    Encoder(const TrellisTask& task) : task_(task) {
        for (int s = 0; s < STATES; s++) {
            const float level = task.levels[s & 127];
            level_[s % CHILDREN][s / CHILDREN] = s & 128 ? -level : level;
        }
        for (int a = 0; a < CHILDREN; a++)
            for (int l = 0; l < LANES; l++) child_[a][l] = a;
        for (int i = 0; i < TILE; i++) {
            spreads_[i] = i < task.inputs ? task.spreads[i] : 0.0f;
            std::memcpy(corner_[i], task.corner + i * TILE, sizeof(corner_[i]));
        }
    }

    // Output tile `number`.
    void encode(int64_t number) {
        read(number);
        // The first bits of a tile are those that its first state shares with its last.
        const int node = task_.again ? task_.tiles[number * task_.stride] % NODES : closing();
        for (int q = 0; q < NODES; q++) cost_[place(q)] = q == node ? 0.0f : NEVER;
        lap(STEPS);
        follow(node, STEPS - 1, 0);
        if (!task_.again || is_better(number)) write(number);
    }

   private:
    // A state's node before it is its lower bits, the one after it the upper ones: SHARE nodes lead to each.
    static constexpr int CHILDREN = 1 << BITS, NODES = STATES >> BITS, SHARE = NODES / CHILDREN, REGISTERS = NODES / LANES;

    static int output_of(int t) { return t % 64 / 4; }
    static int input_of(int t) { return t / 64 * 4 + t % 4; }
    // Where figures of nodes have node q's: those that lead to one child are side by side.
    static int place(int q) { return q % CHILDREN * SHARE + q / CHILDREN; }

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

    // The node at which the sequence shall close.
    int closing() {
        std::memset(cost_, 0, sizeof(cost_));
        lap(STEPS + BEYOND);
        return follow(best(), STEPS + BEYOND - 1, STEPS);
    }

    // Whether the states cost less than what the tile has.
    bool is_better(int64_t number) const {
        float before[TILE][TILE] = {}, now[TILE][TILE];
        for (int o = 0; o < TILE && number * TILE + o < task_.outputs; o++)
            for (int i = 0; i < task_.inputs; i++) before[o][i] = task_.found[i * task_.outputs + number * TILE + o];
        for (int t = 0; t < STEPS; t++) now[output_of(t)][input_of(t)] = level_of(state_[t]);
        return loss(now) < loss(before);
    }

    // What levels [outputs][inputs] cost.
    float loss(const float (&levels)[TILE][TILE]) const {
        float sum = 0.0f;
        for (int o = 0; o < TILE; o++) {
            if (scale_[o] == 0.0f) continue;
            float error[TILE];
            for (int i = 0; i < task_.inputs; i++) {
                const float value = scale_[o] * levels[o][i];
                float off = weight_[o][i] + carried_[o][i] - value;
                for (int j = 0; j < i; j++) off += error[j] * corner_[j][i];
                error[i] = weight_[o][i] - value;
                sum += spreads_[i] * (off * off);
            }
        }
        return sum;
    }

    // Steps from the first on, four of an output at a time.
    void lap(int steps) {
        for (int t = 0; t < steps; t += 4) {
            if (t % PART == 0 && t >= DECIDED && t < STEPS) decide(t);
            const int o = output_of(t % STEPS), i = input_of(t % STEPS);
            for (int a = 0; a < CHILDREN; a++)
                for (int q = 0; q < NODES; q++) value_[a][q] = scale_[o] * level_[a][q];
            Four base = four(weight_[o] + i) + four(carried_[o] + i);
            for (int before = 0; before < i; before++) base += error_[o][before] * four(corner_[before] + i);
            step<0>(t, o, i, base[0]), step<1>(t + 1, o, i + 1, base[1]);
            step<2>(t + 2, o, i + 2, base[2]), step<3>(t + 3, o, i + 3, base[3]);
        }
    }

    // Takes what the best survivor before step t did DECIDED to DECIDED - PART steps before for what has been chosen.
    void decide(int t) {
        follow(best(), t - 1, t - DECIDED);
        for (int s = t - DECIDED; s < t - DECIDED + PART; s++) {
            const int o = output_of(s), i = input_of(s);
            error_[o][i] = weight_[o][i] - scale_[o] * level_of(state_[s]);
        }
    }

    // Of each node behind weight t, of output o and input i: the cheapest way there, and the errors that it has made of
    // this output. BEFORE: of the four weights of an output that stand side by side, those before t; the last one's
    // errors are nobody's. base: what the survivors' own errors are to be added to.
    template <int BEFORE>
    void step(int t, int o, int i, float base) {
        constexpr int KEPT = BEFORE < 3 ? BEFORE + 1 : 0;
        const float spread = scale_[o] != 0.0f ? spreads_[i] : 0.0f;
        alignas(64) float target[NODES];
        for (int n = 0; n < NODES; n++) target[n] = base;
        for (int j = 0; j < BEFORE; j++) {
            const float by = corner_[i - BEFORE + j][i];
            for (int n = 0; n < NODES; n++) target[n] += made_[j][n] * by;
        }
        const Reals weight = weight_[o][i] - Reals{};
        Reals costs[REGISTERS], made[3][REGISTERS];
        Whole packed = {};
        for (int k = 0; k < REGISTERS; k++) {
            Reals least = {}, errors[3] = {};
            Whole way = {};
            const float *costs_before = cost_, *wanted = target, *made_before = made_[0];
            // Else the compiler repeats all of them once, and keeps that on the stack.
            asm("" : "+r"(costs_before), "+r"(wanted), "+r"(made_before));
#pragma GCC unroll 16
            for (int a = 0; a < CHILDREN; a++) {
                const Reals value = reals(value_[a] + k * LANES), off = of_child(wanted, a, k) - value;
                const Reals cost = of_child(costs_before, a, k) + spread * (off * off);
                const Whole less = a ? cost < least : Whole{} - 1;
                least = less ? cost : least;
                way = less ? whole(child_[a]) : way;
                for (int j = 0; j < KEPT; j++) {
                    const Reals error = j < BEFORE ? of_child(made_before + j * NODES, a, k) : value;
                    errors[j] = less ? error : errors[j];
                }
            }
            costs[k] = least;
            for (int j = 0; j < KEPT; j++) made[j][k] = j < BEFORE ? errors[j] : weight - errors[j];
            packed |= way << 8 * (k % 4);
            if (k % 4 == 3 || k == REGISTERS - 1) {
                std::memcpy(from_[t][k / 4], &packed, sizeof(packed));
                packed = Whole{};
            }
        }
        by_child(costs, cost_);
        for (int j = 0; j < KEPT; j++) by_child(made[j], made_[j]);
    }

    static Four four(const float* from) {
        Four found;
        std::memcpy(&found, from, sizeof(found));
        return found;
    }

    static Whole whole(const int32_t* from) {
        Whole found;
        std::memcpy(&found, from, sizeof(found));
        return found;
    }

    // By registers: a copy of all of them at once would be read back before it is written.
    static void store(Reals figures, float* to) { std::memcpy(to, &figures, sizeof(figures)); }

    static Reals reals(const float* from) {
        Reals found;
        std::memcpy(&found, from, sizeof(found));
        return found;
    }

    // What the nodes have that lead to child `a` of those of register `k`: over and over, until a register is full.
    static Reals of_child(const float* nodes, int a, int k) {
        if constexpr (SHARE >= LANES) return reals(nodes + a * SHARE + k * LANES % SHARE);
        return repeated<SHARE>(nodes + a * SHARE);
    }

    // Figures of nodes in their order, to where `place` has them: an index's bits are turned, one of them a round.
    static void by_child(Reals* nodes, float* to) {
        constexpr int HALF = REGISTERS / 2;
        for (int round = 1; round < (SHARE < CHILDREN ? SHARE : CHILDREN); round *= 2) {
            Reals next[REGISTERS];
            for (int k = 0; k < HALF; k++)
                if constexpr (SHARE < CHILDREN)
                    next[2 * k] = low(nodes[k], nodes[k + HALF]), next[2 * k + 1] = high(nodes[k], nodes[k + HALF]);
                else
                    next[k] = even(nodes[2 * k], nodes[2 * k + 1]), next[k + HALF] = odd(nodes[2 * k], nodes[2 * k + 1]);
            for (int k = 0; k < REGISTERS; k++) nodes[k] = next[k];
        }
#pragma GCC unroll 16
        for (int k = 0; k < REGISTERS; k++) store(nodes[k], to + k * LANES);
    }

    float level_of(int state) const { return level_[state % CHILDREN][state / CHILDREN]; }

    // The node at which the best survivor stands.
    int best() const {
        int q = 0;
        for (int i = 1; i < NODES; i++)
            if (cost_[place(i)] < cost_[place(q)]) q = i;
        return q;
    }

    // The states from step `back` to step `from` of the survivor at `node` behind it, and the node before them.
    unsigned follow(unsigned node, int from, int back) {
        for (int t = from; t >= back; t--) {
            const unsigned k = node / LANES;
            const unsigned s = node * CHILDREN + from_[t][k / 4][node % LANES][k % 4];
            state_[t] = static_cast<uint8_t>(s);
            node = s % NODES;
        }
        return node;
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
    // Of states: by the last child (the lower bits), then by the node after them. Of nodes: where `place` has them.
    alignas(64) float level_[CHILDREN][NODES], value_[CHILDREN][NODES], cost_[NODES], made_[3][NODES];
    alignas(64) int32_t child_[CHILDREN][LANES];
    float corner_[TILE][TILE], spreads_[TILE];
    float weight_[TILE][TILE], carried_[TILE][TILE], error_[TILE][TILE], scale_[TILE];
    // The last children of the ways to nodes: byte k % 4 of a number is register k's.
    alignas(64) uint8_t from_[STEPS + BEYOND][(REGISTERS + 3) / 4][LANES][4];
    uint8_t state_[STEPS + BEYOND];
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
