// Sixteen lanes at a time, whatever the machine: one zmm register, two ymm registers, four of ARM's, or plain loops.
//
// Every operation means the same on every path. Float operations are the IEEE ones, never contracted; `fma` is fused
// everywhere (fused.h where the machine has no such instruction). Kernels are written once over these and compiled once per path (see setup.py).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include "neon.h"
#else
#include "fused.h"
#endif

namespace SPECPRESS_PATH {

constexpr int LANES = 16;
constexpr int64_t THREE_BITS = 6;  // bytes of sixteen codes of three bits

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
// ---------------------------------------------------------------------------------------------- AVX-512 with VNNI
constexpr int MAX_ROWS = 8;  // rows of one small product: 8 rows x 2 vectors of accumulators, of 32 registers
constexpr bool NARROW = false;
constexpr bool SHORT_SUMS = false;
constexpr bool UNSIGNED_DOT = true;  // the dot instruction takes one unsigned operand

struct F16 { __m512 v; };
struct I16 { __m512i v; };
struct B64 { __m512i v; };

inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 set(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 floor(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
inline F16 round_even(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a where x < limit, else b.
inline F16 where_less(F16 x, F16 limit, F16 a, F16 b) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), b.v, a.v)};
}
inline I16 seti(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I16 loadi(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline I16 addi(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I16 maxi(I16 a, I16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline I16 bits(F16 a) { return {_mm512_castps_si512(a.v)}; }
inline F16 as_float(I16 a) { return {_mm512_castsi512_ps(a.v)}; }
inline I16 andi(I16 a, int32_t m) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(m))}; }
template <int S> inline I16 shift_left(I16 a) { return {_mm512_slli_epi32(a.v, S)}; }
inline F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I16 to_int(F16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline void store_bytes(int8_t* p, I16 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v)); }
inline F16 load_bytes(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Sixteen nibbles, at bit `shift` (0 or 4) of their bytes: entries of a table of sixteen, which reads the lower four bits.
inline F16 look_up_nibbles(const uint8_t* p, int shift, F16 entries) {
    __m512i raw = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    if (shift) raw = _mm512_srli_epi32(raw, 4);
    return {_mm512_permutexvar_ps(raw, entries.v)};
}
inline F16 nibble_codes() { return {_mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7)}; }
// The same, minus 8.
inline F16 load_nibbles(const uint8_t* p, int shift) { return look_up_nibbles(p, shift, nibble_codes()); }
// Minus 8 and times a scale: the multiplications are those of the table alone.
inline F16 nibble_table(float scale) { return mul(nibble_codes(), set(scale)); }
inline F16 scaled_nibbles(const uint8_t* p, int shift, F16 products) { return look_up_nibbles(p, shift, products); }
// Sixteen codes of three bits in six bytes: their lower two bits, lane by lane, then their upper ones.
inline F16 look_up_three_bits(const uint8_t* p, F16 entries) {
    uint32_t low;
    uint16_t high;
    std::memcpy(&low, p, 4), std::memcpy(&high, p + 4, 2);
    const __m512i twice = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i two = _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(static_cast<int>(low)), twice), _mm512_set1_epi32(3));
    const __m512i raw = _mm512_mask_or_epi32(two, high, two, _mm512_set1_epi32(4));
    return {_mm512_permutexvar_ps(raw, entries.v)};
}
inline F16 three_bit_codes() { return {_mm512_setr_ps(-4, -3, -2, -1, 0, 1, 2, 3, -4, -3, -2, -1, 0, 1, 2, 3)}; }
inline F16 load_three_bits(const uint8_t* p) { return look_up_three_bits(p, three_bit_codes()); }
inline F16 three_bit_table(float scale) { return mul(three_bit_codes(), set(scale)); }
inline F16 scaled_three_bits(const uint8_t* p, F16 products) { return look_up_three_bits(p, products); }
inline F16 load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
inline F16 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline void store_f16(uint16_t* p, F16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// 16 pairs of bfloat16: the even ones, the odd ones.
inline F16 even_bf16(B64 a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
inline F16 odd_bf16(B64 a) { return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}; }

inline B64 load64(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store64(uint8_t* p, B64 a) { _mm512_storeu_si512(p, a.v); }
template <int S> inline B64 field(B64 a, int mask) {
    __m512i v = S == 0 ? a.v : _mm512_srli_epi16(a.v, S);
    return {_mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(mask)))};
}
// Bytes of two nibbles: nibble I of each byte of `high` above nibble I of `low`'s.
template <int I> inline B64 join(B64 high, B64 low) {
    // Bit by bit `mask ? high : low`, which also drops what a 16-bit shift moves across bytes.
    const __m512i mask = _mm512_set1_epi8(static_cast<char>(0xf0));
    if (I == 0) return {_mm512_ternarylogic_epi32(mask, _mm512_slli_epi16(high.v, 4), low.v, 0xca)};
    return {_mm512_ternarylogic_epi32(mask, high.v, _mm512_srli_epi16(low.v, 4), 0xca)};
}
inline B64 table(const uint8_t* sixteen) {
    return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sixteen)))};
}
inline B64 look_up(B64 t, B64 index) { return {_mm512_shuffle_epi8(t.v, index.v)}; }
// Four activations, the same for all lanes.
struct X4 { __m512i v; };
inline X4 four(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return {_mm512_set1_epi32(x)};
}
// acc + Σ4 w·x: weights unsigned (any byte), activations signed.
inline I16 dot_weights_unsigned(I16 acc, B64 w, X4 x) {
#if defined(__GNUC__)
    // The intrinsic makes gcc copy sums from register to register: a tenth of the time at four rows.
    asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
    return acc;
#else
    return {_mm512_dpbusd_epi32(acc.v, w.v, x.v)};
#endif
}
// acc + Σ4 w·x: activations unsigned, weights signed.
inline I16 dot_activations_unsigned(I16 acc, B64 w, X4 x) { return {_mm512_dpbusd_epi32(acc.v, x.v, w.v)}; }

#elif defined(__AVX2__)
// ------------------------------------------------------------------------------------------ AVX2, with VNNI or not
#if defined(__AVXVNNI__)
constexpr int MAX_ROWS = 2;
constexpr bool NARROW = false;
constexpr bool SHORT_SUMS = false;
constexpr bool UNSIGNED_DOT = true;
#else
constexpr int MAX_ROWS = 4;     // 4 rows x 1 vector of accumulators, which is two registers of 16
constexpr bool NARROW = true;   // so products take one vector of outputs at a time
constexpr bool SHORT_SUMS = true;  // sums of 16 bits, two products each: add_pairs, widen_pairs
constexpr bool UNSIGNED_DOT = false;
#define SPECPRESS_WORDS  // codes of 8 bits are multiplied as words: words.h
#endif

struct F16 { __m256 a, b; };
struct I16 { __m256i a, b; };
struct B64 { __m256i a, b; };

inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline F16 add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 div(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F16 floor(F16 x) { return {_mm256_floor_ps(x.a), _mm256_floor_ps(x.b)}; }
inline F16 round_even(F16 x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline F16 where_less(F16 x, F16 limit, F16 p, F16 q) {
    return {_mm256_blendv_ps(q.a, p.a, _mm256_cmp_ps(x.a, limit.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(q.b, p.b, _mm256_cmp_ps(x.b, limit.b, _CMP_LT_OQ))};
}
inline I16 seti(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I16 loadi(const int32_t* p) {
    const auto* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline I16 addi(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I16 maxi(I16 x, I16 y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline I16 bits(F16 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F16 as_float(I16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline I16 andi(I16 x, int32_t m) {
    __m256i mask = _mm256_set1_epi32(m);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
template <int S> inline I16 shift_left(I16 x) { return {_mm256_slli_epi32(x.a, S), _mm256_slli_epi32(x.b, S)}; }
inline F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I16 to_int(F16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline void store_bytes(int8_t* p, I16 x) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline F16 load_bytes(const int8_t* p) {
    __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
}
inline F16 load_nibbles(const uint8_t* p, int shift) {
    const __m128i raw = _mm_srli_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), shift);
    const __m128i codes = _mm_sub_epi8(_mm_and_si128(raw, _mm_set1_epi8(15)), _mm_set1_epi8(8));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
}
inline F16 load_bf16(const uint16_t* p) {
    const auto* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)), 16))};
}
inline F16 load_f16(const uint16_t* p) {
    const auto* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline void store_f16(uint16_t* p, F16 x) {
    auto* q = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline F16 even_bf16(B64 x) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
inline F16 odd_bf16(B64 x) {
    __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(x.a, mask)), _mm256_castsi256_ps(_mm256_and_si256(x.b, mask))};
}
inline B64 load64(const uint8_t* p) {
    const auto* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
// std::memcpy of both registers goes through others, in pieces.
inline void store64(uint8_t* p, B64 x) {
    auto* q = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(q, x.a), _mm256_storeu_si256(q + 1, x.b);
}
template <int S> inline B64 field(B64 x, int mask) {
    __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
    if (S == 0) return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, S), m), _mm256_and_si256(_mm256_srli_epi16(x.b, S), m)};
}
template <int I> inline B64 join(B64 high, B64 low) {
    auto part = [](__m256i h, __m256i l) {
        const __m256i mask = _mm256_set1_epi8(static_cast<char>(0xf0));
        h = I == 0 ? _mm256_slli_epi16(h, 4) : h, l = I == 0 ? l : _mm256_srli_epi16(l, 4);
        return _mm256_or_si256(_mm256_and_si256(mask, h), _mm256_andnot_si256(mask, l));
    };
    return {part(high.a, low.a), part(high.b, low.b)};
}
// Unsigned bytes minus 128, as signed ones.
inline B64 minus_128(B64 x) {
    __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
    return {_mm256_xor_si256(x.a, top), _mm256_xor_si256(x.b, top)};
}
inline B64 table(const uint8_t* sixteen) {
    __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sixteen)));
    return {t, t};
}
inline B64 look_up(B64 t, B64 index) { return {_mm256_shuffle_epi8(t.a, index.a), _mm256_shuffle_epi8(t.b, index.b)}; }
struct X4 { __m256i v; };
inline X4 four(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return {_mm256_set1_epi32(x)};
}
#if defined(__AVXVNNI__)
inline I16 dot_weights_unsigned(I16 acc, B64 w, X4 x) {
    return {_mm256_dpbusd_avx_epi32(acc.a, w.a, x.v), _mm256_dpbusd_avx_epi32(acc.b, w.b, x.v)};
}
inline I16 dot_activations_unsigned(I16 acc, B64 w, X4 x) {
    return {_mm256_dpbusd_avx_epi32(acc.a, x.v, w.a), _mm256_dpbusd_avx_epi32(acc.b, x.v, w.b)};
}
#else
// vpmaddubsw saturates its 16-bit sums: right for weights up to 127 (15 and 2 here; 127·127·2 < 2^15).
inline __m256i quads(__m256i acc, __m256i u, __m256i s) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
inline I16 dot_weights_unsigned(I16 acc, B64 w, X4 x) { return {quads(acc.a, w.a, x.v), quads(acc.b, w.b, x.v)}; }
// Sums of two products each in 16 bits, and the sum of such sums: who adds up knows that they fit.
inline __m256i pairs(__m256i sums, __m256i u, __m256i s) {
#if defined(__GNUC__)
    // In one piece: gcc multiplies ahead of the sums otherwise, and then runs out of registers.
    __m256i t;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(t) : "x"(u), "x"(s));
    return sums;
#else
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(u, s));
#endif
}
inline I16 add_pairs(I16 sums, B64 w, X4 x) { return {pairs(sums.a, w.a, x.v), pairs(sums.b, w.b, x.v)}; }
inline I16 widen_pairs(I16 acc, I16 sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(sums.a, ones)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(sums.b, ones))};
}
#endif
// acc + Σ4 w·x, both signed: |w| is unsigned (128 at most) and x, within ±127, takes its sign.
inline __m256i signed_quads(__m256i acc, __m256i w, __m256i x) {
    const __m256i magnitude = _mm256_abs_epi8(w), ones = _mm256_set1_epi16(1);
#if defined(__GNUC__)
    __m256i t;
    asm("vpsignb %3, %4, %1\n\tvpmaddubsw %1, %2, %1\n\tvpmaddwd %5, %1, %1\n\tvpaddd %1, %0, %0"
        : "+x"(acc), "=&x"(t)
        : "x"(magnitude), "x"(w), "x"(x), "x"(ones));
    return acc;
#else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w)), ones));
#endif
}
inline I16 dot_signed(I16 acc, B64 w, X4 x) { return {signed_quads(acc.a, w.a, x.v), signed_quads(acc.b, w.b, x.v)}; }

#elif !defined(__ARM_FEATURE_DOTPROD)
// ------------------------------------------------------------------------------------------------------- portable
constexpr int MAX_ROWS = 2;
constexpr bool NARROW = false;
constexpr bool SHORT_SUMS = false;
constexpr bool UNSIGNED_DOT = false;

struct F16 { float v[16]; };
struct I16 { int32_t v[16]; };
struct B64 { uint8_t v[64]; };

#define SPECPRESS_LANES(TYPE, EXPRESSION) \
    TYPE out; \
    for (int i = 0; i < 16; i++) out.v[i] = (EXPRESSION); \
    return out

inline F16 set(float x) { SPECPRESS_LANES(F16, x); }
inline F16 zero() { return set(0.0f); }
inline F16 load(const float* p) { SPECPRESS_LANES(F16, p[i]); }
inline void store(float* p, F16 a) { std::memcpy(p, a.v, 64); }
inline F16 add(F16 a, F16 b) { SPECPRESS_LANES(F16, a.v[i] + b.v[i]); }
inline F16 sub(F16 a, F16 b) { SPECPRESS_LANES(F16, a.v[i] - b.v[i]); }
inline F16 mul(F16 a, F16 b) { SPECPRESS_LANES(F16, a.v[i] * b.v[i]); }
inline F16 div(F16 a, F16 b) { SPECPRESS_LANES(F16, a.v[i] / b.v[i]); }
inline F16 fma(F16 a, F16 b, F16 c) {
    F16 out;
    fused(a.v, b.v, c.v, out.v);
    return out;
}
inline F16 max(F16 a, F16 b) { SPECPRESS_LANES(F16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F16 min(F16 a, F16 b) { SPECPRESS_LANES(F16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F16 floor(F16 a) { SPECPRESS_LANES(F16, std::floor(a.v[i])); }
inline F16 round_even(F16 a) { SPECPRESS_LANES(F16, std::nearbyint(a.v[i])); }
inline F16 where_less(F16 x, F16 limit, F16 a, F16 b) { SPECPRESS_LANES(F16, x.v[i] < limit.v[i] ? a.v[i] : b.v[i]); }
inline I16 seti(int32_t x) { SPECPRESS_LANES(I16, x); }
inline I16 loadi(const int32_t* p) { SPECPRESS_LANES(I16, p[i]); }
inline int32_t wrap(uint32_t x) { return static_cast<int32_t>(x); }
inline I16 addi(I16 a, I16 b) { SPECPRESS_LANES(I16, wrap(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i]))); }
inline I16 maxi(I16 a, I16 b) { SPECPRESS_LANES(I16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline I16 bits(F16 a) {
    I16 out;
    std::memcpy(out.v, a.v, 64);
    return out;
}
inline F16 as_float(I16 a) {
    F16 out;
    std::memcpy(out.v, a.v, 64);
    return out;
}
inline I16 andi(I16 a, int32_t m) { SPECPRESS_LANES(I16, a.v[i] & m); }
template <int S> inline I16 shift_left(I16 a) { SPECPRESS_LANES(I16, wrap(static_cast<uint32_t>(a.v[i]) << S)); }
inline F16 to_float(I16 a) { SPECPRESS_LANES(F16, static_cast<float>(a.v[i])); }
// Out of range and NaN give the lowest integer, as the vector instructions do.
inline int32_t nearest(float x) { return x >= -2147483648.0f && x < 2147483648.0f ? static_cast<int32_t>(std::nearbyint(x)) : INT32_MIN; }
inline I16 to_int(F16 a) { SPECPRESS_LANES(I16, nearest(a.v[i])); }
inline void store_bytes(int8_t* p, I16 a) {
    for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(a.v[i]);
}
inline F16 load_bytes(const int8_t* p) { SPECPRESS_LANES(F16, static_cast<float>(p[i])); }
inline F16 load_nibbles(const uint8_t* p, int shift) { SPECPRESS_LANES(F16, static_cast<float>((p[i] >> shift & 15) - 8)); }
inline float wide_bf16(uint32_t x) {
    x <<= 16;
    float out;
    std::memcpy(&out, &x, 4);
    return out;
}
inline float wide_f16(uint16_t h) {
    uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                      : exponent == 31 ? (fraction ? NAN : INFINITY)
                                       : std::ldexp(static_cast<float>(fraction + 1024), static_cast<int>(exponent) - 25);
    return sign ? -magnitude : magnitude;
}
inline F16 load_bf16(const uint16_t* p) { SPECPRESS_LANES(F16, wide_bf16(p[i])); }
inline F16 load_f16(const uint16_t* p) { SPECPRESS_LANES(F16, wide_f16(p[i])); }
// To the nearest, of two the even one. Below the least normal half a half's step is that of floats from 0.5 on.
inline uint16_t narrow_f16(float x) {
    uint32_t raw;
    std::memcpy(&raw, &x, 4);
    const uint32_t sign = raw >> 16 & 0x8000, size = raw & 0x7fffffff;
    if (size > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (size >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (size >= 0x38800000) return static_cast<uint16_t>(sign | ((size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13));
    const float shifted = std::fabs(x) + 0.5f;
    std::memcpy(&raw, &shifted, 4);
    return static_cast<uint16_t>(sign | (raw - 0x3f000000));
}
inline void store_f16(uint16_t* p, F16 a) {
    for (int i = 0; i < 16; i++) p[i] = narrow_f16(a.v[i]);
}
inline F16 even_bf16(B64 a) { SPECPRESS_LANES(F16, wide_bf16(a.v[4 * i] | a.v[4 * i + 1] << 8)); }
inline F16 odd_bf16(B64 a) { SPECPRESS_LANES(F16, wide_bf16(a.v[4 * i + 2] | a.v[4 * i + 3] << 8)); }
inline B64 load64(const uint8_t* p) {
    B64 out;
    std::memcpy(out.v, p, 64);
    return out;
}
inline void store64(uint8_t* p, B64 x) { std::memcpy(p, x.v, 64); }
template <int S> inline B64 field(B64 a, int mask) {
    B64 out;
    for (int i = 0; i < 64; i++) out.v[i] = static_cast<uint8_t>((a.v[i] >> S) & mask);
    return out;
}
template <int I> inline B64 join(B64 high, B64 low) {
    B64 out;
    for (int i = 0; i < 64; i++) out.v[i] = static_cast<uint8_t>((high.v[i] >> 4 * I & 15) << 4 | (low.v[i] >> 4 * I & 15));
    return out;
}
inline B64 minus_128(B64 x) {
    for (int i = 0; i < 64; i++) x.v[i] ^= 0x80;
    return x;
}
inline B64 table(const uint8_t* sixteen) {
    B64 out;
    for (int i = 0; i < 64; i++) out.v[i] = sixteen[i & 15];
    return out;
}
inline B64 look_up(B64 t, B64 index) {
    B64 out;
    for (int i = 0; i < 64; i++) out.v[i] = t.v[index.v[i]];
    return out;
}
struct X4 { int8_t v[4]; };
inline X4 four(const int8_t* p) {
    X4 out;
    std::memcpy(out.v, p, 4);
    return out;
}
inline I16 dot_weights_unsigned(I16 acc, B64 w, X4 x) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 4; j++) acc.v[i] += w.v[4 * i + j] * x.v[j];
    return acc;
}
inline I16 dot_signed(I16 acc, B64 w, X4 x) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 4; j++) acc.v[i] += static_cast<int8_t>(w.v[4 * i + j]) * x.v[j];
    return acc;
}
#undef SPECPRESS_LANES
#endif

#if !(defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__))
// Nibbles minus 8 and times a scale: how scaled_nibbles wants it, and they.
inline F16 nibble_table(float scale) { return set(scale); }
inline F16 scaled_nibbles(const uint8_t* p, int shift, F16 scale) { return mul(load_nibbles(p, shift), scale); }
// Sixteen codes of three bits in six bytes: their lower two bits, lane by lane, then their upper ones.
inline F16 load_three_bits(const uint8_t* p) {
    uint32_t low;
    uint16_t high;
    std::memcpy(&low, p, 4), std::memcpy(&high, p + 4, 2);
    float codes[LANES];
    for (int i = 0; i < LANES; i++) codes[i] = static_cast<float>(static_cast<int32_t>((low >> (2 * i) & 3) | (high >> i & 1) << 2) - 4);
    return load(codes);
}
inline F16 three_bit_table(float scale) { return set(scale); }
inline F16 scaled_three_bits(const uint8_t* p, F16 scale) { return mul(load_three_bits(p), scale); }
#endif

// Sum and maximum of the lanes, halving: lane i and lane i + 8 first.
inline float lane_sum(F16 a) {
    float v[16];
    store(v, a);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) v[i] = v[i] + v[i + width];
    return v[0];
}
inline float lane_max(F16 a) {
    float v[16];
    store(v, a);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
    return v[0];
}

// e^x as kernels/exact.py defines it, operation by operation.
inline F16 exp(F16 x) {
    F16 lowest = set(-87.3f);
    // Operand order: a NaN in x stays one.
    F16 clipped = min(set(88.3f), max(lowest, x));
    F16 k = floor(add(mul(clipped, set(1.4426950408889634f)), set(0.5f)));
    F16 r = sub(sub(clipped, mul(k, set(0.693359375f))), mul(k, set(-2.12194440e-4f)));
    F16 poly = mul(r, set(1.9875691500e-4f));
    poly = mul(add(poly, set(1.3981999507e-3f)), r);
    poly = mul(add(poly, set(8.3334519073e-3f)), r);
    poly = mul(add(poly, set(4.1665795894e-2f)), r);
    poly = mul(add(poly, set(1.6666665459e-1f)), r);
    poly = add(add(mul(add(poly, set(5.0000001201e-1f)), mul(r, r)), r), set(1.0f));
    F16 power = as_float(shift_left<23>(addi(to_int(k), seti(127))));
    return where_less(x, lowest, zero(), mul(poly, power));
}

// exact.tanh.
inline F16 tanh(F16 x) { return sub(set(1.0f), div(set(2.0f), add(exp(mul(set(2.0f), x)), set(1.0f)))); }

}  // namespace SPECPRESS_PATH
