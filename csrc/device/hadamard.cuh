// The 128-point Walsh-Hadamard transform of a row block held by one warp, four values a lane.
#pragma once

#include <cstdint>

namespace exl3 {

// Lane l holds elements 4l to 4l+3. Two stages inside the lane, five between lanes, fp32, natural
// order, not normalised: the caller multiplies by 1/sqrt(128) where it rounds or scales anyway.
__device__ __forceinline__ void hadamard_128(float (&v)[4], int lane) {
  const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
  v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], distance);
      v[i] = upper ? other - v[i] : v[i] + other;
    }
  }
}

inline constexpr float kRootOf128 = 11.313708498984761f;
inline constexpr float kHadamardScale = 1.0f / kRootOf128;

}  // namespace exl3
