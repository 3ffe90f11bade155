// Convolutions over the rows of a text: each row reads the state after its parent and leaves its own at its slot.
#include <algorithm>

#include "states.h"

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
        StatePart inputs = StatePart::inputs(path_, batch, state, begin, end, past, channels);
        const int64_t apart = inputs.stride();
        for (int64_t row = 0; row < rows; row++) {
            const float* from = inputs.before(row);
            float* to = inputs.after(row);
            const float *gate = made_.data() + 3 * row * channels, *second = gate + channels, *value = second + channels;
            float* out = mixed_.data() + row * channels;
            for (int64_t d = begin; d < end; d++) {
                const int64_t at = d - begin;
                const float input = gate[d] * value[d];
                float sum = (from ? from[at] : 0.0f) * c.taps[d];
                for (int64_t i = 1; i < past; i++) {
                    const float seen = from ? from[i * apart + at] : 0.0f;
                    sum = sum + seen * c.taps[i * channels + d];
                    to[(i - 1) * apart + at] = seen;
                }
                sum = sum + input * c.taps[past * channels + d];
                to[(past - 1) * apart + at] = input;
                if (c.bias) sum = sum + c.bias[d];
                out[d] = second[d] * sum;
            }
            inputs.keep(row);
        }
    });
}

// Of the channels input[rows][stride], by taps[count][channels], the oldest input's first, and bias[channels] or null; into
// out[rows][channels].
void Decoder::filter(const Batch& batch, int64_t state, const float* input, int64_t stride, int64_t channels, const float* taps,
                     int64_t count, const float* bias, float* out) {
    const int64_t rows = batch.rows, past = count - 1;
    pool_.run(channels, rows * channels < 16384 ? channels : 256, [&](int, int64_t begin, int64_t end) {
        StatePart inputs = StatePart::inputs(path_, batch, state, begin, end, past, channels);
        const int64_t apart = inputs.stride();
        for (int64_t row = 0; row < rows; row++) {
            const float *from = inputs.before(row), *in = input + row * stride;
            float *to = inputs.after(row), *made = out + row * channels;
            for (int64_t c = begin; c < end; c++) {
                const int64_t at = c - begin;
                float sum = (from ? from[at] : 0.0f) * taps[c];
                for (int64_t i = 1; i < past; i++) {
                    const float seen = from ? from[i * apart + at] : 0.0f;
                    sum = sum + seen * taps[i * channels + c];
                    to[(i - 1) * apart + at] = seen;
                }
                sum = sum + in[c] * taps[past * channels + c];
                made[c] = bias ? sum + bias[c] : sum;
                to[(past - 1) * apart + at] = in[c];
            }
            inputs.keep(row);
        }
    });
}

}  // namespace specpress
