// Sizes of one instance of the streaming product: the ring of a warp.
#pragma once

#include "device/forms.h"
#include "format/windows.cuh"
#include "linear/stream_limits.h"

namespace exl3 {

// kWide: more than two rows, so less of shared memory is for the ring.
template <int kHalfBits_, Family kFamily_, Form kForm_, bool kWide_>
struct StreamConfig {
  static constexpr int kHalfBits = kHalfBits_;
  static constexpr Family kFamily = kFamily_;
  static constexpr Form kForm = kForm_;
  using R = Rate<kHalfBits>;

  static constexpr int kWarps = kStreamWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kGroupWarps = 1;  // warps that share the steps of a strip's pieces
  static constexpr int kWarpTiles = 8;
  static constexpr int kRows = kStreamRows;
  static constexpr int kRowTiles = 1;
  // Affine codebooks need the sums of the activations as well.
  static constexpr bool kSumsInputs = kForm == Form::kFast && kFamily == Family::kByteSum;

  static constexpr int kStepWeightBytes = 8 * R::words32 * 4;
  static constexpr int kWarpBytes = stream_ring_limit(kWide_ ? kStreamRows : 1) / kWarps;
  // k16 steps of a stage. Few large stages lose less time to waiting than many small ones.
  static constexpr int kStageSteps = kWarpBytes >= 3 * 4 * kStepWeightBytes   ? 4
                                     : kWarpBytes >= 2 * 2 * kStepWeightBytes ? 2
                                                                              : 1;
  static constexpr int kStageBytes = kStageSteps * kStepWeightBytes;
  static constexpr int kStages =
      kWarpBytes / kStageBytes < 4 ? kWarpBytes / kStageBytes : 4;
  static constexpr int kRingBytes = kStages * kStageBytes;  // of one warp
  static_assert(kStages >= 2 && kStageBytes % 16 == 0);

  // Row stride of the sums that meet in shared memory: see GemmConfig.
  static constexpr int kRowStride = 132;
  static_assert(kWarps * kRows * kRowStride * 4 <= kWarps * kRingBytes,
                "sums of the warps take the place of the ring");
};

}  // namespace exl3
