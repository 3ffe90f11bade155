// What happens to single rows between the products: norm, activation, rotation, and rounding to what a layer takes.
// Each operation is kernels/reference.py's, in its order.
#include "kernels.h"
#include "vec.h"

namespace SPECPRESS_PATH {

using specpress::Weights;

// Σ of `size` values, halving as exact.tree_sum does: pad to a power of two, add the upper half to the lower, repeat.
static float halved(float* scratch, int64_t size) {
    int64_t width = 1;
    while (width < size) width *= 2;
    for (int64_t i = size; i < width; i++) scratch[i] = 0.0f;
    while (width > 1) {
        width /= 2;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store(scratch + i, add(load(scratch + i), load(scratch + i + width)));
        for (; i < width; i++) scratch[i] = scratch[i] + scratch[i + width];
    }
    return scratch[0];
}

static float tree_sum_of_squares(const float* x, int64_t size, float* scratch) {
    for (int64_t i = 0; i < size; i++) scratch[i] = x[i] * x[i];
    return halved(scratch, size);
}

void norm(const float* x, const float* weight, int64_t size, float eps, float offset, float* out, float* scratch) {
    const float mean = tree_sum_of_squares(x, size, scratch) / static_cast<float>(size);
    const float inverse = 1.0f / std::sqrt(mean + eps);
    if (offset != 0.0f) {
        for (int64_t i = 0; i < size; i++) out[i] = (x[i] * inverse) * (weight[i] + offset);
    } else {
        for (int64_t i = 0; i < size; i++) out[i] = (x[i] * inverse) * weight[i];
    }
}

void layer_norm(const float* x, const float* weight, const float* bias, int64_t size, float eps, float* out, float* scratch) {
    std::memcpy(scratch, x, static_cast<size_t>(size) * 4);
    const float mean = halved(scratch, size) / static_cast<float>(size);
    for (int64_t i = 0; i < size; i++) out[i] = x[i] - mean;
    norm(out, weight, size, eps, 0.0f, out, scratch);
    if (bias)
        for (int64_t i = 0; i < size; i++) out[i] = out[i] + bias[i];
}

static F16 sigmoid_of(F16 x) { return div(set(1.0f), add(set(1.0f), exp(sub(zero(), x)))); }
static F16 silu(F16 x) { return mul(x, sigmoid_of(x)); }

static F16 gelu_tanh(F16 x) {
    F16 cube = mul(mul(x, x), x);
    F16 u = mul(set(0.7978845608028654f), add(x, mul(set(0.044715f), cube)));
    return mul(mul(set(0.5f), x), add(set(1.0f), tanh(u)));
}

// exact.erf.
static F16 erf(F16 x) {
    const F16 size = as_float(andi(bits(x), 0x7fffffff));
    const F16 t = div(set(1.0f), add(set(1.0f), mul(set(0.3275911f), size)));
    F16 poly = mul(t, set(1.061405429f));
    poly = mul(add(poly, set(-1.453152027f)), t);
    poly = mul(add(poly, set(1.421413741f)), t);
    poly = mul(add(poly, set(-0.284496736f)), t);
    poly = mul(add(poly, set(0.254829592f)), t);
    const F16 y = sub(set(1.0f), mul(poly, exp(sub(zero(), mul(size, size)))));
    return where_less(x, zero(), sub(zero(), y), y);
}

static F16 gelu(F16 x) { return mul(mul(set(0.5f), x), add(set(1.0f), erf(mul(x, set(0.7071067811865476f))))); }
static F16 relu(F16 x) { return where_less(x, zero(), zero(), x); }

// f(g) or f(g, u) of sixteen at a time; without `up` the second is 0.
template <class F>
static void each(const float* gate, const float* up, int64_t size, float* out, F&& f) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(out + i, f(load(gate + i), up ? load(up + i) : zero()));
    if (i == size) return;
    float g[LANES] = {}, u[LANES] = {}, y[LANES];
    std::memcpy(g, gate + i, static_cast<size_t>(size - i) * 4);
    if (up) std::memcpy(u, up + i, static_cast<size_t>(size - i) * 4);
    store(y, f(load(g), load(u)));
    std::memcpy(out + i, y, static_cast<size_t>(size - i) * 4);
}

template <class F>
static void gated_by(const float* gate, const float* up, int64_t size, float* out, F&& act) {
    if (up)
        each(gate, up, size, out, [&](F16 g, F16 u) { return mul(act(g), u); });
    else
        each(gate, nullptr, size, out, [&](F16 g, F16) { return act(g); });
}

void gated(const float* gate, const float* up, int64_t size, int64_t activation, const float* p, float* out) {
    using namespace specpress;
    switch (activation) {
        case GELU_TANH: return gated_by(gate, up, size, out, gelu_tanh);
        case GELU: return gated_by(gate, up, size, out, gelu);
        case RELU: return gated_by(gate, up, size, out, relu);
        case RELU2: return gated_by(gate, up, size, out, [](F16 x) { return mul(relu(x), relu(x)); });
        case XIELU:
            return gated_by(gate, up, size, out, [&](F16 x) {
                const F16 low = sub(sub(exp(min(x, set(p[3]))), set(1.0f)), x);
                const F16 high = mul(mul(set(p[0]), x), x);
                return add(where_less(zero(), x, high, mul(low, set(p[1]))), mul(set(p[2]), x));
            });
        case CLAMPED_SWIGLU:
            return each(gate, up, size, out, [&](F16 g, F16 u) {
                const F16 most = set(p[0]);
                g = min(g, most), u = min(max(u, sub(zero(), most)), most);
                return mul(mul(g, sigmoid_of(mul(g, set(p[1])))), add(u, set(1.0f)));
            });
        default: return gated_by(gate, up, size, out, silu);
    }
}

void capped(float* x, int64_t size, float cap) {
    each(x, nullptr, size, x, [&](F16 v, F16) { return mul(tanh(div(v, set(cap))), set(cap)); });
}

void sigmoid(float* x, int64_t size) {
    each(x, nullptr, size, x, [](F16 v, F16) { return sigmoid_of(v); });
}

// delta.softplus.
static F16 softplus(F16 x) {
    const F16 t = exp(sub(zero(), as_float(andi(bits(x), 0x7fffffff)))), s = div(t, add(set(2.0f), t)), square = mul(s, s);
    F16 poly = set(static_cast<float>(2.0 / 17));
    for (int n = 7; n >= 0; n--) poly = add(mul(poly, square), set(static_cast<float>(2.0 / (2 * n + 1))));
    return add(where_less(zero(), x, x, zero()), mul(poly, s));
}

void decay(const float* x, const float* rate, int64_t size, float* out) {
    each(x, rate, size, out, [](F16 v, F16 r) { return exp(mul(r, softplus(v))); });
}

void mamba_steps(float* x, const float* rate, int64_t size, float low, float high, float* left) {
    const F16 least = set(low), most = set(high);
    each(x, nullptr, size, x, [&](F16 v, F16) {
        v = softplus(v);
        v = where_less(v, least, least, v);
        return where_less(most, v, most, v);  // a NaN stays
    });
    each(x, rate, size, left, [](F16 v, F16 r) { return exp(mul(r, v)); });
}

// Half-split rotary embedding of `heads` adjacent heads, in place.
void rotate(float* x, int64_t heads, int64_t dim, int64_t half, const float* cos, const float* sin) {
    for (int64_t h = 0; h < heads; h++, x += dim) {
        int64_t i = 0;
        for (; i + LANES <= half; i += LANES) {
            F16 a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
            store(x + i, sub(mul(a, c), mul(b, s)));
            store(x + half + i, add(mul(b, c), mul(a, s)));
        }
        for (; i < half; i++) {
            float a = x[i], b = x[half + i];
            x[i] = a * cos[i] - b * sin[i];
            x[half + i] = b * cos[i] + a * sin[i];
        }
    }
}

// Largest magnitude, compared as integers: a NaN lies above everything and is not lost.
static float absmax(const float* x, int64_t size) {
    I16 most = seti(0);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) most = maxi(most, andi(bits(load(x + i)), 0x7fffffff));
    float lanes[LANES];
    store(lanes, as_float(most));
    int32_t highest = 0;
    for (int j = 0; j < LANES; j++) {
        int32_t v;
        std::memcpy(&v, lanes + j, 4);
        highest = v > highest ? v : highest;
    }
    for (; i < size; i++) {
        int32_t v;
        std::memcpy(&v, x + i, 4);
        v &= 0x7fffffff;
        highest = v > highest ? v : highest;
    }
    float out;
    std::memcpy(&out, &highest, 4);
    return out;
}

// Codes of `size` values times `factor` (or over `divisor`, if that is not 0), as sixteen at a time; returns their sum.
static int32_t round_group(const float* x, int64_t size, float factor, float divisor, int8_t* codes) {
    const F16 by = set(divisor != 0.0f ? divisor : factor), low = set(-127.0f), high = set(127.0f);
    I16 sums = seti(0);
    auto rounded = [&](const float* p) {
        F16 v = divisor != 0.0f ? div(load(p), by) : mul(load(p), by);
        return to_int(min(max(round_even(v), low), high));  // a NaN becomes −127; the step is NaN then
    };
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        I16 q = rounded(x + i);
        sums = addi(sums, q);
        store_bytes(codes + i, q);
    }
    int32_t total = 0;
    int32_t lanes[LANES];
    std::memcpy(lanes, &sums, 64);
    for (int j = 0; j < LANES; j++) total += lanes[j];
    if (i < size) {
        float rest[LANES] = {};
        int8_t bytes[LANES];
        std::memcpy(rest, x + i, static_cast<size_t>(size - i) * 4);
        I16 q = rounded(rest);
        store_bytes(bytes, q);
        std::memcpy(codes + i, bytes, static_cast<size_t>(size - i));
        for (int64_t j = 0; j < size - i; j++) total += bytes[j];
    }
    return total;
}

// The factor of codes whose scale this is. A subnormal scale's is infinite: such a row is zero for every purpose.
static float inverse_of(float scale) {
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    return std::isinf(inverse) ? 0.0f : inverse;
}

// As reference.quantize_rows; each row's scale lies before its codes.
void to_codes(const float* x, int64_t rows, int64_t size, uint8_t* out) {
    for (int64_t row = 0; row < rows; row++, x += size, out += 4 + size) {
        const float scale = absmax(x, size) / 127.0f;
        std::memcpy(out, &scale, 4);
        round_group(x, size, inverse_of(scale), 0.0f, reinterpret_cast<int8_t*>(out + 4));
    }
}

void from_codes(const uint8_t* x, int64_t rows, int64_t size, float* out) {
    for (int64_t row = 0; row < rows; row++, x += 4 + size, out += size) {
        const int8_t* codes = reinterpret_cast<const int8_t*>(x + 4);
        float scale;
        std::memcpy(&scale, x, 4);
        for (int64_t i = 0; i < size; i++) out[i] = static_cast<float>(codes[i]) * scale;
    }
}

// Symmetric int8 by absmax over each group, as reference.quantize_rows; or with the layer's static scale.
void quantize(const Weights& w, const float* values, int8_t* codes, float* step, int32_t* sums, float* scratch) {
    const float* x = values;
    if (w.perm) {
        for (int64_t j = 0; j < w.inputs; j++) scratch[j] = values[w.perm[j]];
        x = scratch;
    }
    for (int64_t g = 0; g < w.groups; g++) {
        const int64_t from = g * w.group_inputs;
        const int64_t size = w.inputs - from < w.group_inputs ? w.inputs - from : w.group_inputs;
        int8_t* out = codes + g * w.group;
        if (w.input_scale) {
            // As with measured steps, a NaN must not be lost in the codes.
            step[g] = std::isnan(absmax(x + from, size)) ? NAN : *w.input_scale;
            sums[g] = round_group(x + from, size, 0.0f, *w.input_scale, out);
        } else {
            const float scale = absmax(x + from, size) / 127.0f;
            step[g] = scale;
            sums[g] = round_group(x + from, size, inverse_of(scale), 0.0f, out);
        }
        std::memset(out + size, 0, static_cast<size_t>(w.group - size));
        if (UNSIGNED_DOT && w.kind == specpress::INT8) {
            uint8_t* raw = reinterpret_cast<uint8_t*>(out);
            for (int64_t i = 0; i < w.group; i++) raw[i] ^= 0x80;
        }
    }
}

#if defined(SPECPRESS_WORDS)
void widen(const Weights& w, const int8_t* codes, int16_t* wide, int32_t* pairs) {
    for (int64_t g = 0; g < w.groups; g++) {
        int32_t sum = 0;
        for (int64_t k = 0; k < w.group; k += 4, codes += 4, wide += 4) {
            wide[0] = codes[1], wide[1] = codes[3], wide[2] = codes[0], wide[3] = codes[2];
            sum += codes[0] * codes[1] + codes[2] * codes[3];
        }
        pairs[g] = sum;
    }
}
#endif

// As sampling.finite_choices, over all logits and then over the first `limit`.
int64_t largest(const float* x, int64_t size, int64_t limit) {
    // Stretches of this many: only in the one with the maximum is the place looked for.
    constexpr int64_t STRETCH = 512;
    int64_t best = 0;
    float highest = -INFINITY;
    bool finite = true;
    for (int64_t from = 0; from < size; from += STRETCH) {
        const int64_t end = from + STRETCH < size ? from + STRETCH : size, known = end < limit ? end : limit;
        F16 top = set(-INFINITY);
        I16 most = seti(0);
        int64_t i = from;
        for (; i + LANES <= known; i += LANES) {
            const F16 v = load(x + i);
            top = max(top, v), most = maxi(most, andi(bits(v), 0x7fffffff));
        }
        float lane = lane_max(top);
        for (int64_t k = i; k < known; k++) lane = x[k] > lane ? x[k] : lane;
        if (lane > highest) highest = lane, best = from;
        float magnitude[LANES];
        store(magnitude, as_float(most));
        for (int j = 0; j < LANES; j++) finite = finite && std::isfinite(magnitude[j]);
        for (; i < end; i++) finite = finite && std::isfinite(x[i]);
    }
    if (!finite) {
        // Rare: masked tokens (-inf) are no fault, the rest is. A NaN may also have hidden the maximum.
        highest = -INFINITY, best = 0;
        for (int64_t i = 0; i < size; i++) {
            if (std::isnan(x[i]) || x[i] == INFINITY) return -1;
            if (i < limit && x[i] > highest) highest = x[i], best = i;
        }
        if (highest == -INFINITY) return -1;
    }
    while (x[best] != highest) best++;
    return best;
}

}  // namespace SPECPRESS_PATH
