// How fast memory is read: what the products' own reading is held against.
#include <cstring>

#include "kernels.h"
#include "vec.h"

namespace SPECPRESS_PATH {

// Reads `size` bytes once, a multiple of 256, as fast as vectors do; the sum keeps the reads from being dropped. Lines are
// fetched ahead into the cache of the second level: without that Zen 5 read 71 GB/s where it reads 81.
int64_t read(const uint8_t* data, int64_t size) {
    constexpr int64_t AHEAD = 8192, SUMS = 256 / (4 * LANES);
    I16 sums[SUMS];
    for (I16& sum : sums) sum = seti(0);
    for (const uint8_t* p = data; p < data + size; p += 256) {
        for (int64_t line = 0; line < 256; line += 64) __builtin_prefetch(p + AHEAD + line, 0, 2);
        for (int64_t i = 0; i < SUMS; i++) sums[i] = addi(sums[i], loadi(reinterpret_cast<const int32_t*>(p) + i * LANES));
    }
    int32_t lanes[LANES];
    int64_t total = 0;
    for (const I16& sum : sums) {
        std::memcpy(lanes, &sum, sizeof lanes);
        for (int32_t lane : lanes) total += lane;
    }
    return total;
}

}  // namespace SPECPRESS_PATH
