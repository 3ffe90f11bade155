// From rows of codes to the blocks that the kernels read (kernels.h says how 64 bytes are made up).
#include "pack.h"

#include "three_of_four.h"
#include "trellis.h"

#include <array>
#include <atomic>
#include <cstring>

namespace specpress {

namespace {

int64_t step_of(int64_t kind) {
    switch (kind) {
        case F32: return 1;
        case BF16: return 2;
        case INT8: return 4;
        case TERNARY:
        case TRELLIS: return TRELLIS_TILE;
        case THREE_OF_FOUR: return FOURS_INPUTS;
        default: return 8;
    }
}

// No kind: in the templates below, the lower plane of a nested layer (UPPER is its upper one).
constexpr int LOWER = KINDS;

int64_t blocks_of(const Weights& w) { return (w.outputs + BLOCK - 1) / BLOCK; }

uint32_t word(const uint8_t* p) {
    uint32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

// The codes of one output that a vector has room for, a byte each, as the four bytes that stand for them. `turn` is 8 in
// each byte where codes are signed nibbles: turning the top bit adds 8.
template <int KIND>
uint32_t squeeze(const uint8_t* c, uint32_t turn) {
    if constexpr (KIND == INT8) return word(c);
    if constexpr (KIND == LOWER) return (word(c) & 0x0f0f0f0fu) | (word(c + 4) & 0x0f0f0f0fu) << 4;
    if constexpr (KIND == UPPER) return ((word(c) >> 4 & 0x0f0f0f0fu) | (word(c + 4) & 0xf0f0f0f0u)) ^ 0x88888888u;
    if constexpr (KIND == INT4 || KIND == NF4) return ((word(c) ^ turn) & 0x0f0f0f0fu) | ((word(c + 4) ^ turn) & 0x0f0f0f0fu) << 4;
    uint32_t out = 0;
    if constexpr (KIND == TERNARY)
        for (int i = 0; i < 4; i++) out |= (((word(c + 4 * i) & 0x03030303u) + 0x01010101u) & 0x03030303u) << (2 * i);
    return out;
}

// The code that stands for a weight of zero, where the layout has room for inputs that do not exist.
uint8_t nothing(const Weights& w) { return w.kind == NF4 ? 7 : 0; }

// Whether all codes are the scheme's own.
bool sound(const Weights& w, const uint8_t* codes, int64_t size) {
    uint8_t wrong = 0;
    if (w.kind == INT4 || w.kind == NF4) {
        const uint8_t turn = w.kind == INT4 ? static_cast<uint8_t>(w.zero) : 0;
        for (int64_t k = 0; k < size; k++) wrong |= static_cast<uint8_t>(codes[k] + turn) & 0xf0;
    } else if (w.kind == TERNARY || w.kind == THREE_OF_FOUR) {
        for (int64_t k = 0; k < size; k++) wrong |= static_cast<uint8_t>(codes[k] + 1) > 2;
    }
    return wrong == 0;
}

// False: a code is not one of the scheme's.
template <int KIND>
bool pack_block(const Weights& w, const uint8_t* rows, int64_t block, uint8_t* codes, int32_t* sums) {
    constexpr int64_t step = KIND == INT8 ? 4 : KIND == TERNARY ? 16 : 8;
    const uint32_t turn = KIND == INT4 && w.zero == 8 ? 0x08080808u : 0;
    const int64_t steps = w.group / step;
    bool all_sound = true;
    uint8_t* out = codes + block * w.groups * steps * 128;
    for (int64_t g = 0; g < w.groups; g++, out += steps * 128) {
        const int64_t from = g * w.group_inputs;
        const int64_t size = w.inputs - from < w.group_inputs ? w.inputs - from : w.group_inputs;
        for (int64_t o = 0; o < BLOCK; o++) {
            const int64_t n = block * BLOCK + o;
            const uint8_t* row = n < w.outputs ? rows + n * w.inputs + from : nullptr;
            int32_t sum = 0;
            if (row) all_sound = sound(w, row, size) && all_sound;
            if (sums && row)
                for (int64_t k = 0; k < size; k++) sum += static_cast<int8_t>(row[k]);
            // Modulo 2^32, as the products that it is added to.
            if (sums) sums[(block * w.groups + g) * BLOCK + o] = static_cast<int32_t>(-128u * static_cast<uint32_t>(sum));
            const int64_t whole = row ? size / step : 0;
            uint8_t* to = out + o * 4;
            for (int64_t s = 0; s < whole; s++) {
                const uint32_t squeezed = squeeze<KIND>(row + s * step, turn);
                std::memcpy(to + s * 128, &squeezed, 4);
            }
            for (int64_t s = whole; s < steps; s++) {
                uint8_t own[16];
                for (int64_t j = 0; j < step; j++) {
                    const int64_t k = s * step + j;
                    own[j] = row && k < size ? row[k] : nothing(w);
                }
                const uint32_t squeezed = squeeze<KIND>(own, turn);
                std::memcpy(to + s * 128, &squeezed, 4);
            }
        }
    }
    return all_sound;
}

// Eight adjacent nibbles, two a byte, as the four bytes of a vector's output: nibble j beside nibble 4 + j.
uint32_t fold(uint32_t w, bool high_first) {
    if (high_first) w = (w >> 4 & 0x0f0f0f0fu) | (w & 0x0f0f0f0fu) << 4;
    uint32_t low = w & 0xffffu, high = w >> 16;
    low = (low | low << 8) & 0x00ff00ffu, high = (high | high << 8) & 0x00ff00ffu;
    low = (low | low << 4) & 0x0f0f0f0fu, high = (high | high << 4) & 0x0f0f0f0fu;
    return low | high << 4;
}

void fold_block(const Weights& w, const uint8_t* rows, int64_t block, uint8_t* codes, bool high_first) {
    const int64_t steps = w.inputs / 8, reserved = w.groups * (w.group / 8);
    const uint32_t none = 0x01010101u * static_cast<uint32_t>(nothing(w) | nothing(w) << 4);
    uint8_t* out = codes + block * reserved * 128;
    for (int64_t o = 0; o < BLOCK; o++, out += 4) {
        const int64_t n = block * BLOCK + o, there = n < w.outputs ? steps : 0;
        const uint8_t* row = rows + n * (w.inputs / 2);
        for (int64_t s = 0; s < there; s++) {
            const uint32_t folded = fold(word(row + s * 4), high_first);
            std::memcpy(out + s * 128, &folded, 4);
        }
        for (int64_t s = there; s < reserved; s++) std::memcpy(out + s * 128, &none, 4);
    }
}

void pack_float_block(const Weights& w, const uint8_t* rows, int64_t block, uint8_t* codes) {
    const int64_t bytes = w.kind == F32 ? 4 : 2, step = step_of(w.kind);
    uint8_t* out = codes + block * (w.group / step) * 128;
    for (int64_t s = 0; s < w.group / step; s++, out += 128)
        for (int64_t o = 0; o < BLOCK; o++) {
            const int64_t n = block * BLOCK + o;
            for (int64_t j = 0; j < step; j++) {
                const int64_t k = s * step + j;
                uint8_t* to = out + (o * step + j) * bytes;
                if (n < w.outputs && k < w.inputs)
                    std::memcpy(to, rows + (n * w.inputs + k) * bytes, static_cast<size_t>(bytes));
                else
                    std::memset(to, 0, static_cast<size_t>(bytes));
            }
        }
}

// Two rows of sequences, side by side; zeros where the second is none.
void pair_block(const Weights& w, const uint8_t* rows, int64_t block, uint8_t* codes) {
    const int64_t across = w.group / TRELLIS_TILE, down = (w.outputs + TRELLIS_TILE - 1) / TRELLIS_TILE, size = 32 * w.bits;
    uint8_t* out = codes + block * across * 2 * size;
    for (int64_t column = 0; column < across; column++)
        for (int64_t row = 2 * block; row < 2 * block + 2; row++, out += size) {
            if (row < down)
                std::memcpy(out, rows + (row * across + column) * size, static_cast<size_t>(size));
            else
                std::memset(out, 0, static_cast<size_t>(size));
        }
}

// Four codes as two bits each, the first lowest.
uint32_t squeeze_four(const uint8_t* c) { return (word(c) & 0x03030303u) * 0x01041040u >> 24; }

// The pattern of each four codes so squeezed; 255 of those that have none.
constexpr uint8_t NO_PATTERN = 255;
std::array<uint8_t, 256> all_patterns() {
    std::array<uint8_t, 256> found;
    found.fill(NO_PATTERN);
    for (int pattern = 0; pattern < 32; pattern++) {
        uint8_t four[4];
        for (int place = 0; place < 4; place++) four[place] = static_cast<uint8_t>(weight_of_pattern(pattern, place));
        found[squeeze_four(four)] = static_cast<uint8_t>(pattern);
    }
    return found;
}

// False: a code is not −1, 0 or 1, or of a four not exactly one is 0. Of a four that is cut short any one may be.
bool pack_fours(const Weights& w, const uint8_t* rows, int64_t block, const std::array<uint8_t, 256>& patterns, uint8_t* codes) {
    const int64_t steps = w.group / FOURS_INPUTS, half = 64 * FOURS_WORDS;
    uint8_t wrong = 0;
    bool all_sound = true;
    for (int64_t g = 0; g < w.groups; g++) {
        const int64_t from = g * w.group_inputs;
        const int64_t size = w.inputs - from < w.group_inputs ? w.inputs - from : w.group_inputs;
        for (int64_t o = 0; o < BLOCK; o++) {
            const int64_t n = block * BLOCK + o;
            const uint8_t* row = n < w.outputs ? rows + n * w.inputs + from : nullptr;
            if (row) all_sound = sound(w, row, size) && all_sound;
            uint8_t* to = codes + (block * w.groups + g) * steps * 2 * half + o / 16 * half + o % 16 * 4;
            for (int64_t s = 0; s < steps; s++, to += 2 * half) {
                uint32_t words[FOURS_WORDS] = {}, last[2] = {};
                for (int64_t j = 0; j < FOURS_INPUTS / 4; j++) {
                    const int64_t k = s * FOURS_INPUTS + 4 * j;
                    // Inputs that do not exist are 0 whatever meets them.
                    uint32_t pattern = 0;
                    if (row && k + 4 <= size) {
                        pattern = patterns[squeeze_four(row + k)];
                    } else if (row && k < size) {
                        uint8_t four[4];
                        bool zero = false;
                        for (int64_t i = 0; i < 4; i++) {
                            four[i] = k + i < size ? row[k + i] : zero ? 1 : 0;
                            zero = zero || four[i] == 0;
                        }
                        pattern = patterns[squeeze_four(four)];
                    }
                    wrong |= pattern == NO_PATTERN;
                    if (j < 30)
                        words[j / 6] |= (pattern & 31) << 5 * (j % 6);
                    else
                        last[j - 30] = pattern & 31;
                }
                for (int64_t i = 0; i < 2; i++) {
                    words[3 * i] |= last[i] << 30, words[3 * i + 1] |= last[i] >> 2 << 30;
                    words[2] |= last[i] >> 4 << (30 + i);
                }
                for (int64_t d = 0; d < FOURS_WORDS; d++) std::memcpy(to + 64 * d, words + d, 4);
            }
        }
    }
    return all_sound && !wrong;
}

}  // namespace

int64_t packed_bytes(const Weights& w) {
    if (w.kind == TRELLIS) return blocks_of(w) * (w.group / TRELLIS_TILE) * 64 * w.bits;
    if (w.kind == NESTED) return 2 * plane_bytes(w);
    if (w.kind == THREE_OF_FOUR) return blocks_of(w) * w.groups * (w.group / FOURS_INPUTS) * BLOCK * FOURS_WORDS * 4;
    return blocks_of(w) * w.groups * (w.group / step_of(w.kind)) * 128;
}

bool pack(Pool& pool, const Weights& w, const void* rows, uint8_t* codes, int32_t* sums, Rows stored) {
    const auto* bytes = static_cast<const uint8_t*>(rows);
    std::atomic<bool> all_sound{true};
    const std::array<uint8_t, 256> patterns = all_patterns();
    pool.run(blocks_of(w), 1, [&](int, int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; block++) {
            bool sound = true;
            if (stored != PLAIN)
                fold_block(w, bytes, block, codes, stored == HIGH_FIRST);
            else
                switch (w.kind) {
                case INT8: sound = pack_block<INT8>(w, bytes, block, codes, sums); break;
                case INT4: sound = pack_block<INT4>(w, bytes, block, codes, nullptr); break;
                case NF4: sound = pack_block<NF4>(w, bytes, block, codes, nullptr); break;
                case NESTED:
                    pack_block<UPPER>(w, bytes, block, codes, nullptr);
                    pack_block<LOWER>(w, bytes, block, codes + plane_bytes(w), nullptr);
                    break;
                case TRELLIS: pair_block(w, bytes, block, codes); break;
                case THREE_OF_FOUR: sound = pack_fours(w, bytes, block, patterns, codes); break;
                case TERNARY: sound = pack_block<TERNARY>(w, bytes, block, codes, nullptr); break;
                default: pack_float_block(w, bytes, block, codes);
            }
            if (!sound) all_sound = false;
        }
    });
    return all_sound;
}

void unpack_nibbles(Pool& pool, const uint8_t* packed, int64_t bytes, bool high_first, int8_t minus, int8_t* codes) {
    const int low = high_first ? 4 : 0, high = 4 - low;
    pool.run(bytes, 1 << 16, [&](int, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            codes[2 * i] = static_cast<int8_t>((packed[i] >> low & 15) - minus);
            codes[2 * i + 1] = static_cast<int8_t>((packed[i] >> high & 15) - minus);
        }
    });
}

void unpack_row(const Weights& w, int64_t n, float* out) {
    const int64_t step = step_of(w.kind);
    const uint8_t* p = w.codes + (n / BLOCK) * (w.group / step) * 128 + (n % BLOCK) * 4;
    for (int64_t k = 0; k < w.inputs; k++) {
        uint32_t raw;
        if (w.kind == F32) {
            std::memcpy(&raw, p + k * 128, 4);
        } else {
            std::memcpy(&raw, p + (k / 2) * 128, 4);
            raw = k % 2 ? raw & 0xffff0000u : raw << 16;
        }
        std::memcpy(out + k, &raw, 4);
    }
}

}  // namespace specpress
