// Where the states of layers that carry one lie: a row reads that after its parent and leaves its own at its slot.
#pragma once

#include "decoder.h"

namespace specpress {

// The state before a row, of a layer whose floats begin at `place` of a token's; null: there is none, and all are 0.
inline const float* state_before(const Batch& batch, int64_t row, int64_t place) {
    const Store& s = batch.stores[batch.request[row]];
    const int64_t slot = batch.before ? batch.before[row] : batch.slot[row] - 1;
    return slot < 0 ? nullptr : s.states + slot % s.held * s.width + place;
}

inline float* state_after(const Batch& batch, int64_t row, int64_t place) {
    const Store& s = batch.stores[batch.request[row]];
    return s.states + batch.slot[row] % s.held * s.width + place;
}

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
