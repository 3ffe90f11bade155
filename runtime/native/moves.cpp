// Keys and values from slots to slots of a cache's memory: what an accepted path of a tree leaves there.
#include <cstring>
#include <vector>

#include "kernels.h"

namespace specpress {

namespace {

// Keys lie dimension by dimension, values adjacent, scales (of codes) beside them: kernels.h, Store.
template <class T>
void move(const Heads& h, int64_t layers, const Store& s, int64_t count, const int64_t* from, const int64_t* to) {
    const int64_t wide = (values_of(h) + 15) / 16 * 16, size = h.dim + wide;
    std::vector<T> held(static_cast<size_t>(count * size));
    std::vector<float> scales(static_cast<size_t>(2 * count));
    T *keys = static_cast<T*>(s.keys), *values = static_cast<T*>(s.values);
    for (int64_t of = 0; of < layers * h.kv_heads; of++) {
        const int64_t layer = of / h.kv_heads, head = of % h.kv_heads;
        // f(block of this head, place in it, number)
        auto each = [&](const int64_t* slots, auto&& f) {
            for (int64_t i = 0; i < count; i++) f((layer * s.blocks + slots[i] / KEYS) * h.kv_heads + head, slots[i] % KEYS, i);
        };
        each(from, [&](int64_t block, int64_t at, int64_t i) {
            T* own = held.data() + i * size;
            for (int64_t d = 0; d < h.dim; d++) own[d] = keys[(block * h.dim + d) * KEYS + at];
            std::memcpy(own + h.dim, values + (block * KEYS + at) * wide, static_cast<size_t>(wide) * sizeof(T));
            if (sizeof(T) == 1) scales[2 * i] = s.key_scale[block * KEYS + at], scales[2 * i + 1] = s.value_scale[block * KEYS + at];
        });
        each(to, [&](int64_t block, int64_t at, int64_t i) {
            const T* own = held.data() + i * size;
            for (int64_t d = 0; d < h.dim; d++) keys[(block * h.dim + d) * KEYS + at] = own[d];
            std::memcpy(values + (block * KEYS + at) * wide, own + h.dim, static_cast<size_t>(wide) * sizeof(T));
            if (sizeof(T) == 1) s.key_scale[block * KEYS + at] = scales[2 * i], s.value_scale[block * KEYS + at] = scales[2 * i + 1];
        });
    }
}

}  // namespace

void move_slots(const Heads& h, int64_t layers, const Store& s, int64_t count, const int64_t* from, const int64_t* to) {
    return h.cache_kind == CACHE_F32 ? move<float>(h, layers, s, count, from, to) : move<int8_t>(h, layers, s, count, from, to);
}

}  // namespace specpress
