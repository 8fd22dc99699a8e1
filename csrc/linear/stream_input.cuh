// The input transform inside the product for one row: t = H(x * suh) / sqrt(128) in blocks of 128,
// rounded once to fp16, into shared memory in the order of B fragments:
//
//   [block][k16 of 8][quad lane of 4][register of 2], 4 bytes each.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/hadamard.cuh"
#include "device/instructions.cuh"
#include "linear/prologue.cuh"
#include "linear/stream.h"

namespace exl3 {

__device__ __forceinline__ uint32_t rounded_pair(float a, float b) {
  const __half2 pair = __floats2half2_rn(a * kHadamardScale, b * kHadamardScale);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Blocks first to first + count - 1 of a shard's inputs, taken modulo k / 128, by all warps: a warp
// transforms four blocks at a time, a lane the sixteen inputs of a k16 step: load(at, v).
template <class Load>
__device__ __forceinline__ void transform_inputs(const StreamParams& p, const StreamShard& shard,
                                                 int first, int count, uint8_t* inputs,
                                                 Load&& load) {
  const int step = thread_index() % 8;
#pragma unroll 1
  for (int i = thread_index() / 8; i < (count + 3) / 4 * 4; i += 4 * kStreamWarps) {
    int block = first + min(i, count - 1);
    if (block >= p.k / 128) block -= p.k / 128;
    const int at = block * 128 + 16 * step;
    const auto* scales = reinterpret_cast<const uint4*>(shard.suh + at);
    const uint4 raw[2] = {__ldg(scales), __ldg(scales + 1)};
    float v[16];
    load(at, v);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t pairs[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 pair = unpack_pair(pairs[e], false);
        v[8 * j + 2 * e] *= pair.x, v[8 * j + 2 * e + 1] *= pair.y;
      }
    }
    hadamard_128_by_16(v, step);
    if (i >= count) continue;
    // Pair q of a step is register q / 4 of quad lane q % 4.
    uint32_t words[8];
#pragma unroll
    for (int q = 0; q < 8; ++q) words[q % 4 * 2 + q / 4] = rounded_pair(v[2 * q], v[2 * q + 1]);
    auto* to = reinterpret_cast<uint4*>(inputs + i * kStreamBlockBytes + step * 32);
    to[0] = make_uint4(words[0], words[1], words[2], words[3]);
    to[1] = make_uint4(words[4], words[5], words[6], words[7]);
  }
}

// The same for activations with something before the layer.
__device__ __forceinline__ void prepare_inputs(const StreamParams& p, const StreamShard& shard,
                                               bool first_part, int first, int count,
                                               uint8_t* inputs) {
  __shared__ float meet[kStreamWarps];
  static_assert(sizeof(meet) <= kStreamMeetBytes);
  float factor = 1.0f;
  if (p.prologue.kind == PrologueKind::kNorm) {
    const bool store = first_part && block_index() == 0 && p.prologue.sum != nullptr;
    factor = norm_factor<kStreamWarps>(p.input, p.prologue, 0, store, meet);
  }
  transform_inputs(p, shard, first, count, inputs, [&](int at, float (&v)[16]) {
    load_prepared<16>(p.input, p.prologue, factor, 0, at, v);
  });
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

// Likewise the weight of the norm, which a kernel before this one may have made: into L2 alone,
// where it cannot be an old one.
__device__ __forceinline__ void prefetch_norm(const StreamParams& p) {
  const int bytes = p.input.k_in * (p.prologue.weight_dtype == Dtype::kFloat32 ? 4 : 2);
#pragma unroll 1
  for (int at = 128 * threadIdx.x; at < bytes; at += 128 * 32 * kStreamWarps) {
    prefetch_l2(static_cast<const uint8_t*>(p.prologue.weight) + at);
  }
}

}  // namespace exl3
