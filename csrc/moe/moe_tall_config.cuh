// Sizes of one instance of the experts' product by warpgroups.
#pragma once

#include <cstdint>

#include "device/forms.h"
#include "device/instructions.cuh"
#include "format/windows.cuh"
#include "linear/gemm_limits.h"
#include "moe/limits.h"

namespace exl3 {

// In shared memory: what is said about a piece, the product of one matrix and one part for a strip.
struct alignas(16) MoePiece {
  int strip;         // -1: there are no more pieces
  int first, tiles;  // the part, in tiles of rows
  int rows;          // of the part that are there
  uint16_t svh[128];
  uint16_t next_suh[128];      // up alone
  int row_pair[kMoePartRows];  // down alone
};

template <int kHalfBits_, Family kFamily_>
struct MoeTallConfig {
  static constexpr int kHalfBits = kHalfBits_;
  static constexpr Family kFamily = kFamily_;
  static constexpr Form kForm = Form::kExact;
  static constexpr int kRows = kMoePartRows;

  using R = Rate<kHalfBits>;
  // Two warpgroups take half of the channels each, a warp one tile: what they decode serves as many
  // rows as their registers hold sums of.
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kWarpTiles = 1;
  static constexpr int kRowTiles = kRows / 8;
  // A third warpgroup has the thread that fetches; it gives its registers to the others.
  static constexpr int kLaunchThreads = kThreads + 128;
  static constexpr int kFetchRegisters = 40, kRegisters = 232;

  // Sums of both warpgroups meet in shared memory, as many rows at a time.
  static constexpr int kChunkRows = 64, kRowStride = 132;
  static constexpr int kSumBytes = kChunkRows * kRowStride * 4;
  static_assert(kChunkRows == kMoeTallTile && kChunkRows == 8 * kWarps);

  // k is a multiple of 128, so all stages are full and a piece has an even number of them. Of what
  // is said about pieces four are enough while no more than six stages are under way.
  static constexpr int kStageSteps = 4, kPieces = 4, kMostStages = 6;
  static constexpr int kStepWeightBytes = 8 * R::words32 * 4;
  static constexpr int kWeightBytes = kStageSteps * kStepWeightBytes;
  static constexpr int kStageBytes = kWeightBytes + kStageSteps * kRows * 32;
  static constexpr int kPieceBytes = sizeof(MoePiece);
  static constexpr int kRoomBytes =
      gemm_room_bytes(Room::kLarge, kRows) - kSumBytes - kPieces * kPieceBytes - 16 * kMostStages;
  static constexpr int kFit = kRoomBytes / kStageBytes;
  static constexpr int kStages = kFit < kMostStages ? kFit : kMostStages;
  static_assert(kStages >= 4 && kStageBytes % 128 == 0 && kPieceBytes % 16 == 0);

  // The ring, sums, pieces; barriers of full stages, then of empty ones.
  static constexpr int kSumsAt = kStages * kStageBytes;
  static constexpr int kPiecesAt = kSumsAt + kSumBytes;
  static constexpr int kBarriersAt = kPiecesAt + kPieces * kPieceBytes;
  static constexpr int kSharedBytes = kBarriersAt + 16 * kStages;

  // Those that multiply.
  static __device__ __forceinline__ void barrier() { named_barrier<1, kThreads>(); }
};

}  // namespace exl3
