// The trellis format (docs/trellis.md): a tile of 16 outputs by 16 inputs is one circular sequence of bits, of which eight
// from bit `bits` · t on are the state of weight t, and a table says the state's level.
#pragma once

#include <cstdint>

namespace specpress {

constexpr int64_t TRELLIS_TILE = 16;    // outputs and inputs of a tile
constexpr int64_t TRELLIS_STATES = 256;  // states of eight bits; the upper one is the level's sign

// Weights of one column of tiles, and what GPTQ knows of them; inputs and outputs beyond the layer's cost nothing.
struct TrellisTask {
    int64_t bits;             // 2, 3 or 4 a weight
    int64_t outputs, inputs;  // `inputs` of the column: 16 at most
    int64_t again;            // whether `tiles` and `found` hold sequences already: replaced where one costs less
    int64_t stride;           // bytes from a tile to that of the next 16 outputs
    const int8_t* levels;     // [128]
    const float* weights;     // [inputs][outputs]
    const float* carried;     // [inputs][outputs]: what earlier columns have left, added to the weights
    const float* scale;       // [outputs]
    const float* corner;      // [16][16] row-major: what input i's error adds to input j's target, i < j
    const float* spreads;     // [16]: what each input's squared error counts
    uint8_t* tiles;
    int8_t* found;            // [inputs][outputs]: the levels
};

}  // namespace specpress
