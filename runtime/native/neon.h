// vec.h's operations for ARM: sixteen lanes are four registers. Included by vec.h alone.
//
// A path of its own needs the dot instruction (ARMv8.2's dotprod). With i8mm there is also the product of two small
// matrices, which takes two rows of activations at once.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace SPECPRESS_PATH {

constexpr int MAX_ROWS = 4;     // 4 rows x 1 vector of accumulators, which is four registers of 32
constexpr bool NARROW = true;
constexpr bool SHORT_SUMS = false;
constexpr bool UNSIGNED_DOT = false;

struct F16 { float32x4_t a, b, c, d; };
struct I16 { int32x4_t a, b, c, d; };
struct B64 { uint8x16_t a, b, c, d; };

// f of each quarter.
template <class Out, class F, class... In>
inline Out quarters(F f, const In&... x) {
    return {f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}

inline F16 set(float x) {
    const float32x4_t v = vdupq_n_f32(x);
    return {v, v, v, v};
}
inline F16 zero() { return set(0.0f); }
inline F16 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void store(float* p, F16 x) { vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d); }
inline F16 add(F16 x, F16 y) { return quarters<F16>([](auto p, auto q) { return vaddq_f32(p, q); }, x, y); }
inline F16 sub(F16 x, F16 y) { return quarters<F16>([](auto p, auto q) { return vsubq_f32(p, q); }, x, y); }
inline F16 mul(F16 x, F16 y) { return quarters<F16>([](auto p, auto q) { return vmulq_f32(p, q); }, x, y); }
inline F16 div(F16 x, F16 y) { return quarters<F16>([](auto p, auto q) { return vdivq_f32(p, q); }, x, y); }
inline F16 fma(F16 x, F16 y, F16 z) {
    return quarters<F16>([](auto p, auto q, auto r) { return vfmaq_f32(r, p, q); }, x, y, z);
}
// ARM's own give a NaN whichever operand is one; these, as on the other paths, the second operand.
inline F16 max(F16 x, F16 y) { return quarters<F16>([](auto p, auto q) { return vbslq_f32(vcgtq_f32(p, q), p, q); }, x, y); }
inline F16 min(F16 x, F16 y) { return quarters<F16>([](auto p, auto q) { return vbslq_f32(vcltq_f32(p, q), p, q); }, x, y); }
inline F16 floor(F16 x) { return quarters<F16>([](auto p) { return vrndmq_f32(p); }, x); }
inline F16 round_even(F16 x) { return quarters<F16>([](auto p) { return vrndnq_f32(p); }, x); }
inline F16 where_less(F16 x, F16 limit, F16 yes, F16 no) {
    return quarters<F16>([](auto p, auto q, auto r, auto s) { return vbslq_f32(vcltq_f32(p, q), r, s); }, x, limit, yes, no);
}
inline I16 seti(int32_t x) {
    const int32x4_t v = vdupq_n_s32(x);
    return {v, v, v, v};
}
inline I16 loadi(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}; }
inline I16 addi(I16 x, I16 y) { return quarters<I16>([](auto p, auto q) { return vaddq_s32(p, q); }, x, y); }
inline I16 maxi(I16 x, I16 y) { return quarters<I16>([](auto p, auto q) { return vmaxq_s32(p, q); }, x, y); }
inline I16 bits(F16 x) { return quarters<I16>([](auto p) { return vreinterpretq_s32_f32(p); }, x); }
inline F16 as_float(I16 x) { return quarters<F16>([](auto p) { return vreinterpretq_f32_s32(p); }, x); }
inline I16 andi(I16 x, int32_t m) { return quarters<I16>([m](auto p) { return vandq_s32(p, vdupq_n_s32(m)); }, x); }
template <int S> inline I16 shift_left(I16 x) { return quarters<I16>([](auto p) { return vshlq_n_s32(p, S); }, x); }
inline F16 to_float(I16 x) { return quarters<F16>([](auto p) { return vcvtq_f32_s32(p); }, x); }
// Out of range and NaN give the lowest integer, as on the other paths.
inline I16 to_int(F16 x) {
    return quarters<I16>(
        [](auto p) { return vbslq_s32(vcaltq_f32(p, vdupq_n_f32(0x1p31f)), vcvtnq_s32_f32(p), vdupq_n_s32(INT32_MIN)); }, x);
}
inline void store_bytes(int8_t* p, I16 x) {
    const int16x8_t low = vcombine_s16(vmovn_s32(x.a), vmovn_s32(x.b)), high = vcombine_s16(vmovn_s32(x.c), vmovn_s32(x.d));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
inline F16 widen_bytes(int8x16_t v) {
    const int16x8_t low = vmovl_s8(vget_low_s8(v)), high = vmovl_s8(vget_high_s8(v));
    const I16 wide = {vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
                      vmovl_s16(vget_high_s16(high))};
    return to_float(wide);
}
inline F16 load_bytes(const int8_t* p) { return widen_bytes(vld1q_s8(p)); }
// Sixteen nibbles, at bit `shift` of their bytes, minus 8.
inline F16 load_nibbles(const uint8_t* p, int shift) {
    const uint8x16_t raw = vandq_u8(vshlq_u8(vld1q_u8(p), vdupq_n_s8(static_cast<int8_t>(-shift))), vdupq_n_u8(15));
    return widen_bytes(vsubq_s8(vreinterpretq_s8_u8(raw), vdupq_n_s8(8)));
}
inline F16 load_bf16(const uint16_t* p) {
    auto four = [](const uint16_t* q) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(q), 16)); };
    return {four(p), four(p + 4), four(p + 8), four(p + 12)};
}
inline F16 load_f16(const uint16_t* p) {
    auto four = [](const uint16_t* q) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(q))); };
    return {four(p), four(p + 4), four(p + 8), four(p + 12)};
}
inline void store_f16(uint16_t* p, F16 x) {
    auto four = [](uint16_t* q, float32x4_t y) { vst1_u16(q, vreinterpret_u16_f16(vcvt_f16_f32(y))); };
    four(p, x.a), four(p + 4, x.b), four(p + 8, x.c), four(p + 12, x.d);
}
inline F16 even_bf16(B64 x) {
    return quarters<F16>([](auto p) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(p), 16)); }, x);
}
inline F16 odd_bf16(B64 x) {
    return quarters<F16>(
        [](auto p) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(p), vdupq_n_u32(0xffff0000u))); }, x);
}
inline B64 load64(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}; }
inline void store64(uint8_t* p, B64 x) { vst1q_u8(p, x.a), vst1q_u8(p + 16, x.b), vst1q_u8(p + 32, x.c), vst1q_u8(p + 48, x.d); }
template <int S> inline B64 field(B64 x, int mask) {
    return quarters<B64>(
        [mask](auto p) {
            if constexpr (S > 0) p = vshrq_n_u8(p, S);
            return 0xff >> S == mask ? p : vandq_u8(p, vdupq_n_u8(static_cast<uint8_t>(mask)));
        },
        x);
}
template <int I> inline B64 join(B64 high, B64 low) {
    return quarters<B64>(
        [](auto h, auto l) {
            if constexpr (I == 0) return vsliq_n_u8(l, h, 4);
            else return vsriq_n_u8(h, l, 4);
        },
        high, low);
}
// Unsigned bytes minus 128, as signed ones.
inline B64 minus_128(B64 x) { return quarters<B64>([](auto p) { return veorq_u8(p, vdupq_n_u8(0x80)); }, x); }
inline B64 table(const uint8_t* sixteen) {
    const uint8x16_t v = vld1q_u8(sixteen);
    return {v, v, v, v};
}
inline B64 look_up(B64 t, B64 index) { return quarters<B64>([&](auto p) { return vqtbl1q_u8(t.a, p); }, index); }
struct X4 { int8x8_t v; };
inline X4 four(const int8_t* p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return {vcreate_s8(x)};
}
inline I16 dot_signed(I16 acc, B64 w, X4 x) {
    return quarters<I16>([&](auto sums, auto p) { return vdotq_lane_s32(sums, vreinterpretq_s8_u8(p), x.v, 0); }, acc, w);
}
// Codes up to 127, of all that are multiplied so: signed bytes, too.
inline I16 dot_weights_unsigned(I16 acc, B64 w, X4 x) { return dot_signed(acc, w, x); }

#if defined(__ARM_FEATURE_MATMUL_INT8)
// The sums of 16 outputs and two rows: output by output, and there row by row.
struct I16Pair { I16 low, high; };
// Eight inputs of each output: four and four.
struct B128 { B64 low, high; };
// Eight activations of two rows.
struct X8 { int8x16_t v; };

inline B64 zip(uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d) {
    const uint32x4_t p = vreinterpretq_u32_u8(a), q = vreinterpretq_u32_u8(b), r = vreinterpretq_u32_u8(c), s = vreinterpretq_u32_u8(d);
    return {vreinterpretq_u8_u32(vzip1q_u32(p, q)), vreinterpretq_u8_u32(vzip2q_u32(p, q)),
            vreinterpretq_u8_u32(vzip1q_u32(r, s)), vreinterpretq_u8_u32(vzip2q_u32(r, s))};
}
inline B128 eights(B64 first, B64 second) {
    return {zip(first.a, second.a, first.b, second.b), zip(first.c, second.c, first.d, second.d)};
}
inline X8 eight(const int8_t* row, const int8_t* next) { return {vcombine_s8(vld1_s8(row), vld1_s8(next))}; }
inline X8 four_of_eight(const int8_t* row, const int8_t* next) { return {vcombine_s8(four(row).v, four(next).v)}; }
inline I16Pair dot_pair(I16Pair acc, B128 w, X8 x) {
    auto dot = [&](auto sums, auto p) { return vmmlaq_s32(sums, vreinterpretq_s8_u8(p), x.v); };
    return {quarters<I16>(dot, acc.low, w.low), quarters<I16>(dot, acc.high, w.high)};
}
inline I16 first_row(I16Pair x) {
    return {vuzp1q_s32(x.low.a, x.low.b), vuzp1q_s32(x.low.c, x.low.d), vuzp1q_s32(x.high.a, x.high.b), vuzp1q_s32(x.high.c, x.high.d)};
}
inline I16 second_row(I16Pair x) {
    return {vuzp2q_s32(x.low.a, x.low.b), vuzp2q_s32(x.low.c, x.low.d), vuzp2q_s32(x.high.a, x.high.b), vuzp2q_s32(x.high.c, x.high.d)};
}
#endif

}  // namespace SPECPRESS_PATH
