// Sizes of one instance of the product: groups of warps, stages of the ring, shared memory.
#pragma once

#include <cstdint>
#include <utility>

#include "device/forms.h"
#include "format/windows.cuh"
#include "linear/gemm.h"

namespace exl3 {

template <int kHalfBits_, Family kFamily_, Form kForm_, int kRows_, Room kRoom_ = Room::kSmall>
struct GemmConfig {
  static constexpr int kHalfBits = kHalfBits_;
  static constexpr Family kFamily = kFamily_;
  static constexpr Form kForm = kForm_;
  static constexpr int kRows = kRows_;
  static constexpr Room kRoom = kRoom_;
  static constexpr bool kLarge = kRoom == Room::kLarge;
  static constexpr int kLimit = gemm_room_bytes(kRoom, kRows);

  using R = Rate<kHalfBits>;
  static constexpr int kGroupWarps = kRows <= 16 ? 1 : 4;
  static constexpr int kWarps = gemm_warps(kRows);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kGroups = kWarps / kGroupWarps;
  static constexpr int kGroupThreads = 32 * kGroupWarps;
  static constexpr int kWarpTiles = 8 / kGroupWarps;  // tiles of 16 channels a warp owns
  static constexpr int kRowTiles = kRows / 8;

  // Rows whose sums over the groups go through shared memory at once. Row stride 132 floats: the
  // four lanes of a quad hold different rows and the eight quads different channels, so 8 * 4
  // banks.
  static constexpr int kChunkRows = kGroupWarps == 1        ? (kHalfBits >= 14 ? 4 : 8)
                                    : kLarge && kRows == 32 ? 32
                                                            : 16;
  static constexpr int kWarpRows = kRows / kWarps;  // rows that one warp finishes
  static constexpr int kRowStride = 132;
  static constexpr int kSumBytes = kGroups * kChunkRows * kRowStride * 4;

  // One stage of the ring holds up to so many k16 steps. This has no say in the order of additions.
  // Long stages cost fewer instructions for fetching and waiting; two are enough, since a stage
  // takes longer to multiply than to arrive.
  static constexpr int kStepWeightBytes = 8 * R::words32 * 4;
  static constexpr int kStepRowBytes = kRows * 32;
  static constexpr int kStepBytes = kStepWeightBytes + kStepRowBytes;
  static constexpr int kFitSteps = (kLimit - kSumBytes) / (2 * kGroups * kStepBytes);
  static constexpr int kStageSteps = kLarge && kRows == 128 && kFitSteps >= 8 ? 8
                                     : kFitSteps >= 4                         ? 4
                                                                              : 2;
  static constexpr int kWeightBytes = kStageSteps * kStepWeightBytes;
  static constexpr int kRowBytes = kStageSteps * kStepRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kRowBytes;
  // Decoding the next step between the products of this one takes registers. The tallest tile has
  // none left, nor has the one below where a lane needs three words a tile.
  static constexpr bool kDecodeAhead = kRows == 32 || (kRows == 64 && R::lane_words == 2);

  // Two stages must fit, more than four do not help.
  static constexpr int kFit = (kLimit - kSumBytes) / (kGroups * kStageBytes);
  static constexpr int kStages = kFit < 4 ? kFit : 4;
  // Stages whose weights are fetched before the activations are there. With few rows the transform
  // of the activations is what everything waits for, and its loads would queue behind the weights.
  static constexpr int kEarlyStages = kRows <= 16 ? 1 : kStages - 1;
  static constexpr int kSharedBytes = kGroups * kStages * kStageBytes + kSumBytes;

  // Every thread fetches, for its own group.
  static __device__ __forceinline__ int fetching_group() { return threadIdx.x / kGroupThreads; }
  static __device__ __forceinline__ uint32_t fetching_bytes() {
    return 16 * (threadIdx.x % kGroupThreads);
  }
  static __device__ __forceinline__ void block_barrier() { __syncthreads(); }
  static_assert(kStages >= 2);
  static_assert(kForm == Form::kExact || kRows == kFastRows, "with more rows they do not pay");
  static_assert(kRows % kChunkRows == 0 && kStageSteps % 2 == 0);
};

// Stages of the ring that so many k16 steps fill.
template <class C>
EXL3_HOST_DEVICE constexpr int stages_of(int steps) {
  return (steps + C::kStageSteps - 1) / C::kStageSteps;
}

// Calls f with 0 to kCount - 1 as constants.
template <int kCount, class F>
__device__ __forceinline__ void for_constant(F&& f) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (f(std::integral_constant<int, kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

}  // namespace exl3
