// From rows of codes to the blocks that the kernels read (kernels.h says how 64 bytes are made up).
#include "pack.h"

#include <atomic>
#include <cstring>

namespace specpress {

namespace {

int64_t step_of(int64_t kind) {
    switch (kind) {
        case F32: return 1;
        case BF16: return 2;
        case INT8: return 4;
        case TERNARY: return 16;
        default: return 8;
    }
}

int64_t blocks_of(const Weights& w) { return (w.outputs + BLOCK - 1) / BLOCK; }

uint32_t word(const uint8_t* p) {
    uint32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

// `step` codes of one output, a byte each, as the four bytes that stand for them.
uint32_t squeeze(const Weights& w, const uint8_t* c) {
    switch (w.kind) {
        case INT8: return word(c);
        case NF4: return (word(c) & 0x0f0f0f0fu) | (word(c + 4) & 0x0f0f0f0fu) << 4;
        case INT4: {
            // A signed nibble with its top bit turned is the code plus 8.
            const uint32_t turn = w.zero == 8 ? 0x08080808u : 0;
            return ((word(c) ^ turn) & 0x0f0f0f0fu) | ((word(c + 4) ^ turn) & 0x0f0f0f0fu) << 4;
        }
        default: {
            uint32_t out = 0;
            for (int i = 0; i < 4; i++) out |= (((word(c + 4 * i) & 0x03030303u) + 0x01010101u) & 0x03030303u) << (2 * i);
            return out;
        }
    }
}

// The code that stands for a weight of zero, where the layout has room for inputs that do not exist.
uint8_t nothing(const Weights& w) { return w.kind == NF4 ? 7 : 0; }

// Whether all codes are the scheme's own.
bool sound(const Weights& w, const uint8_t* codes, int64_t size) {
    uint8_t wrong = 0;
    if (w.kind == INT4 || w.kind == NF4) {
        const uint8_t turn = w.kind == INT4 ? static_cast<uint8_t>(w.zero) : 0;
        for (int64_t k = 0; k < size; k++) wrong |= static_cast<uint8_t>(codes[k] + turn) & 0xf0;
    } else if (w.kind == TERNARY) {
        for (int64_t k = 0; k < size; k++) wrong |= static_cast<uint8_t>(codes[k] + 1) > 2;
    }
    return wrong == 0;
}

// False: a code is not one of the scheme's.
bool pack_block(const Weights& w, const uint8_t* rows, int64_t block, uint8_t* codes, int32_t* sums) {
    const int64_t step = step_of(w.kind), steps = w.group / step;
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
            for (int64_t s = 0; s < steps; s++) {
                uint8_t own[16];
                const uint8_t* c = own;
                if (row && (s + 1) * step <= size) {
                    c = row + s * step;
                } else {
                    for (int64_t j = 0; j < step; j++) {
                        const int64_t k = s * step + j;
                        own[j] = row && k < size ? row[k] : nothing(w);
                    }
                }
                const uint32_t squeezed = squeeze(w, c);
                std::memcpy(out + s * 128 + o * 4, &squeezed, 4);
            }
        }
    }
    return all_sound;
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

}  // namespace

int64_t packed_bytes(const Weights& w) { return blocks_of(w) * w.groups * (w.group / step_of(w.kind)) * 128; }

bool pack(Pool& pool, const Weights& w, const void* rows, uint8_t* codes, int32_t* sums) {
    const auto* bytes = static_cast<const uint8_t*>(rows);
    std::atomic<bool> all_sound{true};
    pool.run(blocks_of(w), 1, [&](int, int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; block++) {
            if (w.kind == F32 || w.kind == BF16)
                pack_float_block(w, bytes, block, codes);
            else if (!pack_block(w, bytes, block, codes, w.kind == INT8 ? sums : nullptr))
                all_sound = false;
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
