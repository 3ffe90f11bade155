// Philox 4x64-10 (Salmon et al., SC 2011) as numpy.random.Philox counts it, made into numbers in (0, 1).
#include "noise.h"

#include <cstring>

namespace specpress {

namespace {

// high:low = a * b
inline uint64_t wide_multiply(uint64_t a, uint64_t b, uint64_t* low) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    *low = static_cast<uint64_t>(product);
    return static_cast<uint64_t>(product >> 64);
}

// 52 bits and a half step, as noise.uniforms.
inline double fraction(uint64_t word) {
    word = word >> 12 | 0x3ff0000000000000ull;
    double number;
    std::memcpy(&number, &word, 8);
    return number - (1.0 - 0x1p-53);
}

}  // namespace

void uniforms(uint64_t seed, uint64_t position, uint64_t lane, uint64_t stream, int64_t count, double* out) {
    for (int64_t i = 0; i < count; i += 4) {
        // numpy steps the counter before each block.
        uint64_t c[4] = {static_cast<uint64_t>(i / 4 + 1), 0, lane, stream}, k0 = seed, k1 = position;
        for (int round = 0; round < 10; round++) {
            uint64_t low0, low1;
            const uint64_t high0 = wide_multiply(0xd2e7470ee14c6c93ull, c[0], &low0);
            const uint64_t high1 = wide_multiply(0xca5a826395121157ull, c[2], &low1);
            c[0] = high1 ^ c[1] ^ k0, c[1] = low1, c[2] = high0 ^ c[3] ^ k1, c[3] = low0;
            k0 += 0x9e3779b97f4a7c15ull, k1 += 0xbb67ae8584caa73bull;
        }
        for (int64_t j = 0; j < 4 && i + j < count; j++) out[i + j] = fraction(c[j]);
    }
}

}  // namespace specpress
