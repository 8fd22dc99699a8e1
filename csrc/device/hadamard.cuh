// The 128-point Walsh-Hadamard transform of a row block held by one warp, four values a lane.
#pragma once

#include <cstdint>

namespace exl3 {

// The stages of a transform over an array that a lane holds, not normalised.
template <class T, int kCount>
__device__ __forceinline__ void butterflies(T (&v)[kCount]) {
#pragma unroll
  for (int distance = 1; distance < kCount; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((i & distance) != 0) continue;
      const T a = v[i], b = v[i + distance];
      v[i] = a + b, v[i + distance] = a - b;
    }
  }
}

// A stage of the transform between lanes kDistance apart.
template <int kDistance, int kCount>
__device__ __forceinline__ void lane_butterfly(float (&v)[kCount], int lane) {
  const float sign = (lane & kDistance) != 0 ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    v[i] = fmaf(v[i], sign, __shfl_xor_sync(0xFFFFFFFFu, v[i], kDistance));
  }
}

// The transforms of kCount blocks at once. Lane l holds elements 4l to 4l+3 of each. Two stages
// inside the lane, five between lanes, fp32, natural order, not normalised: the caller multiplies
// by 1/sqrt(128) where it rounds or scales anyway.
//
// The stages between lanes stay a loop: code that runs once in a launch costs about ten cycles an
// instruction to fetch, which is far more than the loop.
template <int kCount>
__device__ __forceinline__ void hadamard_128(float (&v)[kCount][4], int lane) {
#pragma unroll
  for (int b = 0; b < kCount; ++b) {
    const float a = v[b][0] + v[b][1], c = v[b][2] + v[b][3];
    const float d = v[b][0] - v[b][1], e = v[b][2] - v[b][3];
    v[b][0] = a + c, v[b][1] = d + e, v[b][2] = a - c, v[b][3] = d - e;
  }
#pragma unroll 1
  for (int distance = 1; distance < 32; distance *= 2) {
    const float sign = (lane & distance) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, v[b][i], distance);
        v[b][i] = fmaf(v[b][i], sign, other);  // exact: a product with 1 or -1
      }
    }
  }
}

__device__ __forceinline__ void hadamard_128(float (&v)[4], int lane) {
  float one[1][4] = {{v[0], v[1], v[2], v[3]}};
  hadamard_128(one, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = one[0][i];
}

// The same for four blocks a warp: lane l holds elements 16 * (l % 8) onwards of block l / 8. Four
// stages inside the lane, three between lanes.
__device__ __forceinline__ void hadamard_128_by_16(float (&v)[16], int lane) {
  butterflies(v);
#pragma unroll 1
  for (int distance = 1; distance < 8; distance *= 2) {
    const float sign = (lane & distance) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      v[i] = fmaf(v[i], sign, __shfl_xor_sync(0xFFFFFFFFu, v[i], distance));
    }
  }
}

inline constexpr float kRootOf128 = 11.313708498984761f;
inline constexpr float kHadamardScale = 1.0f / kRootOf128;

}  // namespace exl3
