// Short convolutions in place of attention: each row reads the state after its parent and leaves its own at its slot.
#include <algorithm>

#include "decoder.h"

namespace specpress {

// A short convolution of the prepared rows into mixed_. Threads share the channels, which do not meet; of a channel all
// rows go in their order, so that parents come first.
void Decoder::convolve(const Layer& layer, int64_t state, const Batch& batch) {
    const Convolution& c = *layer.convolution;
    const int64_t rows = batch.rows, channels = model_.hidden, past = c.count - 1;
    made_.resize(std::max(made_.size(), static_cast<size_t>(3 * rows * channels)));
    mixed_.resize(std::max(mixed_.size(), static_cast<size_t>(rows * channels)));
    multiply(layer.qkv, rows, made_.data(), 3 * channels, false);
    const int64_t piece = rows * channels < 16384 ? channels : std::max<int64_t>(64, channels / (4 * pool_.threads()));
    pool_.run(channels, piece, [&](int, int64_t begin, int64_t end) {
        for (int64_t row = 0; row < rows; row++) {
            const Store& s = batch.stores[batch.request[row]];
            const int64_t slot = batch.slot[row], before = batch.before ? batch.before[row] : slot - 1;
            const float* from = before < 0 ? nullptr : s.states + before % s.held * s.width + state;
            float* to = s.states + slot % s.held * s.width + state;
            const float *gate = made_.data() + 3 * row * channels, *second = gate + channels, *value = second + channels;
            float* out = mixed_.data() + row * channels;
            for (int64_t d = begin; d < end; d++) {
                const float input = gate[d] * value[d];
                float sum = (from ? from[d] : 0.0f) * c.taps[d];
                for (int64_t i = 1; i < past; i++) {
                    const float seen = from ? from[i * channels + d] : 0.0f;
                    sum = sum + seen * c.taps[i * channels + d];
                    to[(i - 1) * channels + d] = seen;
                }
                sum = sum + input * c.taps[past * channels + d];
                to[(past - 1) * channels + d] = input;
                if (c.bias) sum = sum + c.bias[d];
                out[d] = second[d] * sum;
            }
        }
    });
}

}  // namespace specpress
