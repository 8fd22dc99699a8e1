// The input transform inside the streaming product: t = H(x * suh) / sqrt(128) in blocks of 128,
// rounded once to fp16, into shared memory in the order of B fragments:
//
//   [block][k16 of 8][kept row][quad lane of 4][register of 2], 4 bytes each.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/hadamard.cuh"
#include "linear/input.cuh"
#include "linear/stream.h"

namespace exl3 {

__device__ __forceinline__ uint32_t rounded_pair(float a, float b) {
  const __half2 pair = __floats2half2_rn(a * kHadamardScale, b * kHadamardScale);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// One block of one row: a lane holds four inputs. `stride` is from step to step in bytes.
__device__ __forceinline__ void transform_row(const Input& in, const uint16_t* suh, int block,
                                              int row, uint8_t* to, int stride, int lane) {
  float v[4];
  const int first = block * 128 + 4 * lane;
  const uint2 raw = __ldg(reinterpret_cast<const uint2*>(suh + first));
  load_inputs<4>(in, row, first, v);
  const float2 low = unpack_pair(raw.x, false), high = unpack_pair(raw.y, false);
  v[0] *= low.x, v[1] *= low.y, v[2] *= high.x, v[3] *= high.y;
  hadamard_128(v, lane);
  // Pair q of a step is register q / 4 of quad lane q % 4.
  const int q = 2 * (lane % 4);
  auto* step = reinterpret_cast<uint32_t*>(to + (lane / 4) * stride);
  step[(q % 4) * 2 + q / 4] = rounded_pair(v[0], v[1]);
  step[(q % 4 + 1) * 2 + q / 4] = rounded_pair(v[2], v[3]);
}

// One block of up to eight rows: a lane holds 32 inputs, two k16 steps, of row lane / 4. The same
// butterflies in the same order as above, with fewer exchanges between lanes.
__device__ __forceinline__ void transform_rows(const Input& in, const uint16_t* suh, int block,
                                               int m, int kept_rows, uint8_t* to, int lane) {
  const int row = lane / 4, part = lane % 4;
  const int first = block * 128 + 32 * part;
  float v[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) v[i] = 0.0f;
  if (row < m) {
    load_inputs<32>(in, row, first, v);
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(suh + first + i));
      const uint32_t four[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 scales = unpack_pair(four[j], false);
        v[i + 2 * j] *= scales.x, v[i + 2 * j + 1] *= scales.y;
      }
    }
  }
#pragma unroll
  for (int stride = 1; stride < 32; stride *= 2) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i & stride) continue;
      const float a = v[i], b = v[i + stride];
      v[i] = a + b, v[i + stride] = a - b;
    }
  }
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool upper = (part & distance) != 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], distance);
      v[i] = upper ? other - v[i] : v[i] + other;
    }
  }
  if (row >= kept_rows) return;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    uint32_t pairs[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i] = rounded_pair(v[16 * s + 2 * i], v[16 * s + 2 * i + 1]);
    auto* step = reinterpret_cast<uint4*>(to + ((2 * part + s) * kept_rows + row) * 32);
    step[0] = make_uint4(pairs[0], pairs[4], pairs[1], pairs[5]);
    step[1] = make_uint4(pairs[2], pairs[6], pairs[3], pairs[7]);
  }
}

// All rows of blocks first to first + count - 1 of a shard's inputs, taken modulo k / 128, by all
// warps. Rows that are kept but do not exist are left as they are: rows never mix.
__device__ __forceinline__ void transform_inputs(const StreamParams& p, const StreamShard& shard,
                                                 int first, int count, uint8_t* to, int warp,
                                                 int lane) {
  const int blocks = p.k / 128, kept = p.kept_rows;
#ifdef ROWS8
  if (kept > 2) {
    for (int i = warp; i < count; i += kStreamWarps) {
      int block = first + i;
      if (block >= blocks) block -= blocks;
      transform_rows(p.input, shard.suh, block, p.m, kept, to + i * stream_block_bytes(kept), lane);
    }
    return;
  }
#endif
#pragma unroll 1
  for (int i = warp; i < count * kept; i += kStreamWarps) {
    const int at = i / kept, row = i % kept;
    if (row >= p.m) continue;
    int block = first + at;
    if (block >= blocks) block -= blocks;
    transform_row(p.input, shard.suh, block, row, to + at * stream_block_bytes(kept) + row * 32,
                  kept * 32, lane);
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
