// Where the states of layers that carry one lie: a row reads that after its parent and leaves its own at its slot.
#pragma once

#include "decoder.h"

namespace specpress {

// What a layer's state is made of: floats of a convolution's last inputs, and then rows of matrices.
struct StateShape {
    int64_t inputs = 0, rows = 0, columns = 0;

    // What it takes in a token's state, in the units that Store's `width` has: floats, or bytes. In int8 inputs stay floats,
    // and each row's codes follow its scale; a whole number of floats.
    int64_t size(int64_t kind) const {
        return kind == STATES_INT8 ? 4 * inputs + (rows * (4 + columns) + 3) / 4 * 4 : inputs + rows * columns;
    }
};

inline StateShape state_shape(const Layer& layer, int64_t hidden) {
    if (layer.convolution) return {(layer.convolution->count - 1) * hidden, 0, 0};
    if (layer.delta) {
        const Delta& d = *layer.delta;
        return {(d.count - 1) * (2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim), d.value_heads * d.key_dim, d.value_dim};
    }
    if (!layer.mamba) return {};
    const Mamba& m = *layer.mamba;
    return {(m.count - 1) * channels_of(m), m.heads * m.state, m.dim};
}

// What states are held in.
inline int64_t state_kind(const Batch& batch) { return batch.rows ? batch.stores[0].state_kind : STATES_F32; }

// Part of the states of a forward's rows: `count` runs of `size` floats, `apart` from each other. Kernels read and write
// floats: where they lie, or beside, from which they are rounded.
class StatePart {
   public:
    // Channels from `begin` to `end` of a convolution's `past` last inputs, of a layer whose state is at `state`.
    static StatePart inputs(const Path& path, const Batch& batch, int64_t state, int64_t begin, int64_t end, int64_t past, int64_t channels) {
        const int64_t unit = state_kind(batch) == STATES_INT8 ? 4 : 1;
        return {path, batch, state + unit * begin, end - begin, past, channels, 0};
    }

    // Matrix number `index`, behind so many floats of inputs.
    static StatePart matrix(const Path& path, const Batch& batch, int64_t state, int64_t inputs, int64_t index, int64_t rows, int64_t columns) {
        const bool codes = state_kind(batch) == STATES_INT8;
        const int64_t place = codes ? 4 * inputs + index * rows * (4 + columns) : inputs + index * rows * columns;
        return {path, batch, state + place, rows * columns, 1, 0, codes ? columns : 0};
    }

    // From one run to the next of what `before` and `after` give.
    int64_t stride() const { return halves_ ? size_ : apart_; }

    // The state before a row; null: there is none, and all are 0.
    const float* before(int64_t row) {
        const Store& s = store(row);
        const int64_t slot = batch_.before ? batch_.before[row] : batch_.slot[row] - 1;
        if (slot < 0) return nullptr;
        const uint8_t* at = bytes(s, slot);
        if (columns_)
            path_.from_codes(at, size_ / columns_, columns_, from_.data());
        else if (!halves_)
            return reinterpret_cast<const float*>(at);
        for (int64_t i = 0; halves_ && i < count_; i++)
            path_.from_halves(reinterpret_cast<const uint16_t*>(at) + i * apart_, size_, from_.data() + i * size_);
        return from_.data();
    }

    // Where a row's own goes; `keep` once it is there.
    float* after(int64_t row) { return to_.empty() ? reinterpret_cast<float*>(own(row)) : to_.data(); }

    void keep(int64_t row) {
        if (columns_) path_.to_codes(to_.data(), size_ / columns_, columns_, own(row));
        for (int64_t i = 0; halves_ && i < count_; i++)
            path_.to_halves(to_.data() + i * size_, size_, reinterpret_cast<uint16_t*>(own(row)) + i * apart_);
    }

   private:
    StatePart(const Path& path, const Batch& batch, int64_t place, int64_t size, int64_t count, int64_t apart, int64_t columns)
        : path_(path), batch_(batch), place_(place), size_(size), count_(count), apart_(apart), columns_(columns),
          halves_(state_kind(batch) == STATES_F16) {
        if (halves_ || columns_) from_.resize(static_cast<size_t>(size * count)), to_.resize(from_.size());
    }

    const Store& store(int64_t row) const { return batch_.stores[batch_.request[row]]; }
    uint8_t* own(int64_t row) const { return bytes(store(row), batch_.slot[row]); }
    uint8_t* bytes(const Store& s, int64_t slot) const {
        constexpr int64_t UNIT[] = {4, 2, 1};
        return static_cast<uint8_t*>(s.states) + UNIT[s.state_kind] * (slot % s.held * s.width + place_);
    }

    const Path& path_;
    const Batch& batch_;
    int64_t place_, size_, count_, apart_;
    int64_t columns_;  // of a row of codes; 0: there are none
    bool halves_;
    std::vector<float> from_, to_;
};

}  // namespace specpress
