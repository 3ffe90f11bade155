// What happens to single rows: norm, activation, rotation, rounding and the choice of experts, at odd sizes.
#include <algorithm>
#include <cmath>
#include <string>

#include "check.h"
#include "noise.h"

namespace kernels_test {

using namespace specpress;

namespace {

void norms(const NamedPath& path, Random& random) {
    for (int64_t size : {1, 2, 3, 15, 16, 17, 31, 33, 64, 100, 257})
        for (float offset : {0.0f, 1.0f}) {
            const std::string what = path.name + " norm of " + std::to_string(size);
            Floats x = random.reals(size, -3.0f, 3.0f);
            const Floats weight = random.reals(size, -1.0f, 1.0f);
            int64_t width = 1;
            while (width < size) width *= 2;
            Floats out(static_cast<size_t>(size)), scratch(static_cast<size_t>(width));
            path.kernels->norm(x.data(), weight.data(), size, 1e-5f, offset, out.data(), scratch.data());
            double squares = 0.0;
            for (float v : x) squares += static_cast<double>(v) * v;
            const double root = std::sqrt(squares / static_cast<double>(size) + 1e-5);
            for (int64_t i = 0; i < size; i++) {
                const double wanted = x[i] / root * (static_cast<double>(weight[i]) + offset);
                expect_close(out[i], wanted, 1e-5 * (std::fabs(wanted) + 1e-3), what);
            }
            record(path, "norm", out);
            // In place, as the heads' norms are.
            Floats same = x;
            path.kernels->norm(same.data(), weight.data(), size, 1e-5f, offset, same.data(), scratch.data());
            expect_same(same, out, what + " in place");
            for (float odd : {NAN, INFINITY, 1e30f}) {
                x[size / 2] = odd;
                path.kernels->norm(x.data(), weight.data(), size, 1e-5f, offset, out.data(), scratch.data());
                if (odd != 1e30f) expect(std::isnan(out[size / 2]), what + ": a NaN stays one, and an infinity becomes one");
                record(path, "norm", out);
            }
        }
}

double activation(double x, bool gelu) {
    if (!gelu) return x / (1.0 + std::exp(-x));
    return 0.5 * x * (1.0 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

void gates(const NamedPath& path, Random& random) {
    for (int64_t size : {1, 7, 15, 16, 17, 40, 100})
        for (bool gelu : {false, true}) {
            const std::string what = path.name + (gelu ? " gelu of " : " silu of ") + std::to_string(size);
            Floats gate = random.reals(size, -12.0f, 12.0f);
            const Floats up = random.reals(size, -2.0f, 2.0f);
            Floats out(static_cast<size_t>(size));
            path.kernels->gated(gate.data(), up.data(), size, gelu ? GELU_TANH : SILU, nullptr, out.data());
            for (int64_t i = 0; i < size; i++)
                expect_close(out[i], activation(gate[i], gelu) * up[i], 4e-6 * (1.0 + std::fabs(gate[i] * up[i])), what);
            record(path, "gated", out);
            for (float odd : {1e30f, -1e30f, 1e-42f, INFINITY, -INFINITY, NAN}) {
                gate[size - 1] = odd;
                path.kernels->gated(gate.data(), up.data(), size, gelu ? GELU_TANH : SILU, nullptr, out.data());
                record(path, "gated", out);
                if (std::isnan(odd)) expect(std::isnan(out[size - 1]), what + ": a NaN stays one");
                if (odd == 1e30f) expect_close(out[size - 1], static_cast<double>(odd) * up[size - 1], 1e25, what + " far out");
            }
        }
}

void rotations(const NamedPath& path, Random& random) {
    for (int64_t dim : {2, 6, 16, 48, 80, 100})
        for (int64_t half : {dim / 2, dim / 4, static_cast<int64_t>(0)}) {
            const std::string what = path.name + " rotation of " + std::to_string(2 * half) + " of " + std::to_string(dim);
            const int64_t heads = 3;
            const Floats x = random.reals(heads * dim, -1.0f, 1.0f), cos = random.reals(half, -1.0f, 1.0f), sin = random.reals(half, -1.0f, 1.0f);
            Floats out = x;
            path.kernels->rotate(out.data(), heads, dim, half, cos.data(), sin.data());
            record(path, "rotate", out);
            for (int64_t i = 0; i < heads * dim; i++) {
                const int64_t d = i % dim;
                double wanted = x[i];
                if (d < half) wanted = static_cast<double>(x[i]) * cos[d] - static_cast<double>(x[i + half]) * sin[d];
                else if (d < 2 * half) wanted = static_cast<double>(x[i]) * cos[d - half] + static_cast<double>(x[i - half]) * sin[d - half];
                expect_close(out[i], wanted, d < 2 * half ? 3e-7 : 0.0, what);
            }
        }
}

void roundings(const NamedPath& path, Random& random) {
    for (int64_t inputs : {1, 15, 16, 17, 33, 100})
        for (int64_t group : {static_cast<int64_t>(10), static_cast<int64_t>(32), inputs})
            for (int64_t kind : {INT8, INT4, TERNARY}) {
                const std::string what = path.name + " rounding of " + std::to_string(inputs) + " in groups of " + std::to_string(group);
                Weights w{};
                const int64_t step_size = kind == INT8 ? 4 : kind == INT4 ? 8 : 16;
                w.kind = kind, w.outputs = 1, w.inputs = inputs, w.group_inputs = group;
                w.group = (group + step_size - 1) / step_size * step_size, w.groups = (inputs + group - 1) / group;
                const Floats x = random.reals(inputs, -5.0f, 5.0f);
                const std::vector<int32_t> perm = random.order(inputs);
                w.perm = perm.data();
                std::vector<int8_t> codes(static_cast<size_t>(w.groups * w.group), 55);
                Floats step(static_cast<size_t>(w.groups)), scratch(static_cast<size_t>(inputs));
                std::vector<int32_t> sums(static_cast<size_t>(w.groups));
                path.kernels->quantize(w, x.data(), codes.data(), step.data(), sums.data(), scratch.data());
                // With an unsigned operand int8 inputs are stored with 128 added.
                const bool turned = path.kernels->unsigned_dot && kind == INT8;
                for (int64_t g = 0; g < w.groups; g++) {
                    int64_t sum = 0;
                    for (int64_t i = 0; i < w.group; i++) {
                        const int8_t raw = codes[g * w.group + i];
                        const int64_t code = turned ? static_cast<int64_t>(static_cast<uint8_t>(raw)) - 128 : raw, k = g * group + i;
                        sum += code;
                        if (i >= group || k >= inputs) expect(code == 0, what + ": what does not exist is 0");
                        else expect_close(static_cast<double>(code) * step[g], x[perm[k]], 0.5001 * step[g], what);
                    }
                    expect(sum == sums[g], what + ": the sum is the codes'");
                }
                for (int8_t& code : codes) code = static_cast<int8_t>(turned ? code ^ 0x80 : code);
                record(path, "quantize", codes.data(), codes.size());
                record(path, "quantize", step);
            }
}

void choices(const NamedPath& path, Random& random) {
    for (int64_t experts : {1, 2, 7, 16, 17, 60})
        for (int64_t chosen : {static_cast<int64_t>(1), std::min<int64_t>(experts, 4), experts})
            for (bool renormalize : {false, true}) {
                const std::string what = path.name + " " + std::to_string(chosen) + " of " + std::to_string(experts) + " experts";
                const int64_t rows = 5;
                Floats scores = random.reals(rows * experts, -4.0f, 4.0f);
                // One row that says nothing, one whose experts are equal, one that underflows.
                for (int64_t e = 0; e < experts; e++) {
                    scores[experts + e] = NAN, scores[2 * experts + e] = 0.5f;
                    scores[3 * experts + e] = e ? -1e30f : 1e30f;
                }
                const Floats before = scores;
                std::vector<int64_t> which(static_cast<size_t>(rows * chosen), -1);
                path.kernels->choose(scores.data(), rows, {experts, chosen, renormalize}, which.data());
                record(path, "choose", scores);
                record(path, "choose", which.data(), which.size() * sizeof(int64_t));
                for (int64_t row = 0; row < rows; row++) {
                    double total = 0.0, kept = 0.0, most = -INFINITY;
                    for (int64_t e = 0; e < experts; e++) most = std::max<double>(most, before[row * experts + e]);
                    std::vector<int> times(static_cast<size_t>(experts));
                    for (int64_t e = 0; e < experts; e++) total += std::exp(before[row * experts + e] - most);
                    for (int64_t i = 0; i < chosen; i++) {
                        const int64_t e = which[row * chosen + i];
                        expect(e >= 0 && e < experts && times[e]++ == 0, what + ": each is chosen once");
                        kept += std::exp(before[row * experts + e] - most) / total;
                        // Equal ones are taken in their order.
                        if (row == 2) expect(e == i, what + ": the first of equal ones");
                    }
                    double lowest = INFINITY, highest_left = -INFINITY;
                    for (int64_t e = 0; e < experts; e++) {
                        const double score = before[row * experts + e];
                        if (times[e]) lowest = std::min(lowest, score);
                        else highest_left = std::max(highest_left, score);
                        const double share = std::exp(score - most) / total / (renormalize ? kept : 1.0);
                        if (row == 1 && times[e]) expect(std::isnan(scores[experts + e]), what + ": a NaN stays one");
                        else if (row != 1) expect_close(scores[row * experts + e], times[e] ? share : 0.0, 1e-5, what);
                    }
                    if (row != 1) expect(lowest >= highest_left, what + ": the largest");
                }
            }
}

void largest(const NamedPath& path, Random& random) {
    for (int64_t size : {1, 15, 16, 17, 511, 512, 513, 1100})
        for (int64_t limit : {static_cast<int64_t>(1), (size + 1) / 2, size}) {
            const std::string what = path.name + " largest of " + std::to_string(limit) + " of " + std::to_string(size);
            Floats x = random.reals(size, -3.0f, 3.0f);
            // Few different values: the first of equals.
            for (float& v : x) v = std::round(v);
            auto wanted = [&] { return std::max_element(x.begin(), x.begin() + limit) - x.begin(); };
            expect(path.kernels->largest(x.data(), size, limit) == wanted(), what);
            const int64_t at = random.whole(0, size - 1);
            for (float odd : {-INFINITY, INFINITY, NAN, -NAN}) {
                const float before = x[at];
                x[at] = odd;
                const bool sound = odd == -INFINITY && x[wanted()] != -INFINITY;
                expect(path.kernels->largest(x.data(), size, limit) == (sound ? wanted() : -1), what + " with " + std::to_string(odd));
                x[at] = before;
            }
        }
}

// Numbers for sampling: no path's own, but the compiler's.
void noise(const NamedPath& path, Random& random) {
    for (int64_t count : {1, 4, 7, 100}) {
        std::vector<double> out(static_cast<size_t>(count));
        const auto any = [&] { return static_cast<uint64_t>(random.whole(0, INT64_MAX - 1)); };
        const uint64_t seed = any(), position = any(), lane = any(), stream = any();
        uniforms(seed, position, lane, stream, count, out.data());
        for (double v : out) expect(v > 0.0 && v < 1.0, path.name + " noise is between 0 and 1");
        record(path, "noise", out.data(), out.size() * sizeof(double));
    }
}

}  // namespace

void test_rows(const NamedPath& path) {
    Random random(21);
    noise(path, random);
    norms(path, random);
    gates(path, random);
    rotations(path, random);
    roundings(path, random);
    choices(path, random);
    largest(path, random);
}

}  // namespace kernels_test
