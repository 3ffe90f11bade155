// pack and linear: every kind, odd sizes and groups, any number of rows, and numbers at the edges of float32.
#include <cmath>
#include <string>

#include "layer.h"
#include "pack.h"

namespace kernels_test {

using namespace specpress;

namespace {

const char* const NAMES[KINDS] = {"f32", "bf16", "int8", "int4", "nf4", "ternary", "nested", "upper", "trellis", "ternary-1.25"};
// Formats whose layers have one scale a row.
bool by_rows(int64_t kind) { return kind == TRELLIS || kind == THREE_OF_FOUR; }

std::string describe(const NamedPath& path, const LayerShape& s, int64_t rows) {
    return path.name + " " + NAMES[s.kind] + " " + std::to_string(s.outputs) + "x" + std::to_string(s.inputs) + " groups of " +
           std::to_string(s.group) + " scale type " + std::to_string(s.scale_type) + " zero " + std::to_string(s.zero) +
           (s.offset ? " offset" : "") + (s.permuted ? " perm" : "") + " rows " + std::to_string(rows);
}

Floats product(const NamedPath& path, const TestLayer& layer, const Inputs& in) {
    const Weights& w = layer.weights;
    Floats y(static_cast<size_t>(in.rows * w.outputs), NAN);
    path.kernels->linear[w.kind](w, in, 0, (w.outputs + BLOCK - 1) / BLOCK, y.data(), w.outputs, false);
    return y;
}

void compare(const NamedPath& path, const LayerShape& shape, int64_t rows, Random& random, Pool& pool) {
    const std::string what = describe(path, shape, rows);
    const TestLayer layer(shape, random, pool);
    const Weights& w = layer.weights;
    const Floats x = random.reals(rows * w.inputs, -2.0f, 2.0f);
    const TestInputs in(path, w, x, rows);
    const Floats y = product(path, layer, in.inputs);
    // A rounding for each term that is added up, and a few for its making.
    const double roundings = static_cast<double>(layer.is_float() ? 2 * w.inputs : w.groups) + 6.0;
    for (int64_t row = 0; row < rows; row++) {
        const std::vector<Expected> wanted = layer.expected(x.data() + row * w.inputs);
        for (int64_t n = 0; n < w.outputs; n++)
            expect_close(y[row * w.outputs + n], wanted[n].value, roundings * 6e-8 * wanted[n].magnitude, what);
        // Alone, a row has the bits that it has among others.
        const Floats among(y.begin() + row * w.outputs, y.begin() + (row + 1) * w.outputs);
        expect_same(product(path, layer, in.of(row, 1)), among, what + " alone");
    }
    // Added to what is there, block by block.
    Floats added = random.reals(rows * w.outputs, -1.0f, 1.0f), sums = added;
    for (int64_t block = (w.outputs + BLOCK - 1) / BLOCK - 1; block >= 0; block--)
        path.kernels->linear[w.kind](w, in.inputs, block, block + 1, added.data(), w.outputs, true);
    for (size_t i = 0; i < sums.size(); i++) sums[i] = sums[i] + y[i];
    expect_same(added, sums, what + " added");
    record(path, NAMES[shape.kind], y);
    record(path, NAMES[shape.kind], added);
}

std::vector<LayerShape> shapes_of(int64_t kind) {
    std::vector<LayerShape> shapes;
    int64_t turn = 0;
    for (int64_t outputs : {1, 31, 33, 100})
        for (int64_t inputs : {1, 5, 64, 131}) {
            LayerShape s = {kind, outputs, inputs};
            s.bias = turn % 3 == 0, s.scale_type = turn % 3, s.permuted = kind >= INT8 && turn % 4 == 1;
            s.zero = kind == INT4 && turn % 2 ? 8 : 0, s.offset = kind == INT4 && turn % 2 == 0;
            if ((kind == INT8 || kind >= NESTED) && turn % 5 == 2) s.input_scale = 0.01f;
            const int64_t groups[] = {0, 10, 32, 64, 128};
            // The float kinds have one group.
            if (kind >= INT8 && !by_rows(kind)) s.group = groups[turn % 5];
            if (kind == TRELLIS) s.bits = 2 + turn % 3;
            shapes.push_back(s);
            turn++;
        }
    for (int64_t group : {10, 32, 64, 128}) {
        if (kind < INT8 || by_rows(kind)) break;
        LayerShape s = {kind, 40, 300, group};
        s.scale_type = group % 3, s.zero = kind == INT4 && group != 32 ? 8 : 0, s.offset = s.zero == 0 && kind == INT4;
        shapes.push_back(s);
    }
    return shapes;
}

// Numbers far out. Rows do not touch each other: the middle one stays what it is alone.
void edges(const NamedPath& path, int64_t kind, Random& random, Pool& pool) {
    for (const float input_scale : {0.0f, 0.01f}) {
        if (input_scale != 0.0f && kind != INT8 && kind < NESTED) continue;
        LayerShape shape = {kind, 37, 50};
        if (kind == TRELLIS) shape.bits = 3;
        shape.zero = kind == INT4 ? 8 : 0, shape.bias = true, shape.input_scale = input_scale;
        const TestLayer layer(shape, random, pool);
        const Weights& w = layer.weights;
        for (const float odd : {1e30f, -3e38f, 1e-38f, 1e-42f, 0.0f, -0.0f, INFINITY, -INFINITY, NAN, -NAN}) {
            const std::string what = describe(path, shape, 3) + " with " + std::to_string(odd);
            Floats x = random.reals(3 * w.inputs, -1.0f, 1.0f);
            for (int64_t row : {0, 2})
                for (int64_t k = 0; k < w.inputs; k++)
                    if (k == 49 || k % 7 == 3 || std::fabs(odd) < 1e-30f) x[row * w.inputs + k] = k % 2 ? odd : -odd;
            const TestInputs in(path, w, x, 3);
            const Floats y = product(path, layer, in.inputs);
            for (int64_t row = 0; row < 3; row++) {
                const std::vector<Expected> wanted = layer.expected(x.data() + row * w.inputs);
                for (int64_t n = 0; n < w.outputs; n++) {
                    const float found = y[row * w.outputs + n];
                    // Past float32's range an infinity, and from two of them a NaN. Static scales clip.
                    if (row != 1 && std::isnan(odd)) expect(std::isnan(found), what + ": a NaN stays one");
                    else if (row != 1 && std::isinf(odd) && input_scale == 0.0f) expect(!std::isfinite(found), what + ": an infinity shows");
                    else if (wanted[n].magnitude < 3e38) expect_close(found, wanted[n].value, 1e-5 * wanted[n].magnitude, what);
                }
            }
            expect_same(product(path, layer, in.of(1, 1)), Floats(y.begin() + w.outputs, y.begin() + 2 * w.outputs), what);
            record(path, NAMES[kind], y);
        }
    }
}

// The largest sums that 32 bits must hold: all codes −128 against inputs of one sign, at the most inputs allowed.
void fullest_sums(const NamedPath& path, int64_t kind, Pool& pool) {
    constexpr int64_t INPUTS = 1 << 17;
    Weights w{};
    w.kind = kind == UPPER ? NESTED : kind, w.outputs = 1, w.inputs = w.group = w.group_inputs = INPUTS, w.groups = 1;
    const std::vector<uint8_t> rows(INPUTS, 0x80);
    std::vector<uint8_t> packed(static_cast<size_t>(packed_bytes(w)));
    std::vector<int32_t> sums(BLOCK);
    Floats scale(BLOCK, 1.0f);
    pack(pool, w, rows.data(), packed.data(), sums.data());
    w.kind = kind, w.codes = packed.data(), w.sums = sums.data(), w.scale = scale.data();
    // One row, and as many as go in tiles.
    for (int64_t rows : {1, 17})
        for (float sign : {1.0f, -1.0f}) {
            const Floats x(static_cast<size_t>(INPUTS * rows), sign);
            const TestInputs in(path, w, x, rows);
            Floats y(static_cast<size_t>(rows), NAN);
            path.kernels->linear[kind](w, in.inputs, 0, 1, y.data(), 1, false);
            for (float found : y)
                expect_close(found, (kind == UPPER ? -120.0 : -128.0) * INPUTS * sign, 16.0, path.name + " fullest " + NAMES[kind] + " sums");
            record(path, NAMES[kind], y);
        }
}

void rows_of_float_weights(Random& random, Pool& pool) {
    for (int64_t kind : {F32, BF16}) {
        const TestLayer layer({kind, 45, 33}, random, pool);
        for (int64_t n = 0; n < 45; n++) {
            Floats row(33), axis(33, 0.0f);
            unpack_row(layer.weights, n, row.data());
            for (int64_t k = 0; k < 33; k++) {
                axis[k] = 1.0f;
                expect_close(row[k], layer.expected(axis.data())[n].value, 0.0, "a row of float weights");
                axis[k] = 0.0f;
            }
        }
    }
}

}  // namespace

void test_linear(const NamedPath& path) {
    Random random(11);
    Pool pool(2);
    for (int64_t kind = 0; kind < KINDS; kind++) {
        int64_t turn = 0;
        for (const LayerShape& shape : shapes_of(kind)) compare(path, shape, turn++ % 6, random, pool);
        LayerShape shape = {kind, 33, 72};
        if (kind == INT4) shape.offset = true;
        if (kind >= INT8 && !by_rows(kind)) shape.group = 32;
        if (kind == TRELLIS) shape.bits = 2;
        for (int64_t rows = 0; rows <= 17; rows++) compare(path, shape, rows, random, pool);
        compare(path, shape, 70, random, pool);
        // Tiles: rows with a rest and without, parts of a long group, groups of a tile, of two and of one and a rest, and lines
        // of 64 inputs with nothing left over.
        for (int64_t inputs : {72, 1100, 1152})
            for (int64_t group : {inputs, int64_t{64}, int64_t{128}, int64_t{104}})
                if (kind >= INT8 && ((kind != UPPER && !by_rows(kind)) || group == inputs)) {
                    LayerShape wide = {kind, 70, inputs};
                    if (kind == TRELLIS) wide.bits = inputs == 72 ? 4 : 3;
                    wide.group = group;
                    wide.offset = kind == INT4 && group == 128;
                    for (int64_t rows : {5, 8, 16, 31, 64}) compare(path, wide, rows, random, pool);
                }
        edges(path, kind, random, pool);
    }
    for (int64_t kind : {INT8, NESTED, UPPER}) fullest_sums(path, kind, pool);
    rows_of_float_weights(random, pool);
}

void overrun(const NamedPath& path) {
    Random random(12);
    Pool pool(1);
    TestLayer layer({INT8, 32, 64}, random, pool);
    // One byte short: the last load of codes reads one too many.
    const std::vector<uint8_t> cut(layer.packed.begin(), layer.packed.end() - 1);
    layer.weights.codes = cut.data();
    const TestInputs in(path, layer.weights, random.reals(64, -1.0f, 1.0f), 1);
    product(path, layer, in.inputs);
}

}  // namespace kernels_test
