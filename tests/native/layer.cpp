#include "layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "pack.h"

namespace kernels_test {

using namespace specpress;

namespace {

// bitsandbytes' sixteen levels times 127, rounded.
constexpr int8_t NF4_LEVELS[16] = {-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127};

int64_t step_of(int64_t kind) {
    const int64_t steps[KINDS] = {1, 2, 4, 8, 8, 16, 8, 8, 16, 128};
    return steps[kind];
}

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

uint32_t bits_of(float x) {
    uint32_t raw;
    std::memcpy(&raw, &x, 4);
    return raw;
}

float float_of(uint32_t raw) {
    float x;
    std::memcpy(&x, &raw, 4);
    return x;
}

double float16(uint16_t raw) {
    const int exponent = (raw >> 10) & 31, fraction = raw & 1023;
    const double magnitude = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return raw & 0x8000 ? -magnitude : magnitude;
}

int8_t random_code(const LayerShape& s, Random& random) {
    switch (s.kind) {
        case INT8:
        case NESTED:
        case UPPER: return static_cast<int8_t>(random.whole(-128, 127));
        case INT4: return static_cast<int8_t>(random.whole(-s.zero, 15 - s.zero));
        case NF4: return static_cast<int8_t>(random.whole(0, 15));
        default: return static_cast<int8_t>(random.whole(-1, 1));
    }
}

// Codes of a row one after the other, one of every four 0. A last four that is cut short may be without.
struct Fours {
    int64_t zero = 0;
    int8_t next(size_t k, Random& random) {
        if (k % 4 == 0) zero = random.whole(0, 3);
        return static_cast<int8_t>(static_cast<int64_t>(k % 4) == zero ? 0 : 1 - 2 * random.whole(0, 1));
    }
};

}  // namespace

TestLayer::TestLayer(const LayerShape& s, Random& random, Pool& pool) {
    const int64_t step = step_of(s.kind), group = s.group ? s.group : s.inputs, blocks = (s.outputs + BLOCK - 1) / BLOCK;
    Weights& w = weights;
    w.kind = s.kind, w.outputs = s.outputs, w.inputs = s.inputs, w.zero = s.zero, w.scale_type = s.scale_type;
    w.bits = s.bits;
    w.group_inputs = group, w.group = round_up(group, step), w.groups = (s.inputs + group - 1) / group;
    // An upper plane is packed with its lower one, and then cut off.
    if (s.kind == UPPER) w.kind = NESTED;
    packed.resize(static_cast<size_t>(packed_bytes(w)));
    std::vector<uint8_t> rows(static_cast<size_t>(s.outputs * s.inputs * (s.kind == F32 ? 4 : s.kind == BF16 ? 2 : 1)));
    levels_.resize(static_cast<size_t>(s.outputs * s.inputs));
    if (s.kind == TRELLIS) rows = random_tiles(s, random);
    Fours fours;
    for (size_t i = 0; i < levels_.size() && s.kind != TRELLIS; i++) {
        if (is_float()) {
            uint32_t raw = bits_of(random.real(-1.0f, 1.0f));
            if (s.kind == BF16) raw &= 0xffff0000u;
            levels_[i] = float_of(raw);
            if (s.kind == BF16) raw >>= 16;
            std::memcpy(rows.data() + i * (s.kind == F32 ? 4 : 2), &raw, s.kind == F32 ? 4 : 2);
        } else {
            const int8_t code = s.kind == THREE_OF_FOUR ? fours.next(i % static_cast<size_t>(s.inputs), random) : random_code(s, random);
            // The upper plane knows of 16 h + l only h, and takes 8 for l.
            levels_[i] = s.kind == NF4 ? NF4_LEVELS[code] : s.kind == UPPER ? std::floor(code / 16.0) * 16 + 8 : code;
            rows[i] = static_cast<uint8_t>(code);
        }
    }
    if (s.kind == INT8) sums_.resize(static_cast<size_t>(blocks * w.groups * BLOCK));
    pack(pool, w, rows.data(), packed.data(), sums_.empty() ? nullptr : sums_.data());
    w.kind = s.kind;
    packed.resize(static_cast<size_t>(packed_bytes(w)));
    packed.shrink_to_fit();
    w.codes = packed.data();
    if (!sums_.empty()) w.sums = sums_.data();
    if (s.bias) {
        bias_ = random.reals(blocks * BLOCK, -1.0f, 1.0f);
        w.bias = bias_.data();
    }
    if (is_float()) return;

    scales_.resize(static_cast<size_t>(s.outputs * w.groups));
    const size_t held = static_cast<size_t>(blocks * w.groups * BLOCK);
    if (s.scale_type == SCALE_F32) scale32_.resize(held);
    else scale16_.resize(held);
    if (s.offset) offsets_.resize(scales_.size()), offset_.resize(held);
    for (int64_t n = 0; n < s.outputs; n++)
        for (int64_t g = 0; g < w.groups; g++) {
            const size_t at = static_cast<size_t>(((n / BLOCK) * w.groups + g) * BLOCK + n % BLOCK), i = static_cast<size_t>(n * w.groups + g);
            if (s.scale_type == SCALE_F32) {
                scales_[i] = scale32_[at] = random.real(1e-3f, 0.1f);
            } else if (s.scale_type == SCALE_BF16) {
                scale16_[at] = static_cast<uint16_t>(bits_of(random.real(1e-3f, 0.1f)) >> 16);
                scales_[i] = float_of(static_cast<uint32_t>(scale16_[at]) << 16);
            } else {
                // Subnormal ones among them, and either sign.
                scale16_[at] = static_cast<uint16_t>(random.whole(0, 14 << 10) | random.whole(0, 1) << 15);
                scales_[i] = float16(scale16_[at]);
            }
            if (s.offset) offsets_[i] = offset_[at] = random.real(-0.5f, 1.0f);
        }
    w.scale = s.scale_type == SCALE_F32 ? static_cast<const void*>(scale32_.data()) : scale16_.data();
    if (s.offset) w.offset = offset_.data();
    if (s.kind == NF4) w.levels = NF4_LEVELS;
    if (s.kind == TRELLIS) w.levels = table_.data();
    if (s.permuted) {
        perm_ = random.order(s.inputs);
        w.perm = perm_.data();
    }
    if (s.input_scale != 0.0f) {
        input_scale_ = {s.input_scale};
        w.input_scale = input_scale_.data();
    }
}

std::vector<uint8_t> TestLayer::random_tiles(const LayerShape& s, Random& random) {
    const int64_t down = (s.outputs + 15) / 16, across = (s.inputs + 15) / 16, size = 32 * s.bits;
    std::vector<uint8_t> tiles(static_cast<size_t>(down * across * size));
    for (uint8_t& byte : tiles) byte = static_cast<uint8_t>(random.whole(0, 255));
    for (int state = 0; state < 128; state++) table_.push_back(static_cast<int8_t>(random.whole(-127, 127)));
    for (int64_t n = 0; n < s.outputs; n++)
        for (int64_t k = 0; k < s.inputs; k++) {
            const uint8_t* tile = tiles.data() + (n / 16 * across + k / 16) * size;
            const int64_t t = k % 16 / 4 * 64 + n % 16 * 4 + k % 4;
            int state = 0;
            for (int64_t j = 0; j < 8; j++) {
                const int64_t bit = (s.bits * t + j) % (256 * s.bits);
                state |= (tile[bit / 8] >> bit % 8 & 1) << j;
            }
            levels_[static_cast<size_t>(n * s.inputs + k)] = state < 128 ? table_[state] : -table_[state - 128];
        }
    return tiles;
}

std::vector<Expected> TestLayer::expected(const float* x) const {
    if (!is_float()) return expected_of_codes(x);
    std::vector<Expected> out(static_cast<size_t>(weights.outputs));
    for (int64_t n = 0; n < weights.outputs; n++) {
        double sum = bias_.empty() ? 0.0 : bias_[n], magnitude = std::fabs(sum);
        for (int64_t k = 0; k < weights.inputs; k++) {
            const double term = levels_[n * weights.inputs + k] * x[k];
            sum += term, magnitude += std::fabs(term);
        }
        out[n] = {sum, magnitude};
    }
    return out;
}

std::vector<Expected> TestLayer::expected_of_codes(const float* x) const {
    const Weights& w = weights;
    std::vector<Expected> out(static_cast<size_t>(w.outputs), {0.0, 0.0});
    for (int64_t g = 0; g < w.groups; g++) {
        const int64_t from = g * w.group_inputs, to = std::min(w.inputs, from + w.group_inputs);
        Floats own;
        bool number = true;
        float most = 0.0f;
        for (int64_t k = from; k < to; k++) {
            own.push_back(x[perm_.empty() ? k : perm_[k]]);
            number = number && !std::isnan(own.back());
            most = std::max(most, std::fabs(own.back()));
        }
        float step = w.input_scale ? *w.input_scale : most / 127.0f;
        float inverse = step > 0.0f ? 1.0f / step : 0.0f;
        if (std::isinf(inverse)) inverse = 0.0f;
        std::vector<int64_t> codes;
        int64_t sum = 0;
        for (float v : own) {
            const float code = number ? std::nearbyint(w.input_scale ? v / step : v * inverse) : 0.0f;
            codes.push_back(std::isnan(code) ? -127 : static_cast<int64_t>(std::clamp(code, -127.0f, 127.0f)));
            sum += codes.back();
        }
        if (!number) step = NAN;
        for (int64_t n = 0; n < w.outputs; n++) {
            int64_t exact = 0;
            for (int64_t k = from; k < to; k++) exact += static_cast<int64_t>(levels_[n * w.inputs + k]) * codes[k - from];
            const double scaled = static_cast<double>(exact) * scales_[n * w.groups + g] * step;
            const double moved = offsets_.empty() ? 0.0 : static_cast<double>(sum) * offsets_[n * w.groups + g] * step;
            out[n].value += scaled - moved, out[n].magnitude += std::fabs(scaled) + std::fabs(moved);
        }
    }
    for (int64_t n = 0; n < w.outputs && !bias_.empty(); n++) out[n].value += bias_[n], out[n].magnitude += std::fabs(bias_[n]);
    return out;
}

TestInputs::TestInputs(const NamedPath& path, const Weights& w, const Floats& x, int64_t rows) {
    const bool floats = w.kind == F32 || w.kind == BF16;
    const int64_t wide = floats ? w.group : w.groups * w.group;
    inputs.rows = rows, inputs.groups = w.groups;
    // Odd on purpose: nothing may count on a row's alignment.
    inputs.stride = wide + 7;
    const size_t size = static_cast<size_t>(rows ? (rows - 1) * inputs.stride + wide : 0);
    if (floats) {
        values = Floats(size, NAN);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t k = 0; k < w.group; k++) values[row * inputs.stride + k] = k < w.inputs ? x[row * w.inputs + k] : 0.0f;
    } else {
        codes = std::vector<int8_t>(size, 77);
        step = Floats(static_cast<size_t>(rows * w.groups));
        sums = std::vector<int32_t>(static_cast<size_t>(rows * w.groups));
        for (int64_t row = 0; row < rows; row++) {
            const Floats own(x.begin() + row * w.inputs, x.begin() + (row + 1) * w.inputs);
            Floats scratch(static_cast<size_t>(w.inputs));
            path.kernels->quantize(w, own.data(), codes.data() + row * inputs.stride, step.data() + row * w.groups,
                                   sums.data() + row * w.groups, scratch.data());
        }
        if (path.kernels->widen && (w.kind == INT8 || w.kind == NF4 || w.kind == NESTED || w.kind == TRELLIS)) {
            words = std::vector<int16_t>(size, 77);
            pairs = std::vector<int32_t>(static_cast<size_t>(rows * w.groups));
            for (int64_t row = 0; row < rows; row++)
                path.kernels->widen(w, codes.data() + row * inputs.stride, words.data() + row * inputs.stride, pairs.data() + row * w.groups);
        }
    }
    inputs = of(0, rows);
}

Inputs TestInputs::of(int64_t first, int64_t count) const {
    const int64_t at = first * inputs.stride, group = first * inputs.groups;
    Inputs out = {count, inputs.stride, inputs.groups, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
    if (!values.empty()) out.values = values.data() + at;
    if (!codes.empty()) out.codes = codes.data() + at, out.step = step.data() + group, out.sums = sums.data() + group;
    if (!words.empty()) out.wide = words.data() + at, out.pairs = pairs.data() + group;
    return out;
}

}  // namespace kernels_test
