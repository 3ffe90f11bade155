// Random numbers keyed by where they are used (runtime/sampling/noise.py).
#pragma once

#include <cstdint>

namespace specpress {

// The first `count` numbers of noise.uniforms, bit for bit.
void uniforms(uint64_t seed, uint64_t position, uint64_t lane, uint64_t stream, int64_t count, double* out);

}  // namespace specpress
