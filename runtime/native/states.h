// Where the states of layers that carry one lie: a row reads that after its parent and leaves its own at its slot.
#pragma once

#include "decoder.h"

namespace specpress {

// Part of the states of a forward's rows: `count` runs of `size` floats, the first at `place` of a token's, `apart` from
// each other. Kernels read and write floats: where they lie, or, of halves, beside, from which they are rounded.
class StatePart {
   public:
    StatePart(const Path& path, const Batch& batch, int64_t place, int64_t size, int64_t count = 1, int64_t apart = 0)
        : path_(path), batch_(batch), place_(place), size_(size), count_(count), apart_(apart), halves_(batch.rows && batch.stores[0].halves) {
        if (halves_) from_.resize(static_cast<size_t>(size * count)), to_.resize(from_.size());
    }

    // From one run to the next of what `before` and `after` give.
    int64_t stride() const { return halves_ ? size_ : apart_; }

    // The state before a row; null: there is none, and all are 0.
    const float* before(int64_t row) {
        const Store& s = store(row);
        const int64_t slot = batch_.before ? batch_.before[row] : batch_.slot[row] - 1, at = slot % s.held * s.width + place_;
        if (slot < 0) return nullptr;
        if (!halves_) return static_cast<const float*>(s.states) + at;
        for (int64_t i = 0; i < count_; i++)
            path_.from_halves(static_cast<const uint16_t*>(s.states) + at + i * apart_, size_, from_.data() + i * size_);
        return from_.data();
    }

    // Where a row's own goes; `keep` once it is there.
    float* after(int64_t row) { return halves_ ? to_.data() : static_cast<float*>(store(row).states) + own(row); }

    void keep(int64_t row) {
        for (int64_t i = 0; halves_ && i < count_; i++)
            path_.to_halves(to_.data() + i * size_, size_, static_cast<uint16_t*>(store(row).states) + own(row) + i * apart_);
    }

   private:
    const Store& store(int64_t row) const { return batch_.stores[batch_.request[row]]; }
    int64_t own(int64_t row) const { return batch_.slot[row] % store(row).held * store(row).width + place_; }

    const Path& path_;
    const Batch& batch_;
    int64_t place_, size_, count_, apart_;
    bool halves_;
    std::vector<float> from_, to_;
};

// Floats of a layer's state.
inline int64_t state_floats(const Layer& layer, int64_t hidden) {
    if (layer.convolution) return (layer.convolution->count - 1) * hidden;
    if (layer.delta) {
        const Delta& d = *layer.delta;
        const int64_t values = d.value_heads * d.value_dim;
        return (d.count - 1) * (2 * d.key_heads * d.key_dim + values) + values * d.key_dim;
    }
    return layer.mamba ? (layer.mamba->count - 1) * channels_of(*layer.mamba) + layer.mamba->heads * layer.mamba->dim * layer.mamba->state : 0;
}

}  // namespace specpress
