// Floats to the nearest halves, and back: how states may be held (cache/states.py).
#include "kernels.h"
#include "vec.h"

namespace SPECPRESS_PATH {

void to_halves(const float* x, int64_t size, uint16_t* out) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store_f16(out + i, load(x + i));
    if (i == size) return;
    float lanes[LANES] = {};
    uint16_t made[LANES];
    std::memcpy(lanes, x + i, static_cast<size_t>(size - i) * 4);
    store_f16(made, load(lanes));
    std::memcpy(out + i, made, static_cast<size_t>(size - i) * 2);
}

void from_halves(const uint16_t* x, int64_t size, float* out) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(out + i, load_f16(x + i));
    if (i == size) return;
    uint16_t lanes[LANES] = {};
    float made[LANES];
    std::memcpy(lanes, x + i, static_cast<size_t>(size - i) * 2);
    store(made, load_f16(lanes));
    std::memcpy(out + i, made, static_cast<size_t>(size - i) * 4);
}

}  // namespace SPECPRESS_PATH
