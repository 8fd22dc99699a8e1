// Small things that the kernels of the routed experts share.
#pragma once

#include <cstdint>

#include "device/hadamard.cuh"
#include "linear/gemm_limits.h"
#include "moe/moe.h"

namespace exl3 {

// The place here of the expert that a token was sent to; -1 for none, and for ids that do not
// exist: a map is never indexed with them.
__device__ __forceinline__ int local_expert(const void* ids, bool wide, const int* map, int pair,
                                            int global_experts, int experts) {
  // Past L1: with dependent launch the router may be the kernel just before.
  const int64_t id = wide ? __ldcg(static_cast<const long long*>(ids) + pair)
                          : __ldcg(static_cast<const int*>(ids) + pair);
  if (id < 0 || id >= global_experts) return -1;
  const int place = map == nullptr ? static_cast<int>(id) : __ldg(map + id);
  return place < experts ? place : -1;
}

// Where the pair of inputs (2 q, 2 q + 1) of row `row` of a tile of `rows` lies among the rows * 8
// words of its k16 step in an image: the order of B fragments, octets of rows interleaved in pairs
// where there are more than eight.
__device__ __forceinline__ int image_word(int rows, int row, int q) {
  const int lane = (row % 8) * 4 + q % 4, reg = q / 4;
  if (rows == 8) return lane * 2 + reg;
  return (row / 16) * 128 + lane * 4 + (row / 8) % 2 * 2 + reg;
}

// Four neighbouring inputs 4 * lane of a block of 128, already transformed, to the words of their
// step in an image. Returns the sum over the block of what was stored, for fast forms of byte sums.
__device__ __forceinline__ float store_words(uint32_t* step, int rows, int row, int lane,
                                             const float (&v)[4]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __half2 pair = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
    step[image_word(rows, row, 2 * (lane % 4) + i)] = *reinterpret_cast<const uint32_t*>(&pair);
    const float2 rounded = __half22float2(pair);
    sum += rounded.x + rounded.y;
  }
  return sum;
}

// The same to the image of a tile.
__device__ __forceinline__ float store_image(uint8_t* tile_image, int rows, int block, int row,
                                             int lane, const float (&v)[4]) {
  auto* words = reinterpret_cast<uint32_t*>(tile_image);
  return store_words(words + (block * 8 + lane / 4) * rows * 8, rows, row, lane, v);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, d);
  return v;
}

__device__ __forceinline__ float4 load_scales(const uint16_t* from) {
  const uint2 raw = __ldg(reinterpret_cast<const uint2*>(from));
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
  return make_float4(low.x, low.y, high.x, high.y);
}

// The lesser one; not a number if either is not.
__device__ __forceinline__ float least(float a, float b) {
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// a(gate) * (up + beta) where a is gate * sigmoid(gate * (slope + cubic * gate^2)): SiLU, and GELU
// by tanh, as one short piece of code. The fast exponential and quotient are off by a few units of
// fp32's last place, and the result is rounded to fp16 next.
__device__ __forceinline__ float gated(float slope, float cubic, float beta, float limit,
                                       float gate, float up) {
  gate = least(gate, limit);
  up = -least(-least(up, limit), limit);
  const float inner = gate * fmaf(cubic * gate, gate, slope);
  return __fdividef(gate, 1.0f + __expf(-inner)) * (up + beta);
}

// The same where the kind is known at run time only, GELU by erf among them.
__device__ __forceinline__ float activate_fast(const Activation& a, float gate, float up) {
  if (a.kind == ActivationKind::kGelu) return activate(a, gate, up);
  const bool tanh = a.kind == ActivationKind::kGeluTanh;
  const float slope = tanh ? kTwoRootTwoOverPi : a.alpha;
  const float cubic = tanh ? kTwoRootTwoOverPi * 0.044715f : 0.0f;
  return gated(slope, cubic, a.beta, a.limit, gate, up);
}

// Inputs of down, channels 4 * lane of a block: their scales and their transform, not yet rounded.
__device__ __forceinline__ void to_down_input(float4 suh, int lane, float (&v)[4]) {
  v[0] *= suh.x, v[1] *= suh.y, v[2] *= suh.z, v[3] *= suh.w;
  hadamard_128(v, lane);
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] *= kHadamardScale;
}

}  // namespace exl3
