// The input transform inside the product for one row: t = H(x * suh) / sqrt(128) in blocks of 128,
// rounded once to fp16, into shared memory in the order of B fragments:
//
//   [block][k16 of 8][quad lane of 4][register of 2], 4 bytes each.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/hadamard.cuh"
#include "device/instructions.cuh"
#include "linear/input.cuh"
#include "linear/stream.h"

namespace exl3 {

__device__ __forceinline__ uint32_t rounded_pair(float a, float b) {
  const __half2 pair = __floats2half2_rn(a * kHadamardScale, b * kHadamardScale);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Blocks first to first + count - 1 of a shard's inputs, taken modulo k / 128, by all warps: a warp
// transforms a block at a time, a lane holds four inputs.
__device__ __forceinline__ void transform_inputs(const StreamParams& p, const StreamShard& shard,
                                                 int first, int count, uint8_t* inputs) {
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  // Pair q of a step is register q / 4 of quad lane q % 4.
  const int q = 2 * (lane % 4);
  uint8_t* to = inputs + (lane / 4) * 32 + (q % 4) * 8 + (q / 4) * 4;
#pragma unroll 1
  for (int i = warp; i < count; i += kStreamWarps) {
    int block = first + i;
    if (block >= p.k / 128) block -= p.k / 128;
    float v[4];
    const uint2 raw = __ldg(reinterpret_cast<const uint2*>(shard.suh + block * 128 + 4 * lane));
    load_inputs<4>(p.input, 0, block * 128 + 4 * lane, v);
    const float2 low = unpack_pair(raw.x, false), high = unpack_pair(raw.y, false);
    v[0] *= low.x, v[1] *= low.y, v[2] *= high.x, v[3] *= high.y;
    hadamard_128(v, lane);
    auto* step = reinterpret_cast<uint32_t*>(to + i * kStreamBlockBytes);
    step[0] = rounded_pair(v[0], v[1]);
    step[2] = rounded_pair(v[2], v[3]);
  }
}

// Brings the scales of these blocks near, which no other kernel writes.
__device__ __forceinline__ void prefetch_scales(const StreamParams& p, const StreamShard& shard,
                                                int first, int count) {
  const int i = threadIdx.x;  // 128 bytes each, half a block
  if (i >= 2 * count) return;
  int at = 2 * first + i;
  if (at >= p.k / 64) at -= p.k / 64;
  prefetch_l2(shard.suh + 64 * at);
}

}  // namespace exl3
