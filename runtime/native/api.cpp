// What Python calls, by ctypes. Shapes and dtypes were checked there; nothing here owns what it is given.
#include <chrono>
#include <cstring>
#include <memory>

#include "block_draft.h"
#include "decoder.h"
#include "noise.h"
#include "pack.h"
#include "paths.h"
#include "processor.h"
#include "trellis.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

using namespace specpress;

#if defined(_WIN32)
#define SPECPRESS_API extern "C" __declspec(dllexport)
#else
#define SPECPRESS_API extern "C" __attribute__((visibility("default")))
#endif

namespace {

const Path* path_of(int64_t number) {
    switch (number) {
#ifdef SPECPRESS_AMX_INT8
        case AMX_INT8: return &amx_int8::path;
#endif
#ifdef SPECPRESS_AVX512
        case AVX512: return &avx512::path;
#endif
#ifdef SPECPRESS_AVXVNNI
        case AVXVNNI: return &avxvnni::path;
#endif
#ifdef SPECPRESS_AVX2
        case AVX2: return &avx2::path;
#endif
#ifdef SPECPRESS_NEON_DOTPROD
        case NEON_DOTPROD: return &neon_dotprod::path;
#endif
#ifdef SPECPRESS_NEON_I8MM
        case NEON_I8MM: return &neon_i8mm::path;
#endif
        case PORTABLE: return &portable::path;
        default: return nullptr;
    }
}

}  // namespace

// Bit 0: compiled in; bit 1: this machine has the instructions; bit 2: the operating system lets this process use them.
SPECPRESS_API int64_t specpress_path(int64_t number) {
    const bool has = processor_has(number);
    bool may = true;
#if defined(__x86_64__) && defined(__GNUC__)
    if (has && number == AMX_INT8) may = may_use_tiles();
#endif
    return (path_of(number) ? 1 : 0) | (has ? 2 : 0) | (may ? 4 : 0);
}

// Sizes of the structs that Python mirrors, the number of kinds, and a number that is to change with what the functions
// take, so that a stale library is noticed and not run.
SPECPRESS_API void specpress_sizes(int64_t* sizes) {
    sizes[0] = sizeof(Weights), sizes[1] = sizeof(Layer), sizes[2] = sizeof(Model), sizes[3] = sizeof(Mixture);
    sizes[4] = sizeof(Latent), sizes[5] = sizeof(Batch), sizes[6] = sizeof(Store), sizes[7] = sizeof(Heads), sizes[8] = sizeof(Angles);
    sizes[9] = sizeof(Convolution), sizes[10] = sizeof(Delta), sizes[11] = sizeof(Mamba), sizes[12] = sizeof(MlpBeside);
    sizes[13] = sizeof(LayerInputs), sizes[14] = sizeof(LayerGate), sizes[15] = sizeof(Taken), sizes[16] = sizeof(ChainNoise);
    sizes[17] = sizeof(BlockNetwork), sizes[18] = sizeof(BlockLayer), sizes[19] = sizeof(BlockText), sizes[20] = KINDS, sizes[21] = 2;
}

SPECPRESS_API Pool* specpress_pool_new(int64_t threads) { return new Pool(static_cast<int>(threads)); }
SPECPRESS_API void specpress_pool_free(Pool* pool) { delete pool; }

SPECPRESS_API int64_t specpress_packed_bytes(const Weights* w) { return packed_bytes(*w); }
SPECPRESS_API int64_t specpress_pack(Pool* pool, const Weights* w, const void* rows, int64_t stored, uint8_t* codes, int32_t* sums) {
    return pack(*pool, *w, rows, codes, sums, static_cast<Rows>(stored));
}
SPECPRESS_API void specpress_unpack_nibbles(Pool* pool, const uint8_t* packed, int64_t bytes, int64_t high_first, int64_t minus, int8_t* codes) {
    unpack_nibbles(*pool, packed, bytes, high_first != 0, static_cast<int8_t>(minus), codes);
}

SPECPRESS_API void specpress_encode_tiles(int64_t path, Pool* pool, const TrellisTask* task) {
    const int64_t tiles = (task->outputs + TRELLIS_TILE - 1) / TRELLIS_TILE;
    pool->run(tiles, 1, [&](int, int64_t begin, int64_t end) { path_of(path)->encode(*task, begin, end); });
}

// Null where the model's sizes do not belong together.
SPECPRESS_API Decoder* specpress_decoder_new(const Model* model, int64_t path, Pool* pool) {
    return sound(*model) ? new Decoder(*model, *path_of(path), *pool) : nullptr;
}
SPECPRESS_API void specpress_decoder_free(Decoder* decoder) { delete decoder; }
SPECPRESS_API void specpress_forward(Decoder* decoder, const Batch* batch, const Angles* angles, const int64_t* at, int64_t count,
                                     float* hidden, float* logits, const Taken* taken, int64_t* best) {
    decoder->forward(*batch, *angles, at, count, hidden, logits, taken, best);
}
// 1, or 0 where logits are not finite.
SPECPRESS_API int64_t specpress_draft(Decoder* decoder, const Batch* first, const Angles* angles, int64_t requests,
                                      const int64_t* steps, int64_t limit, int64_t* tokens, int64_t stride,
                                      const ChainNoise* noise) {
    return decoder->draft(*first, *angles, requests, steps, limit, tokens, stride, noise);
}
SPECPRESS_API BlockDraft* specpress_block_new(const BlockNetwork* network, const Model* workspace, int64_t path, Pool* pool) {
    return new BlockDraft(*network, *workspace, *path_of(path), *pool);
}
SPECPRESS_API void specpress_block_free(BlockDraft* drafter) { delete drafter; }
// 1, or 0 where logits are not finite.
SPECPRESS_API int64_t specpress_block_draft(BlockDraft* drafter, const float* cos, const float* sin, BlockText* texts, int64_t requests,
                                            int64_t length, const BlockGrowth* growth, const BlockPlaces* places, const BlockTrees* trees) {
    return drafter->draft(cos, sin, texts, requests, length, *growth, *places, *trees);
}
SPECPRESS_API int64_t specpress_experts_read(const Decoder* decoder) { return decoder->experts_read(); }
SPECPRESS_API void specpress_project(Decoder* decoder, const Projection* p, const float* x, int64_t rows, float* y) {
    decoder->project(*p, x, rows, y);
}

SPECPRESS_API void specpress_uniforms(uint64_t seed, uint64_t position, uint64_t lane, uint64_t stream, int64_t count, double* out) {
    uniforms(seed, position, lane, stream, count, out);
}

// Single operations, for whoever composes them in another order, and for the tests.
SPECPRESS_API void specpress_norm(int64_t path, const float* x, const float* weight, int64_t rows, int64_t size, float eps, float offset, float* out) {
    std::vector<float> scratch(static_cast<size_t>(2 * size + 1));
    for (int64_t i = 0; i < rows; i++) path_of(path)->norm(x + i * size, weight, size, eps, offset, out + i * size, scratch.data());
}
SPECPRESS_API void specpress_gated(int64_t path, const float* gate, const float* up, int64_t count, int64_t activation,
                                   const float* parameters, float* out) {
    path_of(path)->gated(gate, up, count, activation, parameters, out);
}
SPECPRESS_API void specpress_layer_norm(int64_t path, const float* x, const float* weight, const float* bias, int64_t rows, int64_t size,
                                        float eps, float* out) {
    std::vector<float> scratch(static_cast<size_t>(2 * size + 1));
    for (int64_t i = 0; i < rows; i++)
        path_of(path)->layer_norm(x + i * size, weight, bias, size, eps, out + i * size, scratch.data());
}
SPECPRESS_API int64_t specpress_largest(int64_t path, const float* x, int64_t size, int64_t limit) { return path_of(path)->largest(x, size, limit); }
SPECPRESS_API void specpress_rotate(int64_t path, float* x, int64_t rows, int64_t heads, int64_t dim, int64_t half, const float* cos, const float* sin) {
    for (int64_t i = 0; i < rows; i++) path_of(path)->rotate(x + i * heads * dim, heads, dim, half, cos + i * half, sin + i * half);
}
SPECPRESS_API void specpress_remember(int64_t path, const Heads* heads, int64_t layer, const Store* store, int64_t rows, const int64_t* slots,
                                      const float* keys, const float* values) {
    const int64_t size = heads->kv_heads * heads->dim, wide = heads->kv_heads * values_of(*heads);
    for (int64_t i = 0; i < rows; i++) path_of(path)->remember(*heads, layer, *store, slots[i], keys + i * size, values + i * wide, 0, heads->kv_heads);
}
SPECPRESS_API void specpress_move(const Heads* heads, int64_t layers, const Store* store, int64_t count, const int64_t* from, const int64_t* to) {
    move_slots(*heads, layers, *store, count, from, to);
}
SPECPRESS_API void specpress_attend(int64_t path, Pool* pool, const Heads* heads, int64_t layer, int64_t window, float scaling, float softcap,
                                    const float* sinks, const Batch* batch, const float* queries, float* out) {
    const Path& p = *path_of(path);
    const int64_t size = p.attention_scratch(*heads);
    std::vector<float> scratch(static_cast<size_t>(size * pool->threads()));
    std::vector<AttentionUnit> units;
    units_of(*heads, p, *batch, units);
    const AttentionCall call = {*heads, layer, window, scaling, batch, queries, heads->heads * heads->dim, out, softcap, sinks};
    SharedText text;
    attend_all(p, *pool, call, units, text, [&](int thread) { return scratch.data() + thread * size; });
}

// Bytes per second at which the pool's threads read `size` bytes, once over. The sum keeps the reads from being dropped.
SPECPRESS_API double specpress_read(int64_t path, Pool* pool, const uint8_t* data, int64_t size, int64_t* sum) {
    std::atomic<int64_t> total{0};
    const auto since = std::chrono::steady_clock::now();
    pool->run(size / 4096, size / 4096 / (pool->threads() * 16) + 1,
              [&](int, int64_t begin, int64_t end) { total += path_of(path)->read(data + begin * 4096, (end - begin) * 4096); });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
    *sum = total;
    return static_cast<double>(size / 4096 * 4096) / seconds;
}
