// What this machine is: the paths that it has instructions for, and how it reads memory.
#pragma once

#include <cstdint>

namespace specpress {

// binding.py has the same numbers.
enum PathNumber { AVX512 = 0, AVXVNNI = 1, AVX2 = 2, PORTABLE = 3, NEON_DOTPROD = 4, NEON_I8MM = 5, AMX_INT8 = 6 };

// Whether the processor has a path's instructions.
bool processor_has(int64_t path);

// Whether this process may use AMX's tiles; asks the system for them.
bool may_use_tiles();

// Whether products gain from fetching codes ahead even where a few rows leave the processor little else to do. Zen 5 reads
// less far ahead by itself, for its speed, than Zen 4, which such fetches slow down; of others nothing is known.
extern const bool READS_LITTLE_AHEAD;

// Whether they gain so at any number of rows: Xeons with AMX read a few rows of codes at 13 to 20 GB/s by themselves where they
// read 18 to 25 with it, and on Zen 3 one row of int4 takes a fifth less time, one of int8 a seventh (docs/kernels.md).
extern const bool READS_HARDLY_AHEAD;

// Whether codes are fetched into the cache of the first level alone, past that of the second, which they would only fill
// with what nothing reads again. On Zen 5 most products then take up to 10 % less time (docs/kernels.md); of other
// processors it is not known.
extern const bool FETCHES_PAST_L2;

}  // namespace specpress
