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

// Whether products of that many rows take words, on a path that has them (words.h): levels of any size do.
inline bool multiplies_words(const Weights& w) {
    return w.kind == INT8 || w.kind == NESTED || w.kind == TRELLIS || (w.kind == NF4 && !low_levels(w));
}

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
    const Group one = {&p, rows, nullptr, 0};
    prepare(&one, 1, [&](int thread, int64_t, int64_t row) { return row_of(thread, row); });
}

// The same for several projections, each with rows of its own: row_of(thread, group, row).
template <class F>
void Decoder::prepare(const Group* groups, int64_t count, F&& row_of) {
    int64_t wants = 0, total = 0;
    places_.clear(), first_rows_.clear();
    for (int64_t g = 0; g < count; g++) {
        const Projection& p = *groups[g].p;
        first_rows_.push_back(total);
        total += groups[g].rows;
        for (int64_t i = 0; i < p.parts; i++) {
            const Weights& w = *p.weights[i];
            int64_t found = 0;
            while (found < wants && !same_want(*wants_[found].of, w)) found++;
            if (found == wants) {
                if (static_cast<int64_t>(wants_.size()) == wants) wants_.emplace_back();
                Want& fresh = wants_[wants++];
                fresh.of = &w, fresh.rows = 0, fresh.group = -1, fresh.wide = false;
            }
            Want& want = wants_[found];
            const bool known = want.group == g;
            if (!known) want.first = want.rows, want.rows += groups[g].rows, want.group = g;
            want.wide |= groups[g].rows >= WIDE_ROWS && path_.widen && multiplies_words(w);
            places_.push_back({found, want.first, known});
        }
    }
    for (int64_t i = 0; i < wants; i++) {
        Want& want = wants_[i];
        const Weights& w = *want.of;
        // A stride that is no power of two: rows of a tile must not fall on the same lines of the cache.
        want.stride = (w.groups * w.group + 63) / 64 * 64 + 64;
        if (is_float(w)) {
            want.stride = (w.group + 15) / 16 * 16 + 16;
            grow(want.values, want.rows * want.stride);
        } else {
            grow(want.codes, want.rows * want.stride + LINE);
            grow(want.step, want.rows * w.groups);
            grow(want.sums, want.rows * w.groups);
            if (want.wide) {
                grow(want.words, want.rows * want.stride);
                grow(want.pairs, want.rows * w.groups);
            }
        }
    }
    rows_of(total, groups[0].p->weights[0]->inputs, [&](int thread, int64_t at) {
        const int64_t g = std::upper_bound(first_rows_.begin(), first_rows_.end(), at) - first_rows_.begin() - 1;
        const int64_t own = at - first_rows_[g];
        const Place* places = places_.data();
        for (int64_t before = 0; before < g; before++) places += groups[before].p->parts;
        const float* values = row_of(thread, g, own);
        for (int64_t i = 0; i < groups[g].p->parts; i++) {
            if (places[i].known) continue;
            Want& want = wants_[places[i].want];
            const Weights& w = *want.of;
            const int64_t row = places[i].first + own;
            if (is_float(w)) {
                float* to = want.values.data() + row * want.stride;
                std::memcpy(to, values, static_cast<size_t>(w.inputs) * 4);
                for (int64_t k = w.inputs; k < w.group; k++) to[k] = 0.0f;
            } else {
                path_.quantize(w, values, want.first_code() + row * want.stride, want.step.data() + row * w.groups,
                               want.sums.data() + row * w.groups, scratch(thread));
                if (want.wide && groups[g].rows >= WIDE_ROWS)
                    path_.widen(w, want.first_code() + row * want.stride, want.words.data() + row * want.stride,
                                want.pairs.data() + row * w.groups);
            }
        }
    });
}

}  // namespace specpress
