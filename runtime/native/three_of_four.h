// ternary-1.25 (docs/ternary.md): of every four inputs one weight is 0 and three are ±1, a pattern of five bits. Bits 3 and
// 4 are the place of the 0; bits 0 to 2 are set where the first three are negative, and the fourth is the product of their
// signs.
//
// In blocks: 32 patterns of an output, 128 inputs, are five words of 32 bits. Word d holds patterns 6 d to 6 d + 5, the
// first in the lowest bits, and in its upper two bits a part of the last two patterns: words 0 and 1 bits 0 to 3 of pattern
// 30, words 3 and 4 those of pattern 31, and word 2 bit 4 of the one and of the other. 64 bytes are the same word of 16
// outputs.
#pragma once

#include <cstdint>

namespace specpress {

constexpr int64_t FOURS_INPUTS = 128;  // of a step
constexpr int64_t FOURS_WORDS = 5;     // that hold them, for one output

constexpr int weight_of_pattern(int pattern, int place) {
    if (pattern >> 3 == place) return 0;
    const int three = pattern & 7;
    const int negative = place < 3 ? three >> place & 1 : (three ^ three >> 1 ^ three >> 2) & 1;
    return negative ? -1 : 1;
}

}  // namespace specpress
