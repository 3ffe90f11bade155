#include "products.h"

#include "three_of_four.h"

namespace specpress {

namespace {

// Of weights, what a thread takes last of a product.
constexpr int64_t LEAST_BYTES = 256 << 10;

int64_t bytes_per_block(const Weights& w) {
    if (w.kind == THREE_OF_FOUR) return w.groups * (w.group / FOURS_INPUTS) * BLOCK * FOURS_WORDS * 4;
    const int64_t bits = w.kind == F32 ? 32 : w.kind == BF16 ? 16 : w.kind == INT8 || w.kind == NESTED ? 8 : w.kind == TERNARY ? 2 : w.kind == TRELLIS ? w.bits : 4;
    return w.groups * w.group * BLOCK * bits / 8;
}

int64_t outputs_of(const Projection& p) {
    int64_t n = 0;
    for (int64_t i = 0; i < p.parts; i++) n += p.weights[i]->outputs;
    return n;
}

}  // namespace

// The products of the prepared rows, all parts in one go.
void Decoder::multiply(const Projection& p, int64_t rows, float* y, int64_t stride, bool add) {
    const Group one = {&p, rows, y, stride};
    multiply(&one, 1, add);
}

// Those of several projections, with nobody waiting for the last of one before the next begins.
void Decoder::multiply(const Group* groups, int64_t count, bool add) {
    int64_t total = 0, widest = 1, most = 0;
    for (int64_t g = 0; g < count; g++) {
        const Projection& p = *groups[g].p;
        most = std::max(most, groups[g].rows);
        for (int64_t i = 0; i < p.parts; i++) {
            total += blocks_of(*p.weights[i]);
            widest = std::max(widest, bytes_per_block(*p.weights[i]));
        }
    }
    // Large pieces first, since each begins another stream, and small ones last, so that nobody reads alone for long (in 16
    // equal ones it was for 5 % of a product). With many rows few enough blocks that they stay in a core's cache from one
    // tile of rows to the next.
    const int64_t least = std::max<int64_t>(1, std::min(LEAST_BYTES / widest, total / (8 * pool_.threads())));
    pool_.run(total, Cut{least, most > path_.tile_rows() ? least : total}, [&](int, int64_t begin, int64_t end) {
        int64_t base = 0;
        const Place* place = places_.data();
        for (int64_t g = 0; g < count && base < end; g++) {
            const Group& group = groups[g];
            int64_t column = 0;
            for (int64_t i = 0; i < group.p->parts; i++, place++) {
                const Weights& w = *group.p->weights[i];
                const int64_t blocks = blocks_of(w), first = std::max<int64_t>(begin - base, 0), last = std::min(end - base, blocks);
                if (first < last) {
                    Want& want = wants_[place->want];
                    const int64_t row = place->first;
                    const bool wide = want.wide && group.rows >= WIDE_ROWS;
                    const Inputs in = {group.rows,
                                       want.stride,
                                       w.groups,
                                       want.values.data() + row * want.stride,
                                       want.first_code() + row * want.stride,
                                       want.step.data() + row * w.groups,
                                       want.sums.data() + row * w.groups,
                                       wide ? want.words.data() + row * want.stride : nullptr,
                                       want.pairs.data() + row * w.groups};
                    path_.linear[w.kind](w, in, first, last, group.y + column, group.stride, add);
                }
                base += blocks, column += w.outputs;
            }
        }
    });
}

void Decoder::project(const Projection& p, const float* x, int64_t rows, float* y) {
    std::lock_guard<std::mutex> lock(one_);
    const int64_t inputs = p.weights[0]->inputs;
    prepare(p, rows, [&](int, int64_t row) { return x + row * inputs; });
    multiply(p, rows, y, outputs_of(p), false);
}

}  // namespace specpress
