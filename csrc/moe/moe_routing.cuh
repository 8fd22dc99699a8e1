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
  const int64_t id = wide ? __ldg(static_cast<const long long*>(ids) + pair)
                          : __ldg(static_cast<const int*>(ids) + pair);
  if (id < 0 || id >= global_experts) return -1;
  const int place = map == nullptr ? static_cast<int>(id) : __ldg(map + id);
  return place < experts ? place : -1;
}

// Where the pair of inputs (2 q, 2 q + 1) of k16 step `step` and row `row` of a tile of `rows` lies
// in its image, in 32-bit words: the order of B fragments, octets of rows interleaved in pairs
// where there are more than eight.
__device__ __forceinline__ int image_word(int rows, int step, int row, int q) {
  const int lane = (row % 8) * 4 + q % 4, reg = q / 4;
  if (rows == 8) return step * 64 + lane * 2 + reg;
  return step * rows * 8 + (row / 16) * 128 + lane * 4 + (row / 8) % 2 * 2 + reg;
}

// Four neighbouring inputs 4 * lane of a block of 128, already transformed, to the image of a row.
// Returns the sum over the block of what was stored, for fast forms of byte sums.
__device__ __forceinline__ float store_image(uint8_t* tile_image, int rows, int block, int row,
                                             int lane, const float (&v)[4]) {
  auto* words = reinterpret_cast<uint32_t*>(tile_image);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __half2 pair = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
    words[image_word(rows, block * 8 + lane / 4, row, 2 * (lane % 4) + i)] =
        *reinterpret_cast<const uint32_t*>(&pair);
    const float2 rounded = __half22float2(pair);
    sum += rounded.x + rounded.y;
  }
  return sum;
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

// Between the products, for channels 4 * lane of block `block`: activation, columns that do not
// count to zero, the scales and the transform of the inputs of down. Not yet rounded.
__device__ __forceinline__ void to_down_input(const Activation& activation, int block, int lane,
                                              int inner_begin, int inner_end, const uint16_t* suh,
                                              const float (&gate)[4], const float (&up)[4],
                                              float (&v)[4]) {
  const int channel = block * 128 + 4 * lane;
  const float4 scales = load_scales(suh + channel);
  const float s[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bool counts = channel + j >= inner_begin && channel + j < inner_end;
    v[j] = counts ? activate(activation, gate[j], up[j]) * s[j] : 0.0f;
  }
  hadamard_128(v, lane);
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] *= kHadamardScale;
}

}  // namespace exl3
