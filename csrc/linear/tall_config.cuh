// Sizes of one instance of the product by warpgroups.
#pragma once

#include <cstdint>

#include "device/forms.h"
#include "device/instructions.cuh"
#include "format/windows.cuh"
#include "linear/gemm_limits.h"

namespace exl3 {

template <int kHalfBits_, Family kFamily_, int kRows_>
struct TallConfig {
  static constexpr int kHalfBits = kHalfBits_;
  static constexpr Family kFamily = kFamily_;
  static constexpr Form kForm = Form::kExact;
  static constexpr int kRows = kRows_;
  static constexpr int kLimit = gemm_room_bytes(Room::kLarge, kRows);

  using R = Rate<kHalfBits>;
  // Two groups split the k16 steps; two warpgroups of each take half of the channels, a tile a
  // warp.
  static constexpr int kGroups = 2, kGroupWarps = 8, kWarps = kGroups * kGroupWarps;
  static constexpr int kGroupThreads = 32 * kGroupWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpTiles = 1;
  static constexpr int kRowTiles = kRows / 8;

  // A fifth warpgroup has the two warps that fetch; it gives its registers to the others.
  static constexpr int kLaunchThreads = kThreads + 128;
  static constexpr int kFetchRegisters = 24, kRegisters = 112;

  // Sums of the groups, as in GemmConfig.
  static constexpr int kChunkRows = kRows < 64 ? kRows : 64;
  static constexpr int kWarpRows = kRows / kWarps;
  // Blocks share the rows of a strip out where registers allow sums that begin with others' parts.
  static constexpr bool kShareRows = kWarpRows < 8;
  static constexpr int kRowStride = 132;
  static constexpr int kSumBytes = kGroups * kChunkRows * kRowStride * 4;

  static constexpr int kStepWeightBytes = 8 * R::words32 * 4;
  static constexpr int kStepRowBytes = kRows * 32;
  static constexpr int kStepBytes = kStepWeightBytes + kStepRowBytes;
  // As many steps a stage as three stages have room for: each costs a wait. No more than six
  // stages.
  static constexpr int kRoomBytes = kLimit - kSumBytes - 256;
  static constexpr int kFitSteps = kRoomBytes / (3 * kGroups * kStepBytes);
  static constexpr int kStageSteps = kFitSteps >= 8 ? 8 : kFitSteps >= 4 ? 4 : 2;
  static constexpr int kWeightBytes = kStageSteps * kStepWeightBytes;
  static constexpr int kRowBytes = kStageSteps * kStepRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kRowBytes;
  static constexpr int kFit = kRoomBytes / (kGroups * kStageBytes);
  static constexpr int kStages = kFit < 6 ? kFit : 6;
  static constexpr int kRingBytes = kStages * kStageBytes;
  // After rings and sums: barriers of full stages, then of empty ones, for each group.
  static constexpr int kBarrierBytes = kGroups * 2 * kStages * 8;
  static constexpr int kSharedBytes = kGroups * kRingBytes + kSumBytes + kBarrierBytes;
  static_assert(kStages >= 3 && kRows % kChunkRows == 0);

  // One lane of a warp fetches for a group.
  static __device__ __forceinline__ int fetching_group() { return threadIdx.x / 32 - kWarps; }
  static __device__ __forceinline__ uint32_t fetching_bytes() { return 0; }
  static __device__ __forceinline__ void block_barrier() { named_barrier<1, kThreads>(); }
  // A warp beside those that fetch publishes, as the release waits for all stores of the block.
  static constexpr int kPublishingWarp = kWarps + kGroups;
  static __device__ __forceinline__ void publish_part() {
    named_barrier_arrive<2, kThreads + 32>();
  }
  static __device__ __forceinline__ void await_part() { named_barrier<2, kThreads + 32>(); }
};

}  // namespace exl3
