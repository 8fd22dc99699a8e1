// Four-lane vectors: NEON, which every aarch64 processor has.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "cpu/products.h"

namespace exl3::cpu {
namespace {

struct LaneBits;
template <class V, int kHalfBits, int kGroup>
struct GatheredRun;
template <int kHalfBits>
void gather_lanes(const uint32_t* words, LaneBits& out);

struct Neon {
  using F = float32x4_t;
  using I = uint32x4_t;
  static constexpr int kLanes = 4;
  static constexpr int kGemmRows = 6;  // 24 accumulators of 32 registers
  static constexpr int kGemmVectors = 4;

  static F load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, F v) { vst1q_f32(p, v); }
  static F set1(float v) { return vdupq_n_f32(v); }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F sub(F a, F b) { return vsubq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F quad(const float* p) { return vld1q_f32(p); }

  static F load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static F load_bfloat(const uint16_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
  }

  template <int kStride>
  static F butterfly(F v) {
    static constexpr uint32_t kSign[2][4] = {{0, 1u << 31, 0, 1u << 31},
                                             {0, 0, 1u << 31, 1u << 31}};
    const F other = kStride == 1 ? vrev64q_f32(v) : vextq_f32(v, v, 2);
    const I signs = vld1q_u32(kSign[kStride - 1]);
    return vaddq_f32(other, vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(v), signs)));
  }

  static void store_quad_sums(float* out, F v) {
    const F pairs = vpaddq_f32(v, v);
    *out = vgetq_lane_f32(vpaddq_f32(pairs, pairs), 0);
  }

  // Round to nearest, ties to even; finite values only.
  static void store_bfloat(uint16_t* p, F v) {
    const I bits = vreinterpretq_u32_f32(v);
    const I odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    vst1_u16(p, vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF))), 16));
  }
  // in[4 c + s], c < 16, to out[stride s + c].
  static void transpose_quads(const float* in, float* out, int stride) {
    for (int s = 0; s < 4; ++s) {
      for (int c = 0; c < 16; ++c) out[stride * s + c] = in[4 * c + s];
    }
  }

  static I load_bits(const uint32_t* p) { return vld1q_u32(p); }
  template <int kBits>
  static I shift_right(I v) {
    if constexpr (kBits == 0)
      return v;
    else
      return vshrq_n_u32(v, kBits);
  }
  template <int kBits>
  static I shift_left(I v) {
    return vshlq_n_u32(v, kBits);
  }
  static I bit_or(I a, I b) { return vorrq_u32(a, b); }
  static I low16(I v) { return vandq_u32(v, vdupq_n_u32(0xFFFF)); }

  static I products(I window, uint32_t multiplier, uint32_t addend) {
    return vmlaq_u32(vdupq_n_u32(addend), window, vdupq_n_u32(multiplier));
  }
  static F mul1_unrounded(I p) {
    const I sums = vpaddlq_u16(vpaddlq_u8(vreinterpretq_u8_u32(p)));
    const F biased = vreinterpretq_f32_u32(vorrq_u32(sums, vdupq_n_u32(0x4B000000)));
    return fma(biased, set1(kMul1Scale), set1(kMul1Offset));
  }
  static F high_half(I p) { return masked_half(p); }
  static F low_half(I p) { return masked_half(vshlq_n_u32(p, 16)); }

  template <int kHalfBits, class Bits = LaneBits>
  static Bits open_tile(const uint32_t* words) {
    Bits lanes;
    gather_lanes<kHalfBits>(words, lanes);
    return lanes;
  }
  template <int kHalfBits, int kGroup>
  static auto read_run(const LaneBits& lanes) {
    return GatheredRun<Neon, kHalfBits, kGroup>::read(lanes);
  }

 private:
  static F masked_half(I p) {
    const I moved = vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(p), 3));
    return vreinterpretq_f32_u32(
        veorq_u32(vandq_u32(moved, vdupq_n_u32(kWideMask)), vdupq_n_u32(kWideXor)));
  }
};

}  // namespace
}  // namespace exl3::cpu
