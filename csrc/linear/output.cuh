// Scales, bias, rounding and stores of finished channels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/convert.cuh"
#include "linear/operands.h"

namespace exl3 {

// The shard that a strip of the launch belongs to; P has shards and shard_count.
template <class P>
__device__ __forceinline__ const auto& shard_of_strip(const P& p, int strip) {
  int s = 0;
  while (s + 1 < p.shard_count && strip >= p.shards[s + 1].columns.strip_begin) ++s;
  return p.shards[s];
}

// One past the last strip of a shard.
template <class P, class S>
__device__ __forceinline__ int shard_end_strip(const P& p, const S& shard) {
  const int next = static_cast<int>(&shard - p.shards) + 1;
  return next < p.shard_count ? p.shards[next].columns.strip_begin : p.strips;
}

// The four fp16 scales of neighbouring channels that a lane holds as raw bits.
__device__ __forceinline__ float4 unpack_scales(uint2 raw) {
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
  return make_float4(low.x, low.y, high.x, high.y);
}

// Four neighbouring channels of one row: svh, bias, rounding, store of those that are wanted.
__device__ __forceinline__ void store_channels(const Output& out, const Columns& columns,
                                               int64_t row, int channel, float4 scales,
                                               const float (&z)[4]) {
  float y[4] = {z[0] * scales.x, z[1] * scales.y, z[2] * scales.z, z[3] * scales.w};
  const int first = channel - columns.n_begin;
  const int64_t column = int64_t{columns.out_begin} + first;
  if (out.bias != nullptr) {
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      if (first + i < 0 || first + i >= columns.n_out) continue;
      const float bias = load_as_float(out.bias, out.bias_dtype, column + i);
      y[0] += i == 0 ? bias : 0.0f, y[1] += i == 1 ? bias : 0.0f;
      y[2] += i == 2 ? bias : 0.0f, y[3] += i == 3 ? bias : 0.0f;
    }
  }
  uint2 bits;
  if (out.dtype == Dtype::kBfloat16) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(y[0], y[1]);
    const __nv_bfloat162 high = __floats2bfloat162_rn(y[2], y[3]);
    bits = make_uint2(*reinterpret_cast<const uint32_t*>(&low),
                      *reinterpret_cast<const uint32_t*>(&high));
  } else {
    const __half2 low = __floats2half2_rn(y[0], y[1]), high = __floats2half2_rn(y[2], y[3]);
    bits = make_uint2(*reinterpret_cast<const uint32_t*>(&low),
                      *reinterpret_cast<const uint32_t*>(&high));
  }
  uint16_t* to = static_cast<uint16_t*>(out.data) + row * out.stride + column;
  if (first >= 0 && first + 4 <= columns.n_out && (reinterpret_cast<uintptr_t>(to) & 7) == 0) {
    *reinterpret_cast<uint2*>(to) = bits;
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    if (first + i < 0 || first + i >= columns.n_out) continue;
    to[i] = static_cast<uint16_t>((i < 2 ? bits.x : bits.y) >> 16 * (i % 2));
  }
}

}  // namespace exl3
