// Reading activations whose type is known at run time.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "linear/operands.h"

namespace exl3 {

__device__ __forceinline__ float2 unpack_pair(uint32_t raw, bool bfloat16) {
  if (bfloat16) return make_float2(__uint_as_float(raw << 16), __uint_as_float(raw & 0xFFFF0000u));
  return __half22float2(*reinterpret_cast<const __half2*>(&raw));
}

// Inputs first to first + kCount - 1 of a row as fp32; kCount is 4 or a multiple of 8.
template <int kCount>
__device__ __forceinline__ void load_inputs(const Input& in, int64_t row, int first,
                                            float (&v)[kCount]) {
  const auto* from = static_cast<const uint16_t*>(in.x) + row * in.stride + (first - in.k_begin);
  const bool bfloat16 = in.dtype == Dtype::kBfloat16;
  constexpr int kVector = kCount < 8 ? kCount : 8;  // elements of one load
  const bool inside = first >= in.k_begin && first + kCount <= in.k_begin + in.k_in;
  if (inside && reinterpret_cast<uintptr_t>(from) % (2 * kVector) == 0) {
    uint32_t raw[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount; i += kVector) {
      if constexpr (kVector == 8) {
        const uint4 four = *reinterpret_cast<const uint4*>(from + i);
        raw[i / 2] = four.x, raw[i / 2 + 1] = four.y;
        raw[i / 2 + 2] = four.z, raw[i / 2 + 3] = four.w;
      } else {
        const uint2 two = *reinterpret_cast<const uint2*>(from + i);
        raw[0] = two.x, raw[1] = two.y;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const float2 pair = unpack_pair(raw[i / 2], bfloat16);
      v[i] = pair.x, v[i + 1] = pair.y;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool wanted = first + i >= in.k_begin && first + i < in.k_begin + in.k_in;
    v[i] = wanted ? unpack_pair(from[i], bfloat16).x : 0.0f;
  }
}

}  // namespace exl3
