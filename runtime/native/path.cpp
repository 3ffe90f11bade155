// The functions of this instruction path, as one table.
#include "kernels.h"
#include "vec.h"

namespace SPECPRESS_PATH {

using namespace specpress;

void linear_f32(const Weights&, const Inputs&, int64_t, int64_t, float*, int64_t, bool);
void linear_bf16(const Weights&, const Inputs&, int64_t, int64_t, float*, int64_t, bool);
void linear_int8(const Weights&, const Inputs&, int64_t, int64_t, float*, int64_t, bool);
void linear_int4(const Weights&, const Inputs&, int64_t, int64_t, float*, int64_t, bool);
void linear_nf4(const Weights&, const Inputs&, int64_t, int64_t, float*, int64_t, bool);
void linear_ternary(const Weights&, const Inputs&, int64_t, int64_t, float*, int64_t, bool);
void linear_nested(const Weights&, const Inputs&, int64_t, int64_t, float*, int64_t, bool);
void linear_upper(const Weights&, const Inputs&, int64_t, int64_t, float*, int64_t, bool);
void linear_trellis(const Weights&, const Inputs&, int64_t, int64_t, float*, int64_t, bool);
void linear_three_of_four(const Weights&, const Inputs&, int64_t, int64_t, float*, int64_t, bool);
void quantize(const Weights&, const float*, int8_t*, float*, int32_t*, float*);
#if defined(SPECPRESS_WORDS)
void widen(const Weights&, const int8_t*, int16_t*, int32_t*);
#else
constexpr void (*widen)(const Weights&, const int8_t*, int16_t*, int32_t*) = nullptr;
#endif
void norm(const float*, const float*, int64_t, float, float, float*, float*);
void layer_norm(const float*, const float*, const float*, int64_t, float, float*, float*);
void gated(const float*, const float*, int64_t, int64_t, const float*, float*);
void capped(float*, int64_t, float);
void sigmoid(float*, int64_t);
void decay(const float*, const float*, int64_t, float*);
void delta_step(const DeltaStep&);
void mamba_steps(float*, const float*, int64_t, float, float, float*);
void mamba_step(const MambaStep&);
void to_halves(const float*, int64_t, uint16_t*);
void from_halves(const uint16_t*, int64_t, float*);
void to_codes(const float*, int64_t, int64_t, uint8_t*);
void from_codes(const uint8_t*, int64_t, int64_t, float*);
void rotate(float*, int64_t, int64_t, int64_t, const float*, const float*);
void turn(const float*, const float*, int64_t, float*);
void remember(const Heads&, int64_t, const Store&, int64_t, const float*, const float*, int64_t, int64_t);
void attend(const AttentionCall&, const AttentionUnit&, float*, float*);
void attend_split(const AttentionCall&, const AttentionUnit&, int64_t, float*, float*);
void choose(float*, int64_t, const Routing&, int64_t*);
int64_t attention_scratch(const Heads&);
int64_t attention_part(const Heads&);
int64_t tile_rows();
int64_t largest(const float*, int64_t, int64_t);
void encode(const TrellisTask&, int64_t, int64_t);
float dot(const float*, const float*, int64_t);
float weigh(const BlockWeigh&);
void look(const BlockLook&);
void block_step(const BlockStep&);
int64_t read(const uint8_t*, int64_t);

extern const Path path;
const Path path = {
    {linear_f32, linear_bf16, linear_int8, linear_int4, linear_nf4, linear_ternary, linear_nested, linear_upper, linear_trellis,
     linear_three_of_four},
    quantize, widen, norm, layer_norm, gated, capped, sigmoid, decay, delta_step, mamba_steps, mamba_step, to_halves, from_halves, to_codes, from_codes,
    rotate, turn, remember, attend, attend_split, choose,
    attention_scratch, attention_part, tile_rows, largest, encode, dot, weigh, look, block_step, read, UNSIGNED_DOT,
};

}  // namespace SPECPRESS_PATH
