// The products of a forward: rows rounded to what weights want, and multiplied.
#pragma once

#include <algorithm>
#include <cstring>

#include "decoder.h"

namespace specpress {

inline bool is_float(const Weights& w) { return w.kind == F32 || w.kind == BF16; }

inline bool same_want(const Weights& a, const Weights& b) {
    return is_float(a) == is_float(b) && a.inputs == b.inputs && a.group == b.group && a.group_inputs == b.group_inputs &&
           a.perm == b.perm && a.input_scale == b.input_scale && (a.kind == INT8) == (b.kind == INT8);
}

// From how many rows on words are wanted: fewer are as fast as bytes.
constexpr int64_t WIDE_ROWS = 3;

inline int64_t blocks_of(const Weights& w) { return (w.outputs + BLOCK - 1) / BLOCK; }

template <class T>
void grow(std::vector<T>& v, int64_t size) {
    if (static_cast<int64_t>(v.size()) < size) v.resize(static_cast<size_t>(size));
}

// f(thread, row) for each row; alone where the work (in floats) is not worth waking the others.
template <class F>
void Decoder::rows_of(int64_t rows, int64_t work, F&& f) {
    const int64_t piece = rows * work < 16384 ? rows : std::max<int64_t>(1, std::min<int64_t>(rows / (4 * pool_.threads()), 16));
    pool_.run(rows, piece, [&](int thread, int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) f(thread, row);
    });
}

// Rounds rows to what the parts want. row_of(thread, row) gives a row's values and may use the thread's scratch, of which
// the first `widest_` floats are for the order of inputs.
template <class F>
void Decoder::prepare(const Projection& p, int64_t rows, F&& row_of) {
    int64_t wants = 0;
    grow(want_of_, p.parts);
    if (static_cast<int64_t>(wants_.size()) < p.parts) wants_.resize(static_cast<size_t>(p.parts));
    for (int64_t i = 0; i < p.parts; i++) {
        const Weights& w = *p.weights[i];
        int64_t found = 0;
        while (found < wants && !same_want(*wants_[found].of, w)) found++;
        want_of_[i] = found;
        if (found < wants) continue;
        Want& want = wants_[wants++];
        want.of = &w;
        // A stride that is no power of two: rows of a tile must not fall on the same lines of the cache.
        want.stride = (w.groups * w.group + 63) / 64 * 64 + 64;
        if (is_float(w)) {
            want.stride = (w.group + 15) / 16 * 16 + 16;
            grow(want.values, rows * want.stride);
        } else {
            grow(want.codes, rows * want.stride + LINE);
            grow(want.step, rows * w.groups);
            grow(want.sums, rows * w.groups);
            want.wide = rows >= WIDE_ROWS && path_.widen && (w.kind == INT8 || w.kind == NF4 || w.kind == NESTED || w.kind == TRELLIS);
            if (want.wide) {
                grow(want.words, rows * want.stride);
                grow(want.pairs, rows * w.groups);
            }
        }
    }
    rows_of(rows, p.weights[0]->inputs, [&](int thread, int64_t row) {
        const float* values = row_of(thread, row);
        for (int64_t i = 0; i < wants; i++) {
            Want& want = wants_[i];
            const Weights& w = *want.of;
            if (is_float(w)) {
                float* to = want.values.data() + row * want.stride;
                std::memcpy(to, values, static_cast<size_t>(w.inputs) * 4);
                for (int64_t k = w.inputs; k < w.group; k++) to[k] = 0.0f;
            } else {
                path_.quantize(w, values, want.first_code() + row * want.stride, want.step.data() + row * w.groups,
                               want.sums.data() + row * w.groups, scratch(thread));
                if (want.wide)
                    path_.widen(w, want.first_code() + row * want.stride, want.words.data() + row * want.stride,
                                want.pairs.data() + row * w.groups);
            }
        }
    });
}

}  // namespace specpress
