// A random layer in the kernels' blocks, and what its product should be, in plain double arithmetic.
#pragma once

#include <memory>

#include "check.h"
#include "pool.h"

namespace kernels_test {

struct LayerShape {
    int64_t kind, outputs, inputs;
    int64_t group = 0;  // inputs; 0: all
    int64_t scale_type = specpress::SCALE_F32;
    int64_t zero = 0;   // int4: 8 (codes −8..7) or 0 (codes 0..15)
    bool offset = false, bias = false, permuted = false;
    float input_scale = 0.0f;  // 0: measured per row and group
    int64_t bits = 0;          // of a trellis
};

// A product and the sum of its terms' magnitudes, by which float arithmetic may be off.
struct Expected {
    double value, magnitude;
};

struct TestLayer {
    TestLayer(const LayerShape& shape, Random& random, specpress::Pool& pool);
    TestLayer(const TestLayer&) = delete;
    TestLayer& operator=(const TestLayer&) = delete;

    bool is_float() const { return weights.kind == specpress::F32 || weights.kind == specpress::BF16; }

    // What this layer makes of one row of inputs; rounds it as the scheme says.
    std::vector<Expected> expected(const float* x) const;

    specpress::Weights weights{};
    std::vector<uint8_t> packed;

   private:
    std::vector<Expected> expected_of_codes(const float* x) const;
    // Random sequences and levels, as files have them; what each weight is follows docs/trellis.md.
    std::vector<uint8_t> random_tiles(const LayerShape& shape, Random& random);

    std::vector<double> levels_;   // [outputs][inputs]: the integers that codes stand for, or the float weights
    std::vector<double> scales_;   // [outputs][groups]
    std::vector<double> offsets_;  // the same, or empty
    std::vector<int8_t> table_;    // [128], of a trellis
    Floats scale32_, offset_, bias_;
    std::vector<uint16_t> scale16_;
    std::vector<int32_t> sums_, perm_;
    Floats input_scale_;
};

// Rows of inputs as layer w wants them, each buffer just as long as what is read of it.
struct TestInputs {
    TestInputs(const NamedPath& path, const specpress::Weights& w, const Floats& x, int64_t rows);
    // Rows first..first + count of them.
    specpress::Inputs of(int64_t first, int64_t count) const;

    specpress::Inputs inputs{};
    Floats values;
    std::vector<int8_t> codes;
    Floats step;
    std::vector<int32_t> sums;
    std::vector<int16_t> words;
    std::vector<int32_t> pairs;
};

}  // namespace kernels_test
