// Sums of a warp and of the warps of a block, where warps take shares of k16 steps on their own:
// for one row of a linear layer and for a few rows of experts.
#pragma once

#include <cstdint>

#include "device/decode.cuh"
#include "linear/gemm_multiply.cuh"

namespace exl3 {

template <int kTiles>
__device__ __forceinline__ void clear_sums(float (&acc)[kTiles][1][4], float (&inputs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    inputs[i] = 0.0f;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) acc[t][0][i] = 0.0f;
  }
}

// What an accumulator means; `inputs` is the sum of its row's activations.
template <class C>
__device__ __forceinline__ float whole_sum(float z, float inputs) {
  if constexpr (C::kSumsInputs) {
    // sum_k (slope * s + offset) x, where the byte sums s were read as subnormals.
    constexpr float kSlope = CodebookMul1::kSlope * CodebookMul1::kUnit * 16777216.0f;
    z = z * kSlope + inputs * (CodebookMul1::kOffset * CodebookMul1::kUnit);
  }
  return z;
}

// Four channels of the sums of some warps, a bit each in `warps`, in their order. Warp w left its
// own at from + w * stride.
template <int kWarps>
__device__ __forceinline__ float4 sum_of_warps(uint32_t warps, const float* from, int stride) {
  float4 z = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
  for (int w = 0; w < kWarps; ++w) {
    // Adding 0 changes nothing, and loads that wait for no branch are under way together.
    const float4 v = (warps >> w & 1) != 0 ? *reinterpret_cast<const float4*>(from + w * stride)
                                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    z.x += v.x, z.y += v.y, z.z += v.z, z.w += v.w;
  }
  return z;
}

}  // namespace exl3
