#include "products.h"

namespace specpress {

namespace {

int64_t bytes_per_block(const Weights& w) {
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
    int64_t total = 0, widest = 1;
    for (int64_t i = 0; i < p.parts; i++) {
        total += blocks_of(*p.weights[i]);
        widest = std::max(widest, bytes_per_block(*p.weights[i]));
    }
    // A few pieces a thread, so that one slow core does not hold up the rest; with many rows few enough blocks that they
    // stay in a core's cache from one tile of rows to the next.
    int64_t piece = std::max<int64_t>(1, total / (8 * pool_.threads()));
    if (rows > path_.tile_rows()) piece = std::max<int64_t>(1, std::min<int64_t>(piece, (256 << 10) / widest));
    pool_.run(total, piece, [&](int, int64_t begin, int64_t end) {
        int64_t base = 0, column = 0;
        for (int64_t i = 0; i < p.parts; i++) {
            const Weights& w = *p.weights[i];
            const int64_t blocks = blocks_of(w), first = std::max<int64_t>(begin - base, 0), last = std::min(end - base, blocks);
            if (first < last) {
                Want& want = wants_[want_of_[i]];
                const Inputs in = {rows, want.stride, w.groups, want.values.data(), want.first_code(), want.step.data(), want.sums.data(),
                                   want.wide ? want.words.data() : nullptr, want.pairs.data()};
                path_.linear[w.kind](w, in, first, last, y + column, stride, add);
            }
            base += blocks, column += w.outputs;
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
