// Sizes of one instance of the product for one row: the ring of a warp.
#pragma once

#include "device/forms.h"
#include "format/windows.cuh"
#include "linear/stream_limits.h"

namespace exl3 {

template <int kHalfBits_, Family kFamily_, Form kForm_>
struct StreamConfig {
  static constexpr int kHalfBits = kHalfBits_;
  static constexpr Family kFamily = kFamily_;
  static constexpr Form kForm = kForm_;
  using R = Rate<kHalfBits>;

  static constexpr int kWarps = kStreamWarps;
  static constexpr int kThreads = 32 * kWarps;
  // What leaves room for the finishing kernel beside this one: it waits there for its turn, and the
  // next product finds no multiprocessor taken by it. 5 and 6 bits spill with less than 120.
  static constexpr int kRegisters =
      (kHalfBits == 10 || kHalfBits == 12) && kForm == Form::kExact ? 120 : 112;
  static constexpr int kGroupWarps = 1;  // warps that share the steps of a strip's pieces
  static constexpr int kWarpTiles = 8;
  static constexpr int kRowTiles = 1;
  // Affine codebooks need the sum of the activations as well.
  static constexpr bool kSumsInputs = kForm == Form::kFast && kFamily == Family::kByteSum;

  static constexpr int kStepWeightBytes = 8 * R::words32 * 4;
  // So short that the first product starts soon, so long that a warp rarely waits; of rates with
  // half a bit two steps are no whole rows of 512 bytes, which a copy brings.
  static constexpr int kStageSteps = kHalfBits < 6 || kHalfBits % 2 != 0 ? 4 : 2;
  static constexpr int kStageBytes = kStageSteps * kStepWeightBytes;
  static constexpr int kStages = 2;
  static constexpr int kRingBytes = kStages * kStageBytes;  // of one warp
  // Stages that are fetched before the activations are there.
  static constexpr int kEarlyStages = 1;
  static_assert(kStages > kEarlyStages && kStageBytes % 512 == 0);
  static_assert(kWarps * kRingBytes <= kStreamRingBytes);
  static_assert(kRingBytes >= 128 * 4, "sums of the warps take the place of the ring");
};

}  // namespace exl3
