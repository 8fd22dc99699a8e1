// Fetching: which k16 steps a group of warps takes, and how they get into its ring in shared
// memory.
#pragma once

#include <cstdint>

#include "device/instructions.cuh"
#include "device/partition.cuh"
#include "linear/gemm_config.cuh"
#include "linear/output.cuh"

namespace exl3 {

// The k16 steps that a group takes of a segment: an even share, contiguous.
template <class C>
__device__ __forceinline__ UnitRange share_of_group(int begin, int end, int group) {
  const int steps = end - begin;
  return {begin + steps * group / C::kGroups, begin + steps * (group + 1) / C::kGroups};
}

// Fetches the steps of one group through all segments (strip pieces) of the block's range. Every
// thread of the group holds one and copies every kGroupThreads-th 16 bytes.
//
// What can be had from the launch parameters again is not kept: registers are what limits the
// tiles.
template <class C>
struct Fetcher {
  const GemmParams& p;
  int segment, end;  // next segment to start, end of the range
  int left;          // steps still to fetch of the current segment
  const uint8_t *weights, *rows;

  __device__ __forceinline__ Fetcher(const GemmParams& params, const UnitRange& range)
      : p(params), segment(range.begin), end(range.end), left(0), weights(nullptr), rows(nullptr) {}

  __device__ __forceinline__ void next_segment() {
    const int strip_steps = p.k / 16;
    const int strip = segment / strip_steps;
    const int stop = min(end, (strip + 1) * strip_steps);
    const UnitRange share = share_of_group<C>(segment, stop, C::fetching_group());
    const GemmShard& shard = shard_of_strip(p, strip);
    left = share.end - share.begin;
    weights = shard.weights + C::fetching_bytes() +
              (int64_t{share.begin} - int64_t{shard.columns.strip_begin} * strip_steps) *
                  C::kStepWeightBytes;
    rows = shard.image + blockIdx.y * p.image_tile_bytes + C::fetching_bytes() +
           int64_t{share.begin - strip * strip_steps} * C::kStepRowBytes;
    segment = stop;
  }
  __device__ __forceinline__ bool ready() {
    while (left == 0 && segment < end) next_segment();
    return left > 0;
  }
  // Copies up to one stage. `stage` is the shared address of the slot plus fetching_bytes.
  template <int kStepBytes_, int kStageBytes_, class Copy>
  __device__ __forceinline__ void copy(Copy&& copy_16) const {
    constexpr int kStride = C::kGroupThreads * 16;
    if (kStageBytes_ % kStride == 0 && left >= C::kStageSteps) {
#pragma unroll
      for (int i = 0; i < kStageBytes_; i += kStride) copy_16(i);
      return;
    }
    const int bytes =
        min(left, C::kStageSteps) * kStepBytes_ - static_cast<int>(C::fetching_bytes());
#pragma unroll
    for (int i = 0; i < kStageBytes_; i += kStride) {
      if (i < bytes) copy_16(i);
    }
  }
  __device__ __forceinline__ void fetch_weights(uint32_t stage) const {
    const uint64_t policy = evict_first_policy();  // each weight is read once
    copy<C::kStepWeightBytes, C::kWeightBytes>(
        [&](int i) { copy_async_16(stage + i, weights + i, policy); });
  }
  __device__ __forceinline__ void fetch_rows(uint32_t stage) const {
    copy<C::kStepRowBytes, C::kRowBytes>(
        [&](int i) { copy_async_16(stage + C::kWeightBytes + i, rows + i); });
  }
  __device__ __forceinline__ void advance() {
    weights += C::kWeightBytes;
    rows += C::kRowBytes;
    left = max(0, left - C::kStageSteps);
  }
};

template <class C>
__device__ __forceinline__ void group_barrier(int group) {
  if constexpr (C::kGroupWarps == 1) {
    __syncwarp();
  } else {
    // Numbers known at compile time, which the race checker can follow.
    for_constant<C::kGroups>([&](auto index) {
      constexpr int kGroup = decltype(index)::value;
      if (group == kGroup) named_barrier<1 + kGroup, C::kGroupThreads>();
    });
  }
}

}  // namespace exl3
