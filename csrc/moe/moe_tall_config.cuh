// Sizes of one instance of the experts' product by warpgroups.
#pragma once

#include <cstdint>

#include "device/forms.h"
#include "device/instructions.cuh"
#include "format/windows.cuh"
#include "linear/gemm_limits.h"
#include "moe/limits.h"

namespace exl3 {

template <int kHalfBits_, Family kFamily_>
struct MoeTallConfig {
  static constexpr int kHalfBits = kHalfBits_;
  static constexpr Family kFamily = kFamily_;
  static constexpr Form kForm = Form::kExact;
  static constexpr int kRows = kMoePartRows;

  using R = Rate<kHalfBits>;
  // Two warpgroups take half of the channels each, a tile a warp. 256 rows keep the tensor cores
  // busy longer than decoding takes, and are all that the registers of two warpgroups hold.
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kGroups = 1, kGroupWarps = kWarps, kWarpTiles = 1;
  static constexpr int kRowTiles = kRows / 8;
  // A third warpgroup has the thread that fetches; it gives its registers to the others.
  static constexpr int kLaunchThreads = kThreads + 128;
  static constexpr int kFetchRegisters = 40, kRegisters = 232;

  // Sums of both warpgroups meet in shared memory, as many rows at a time.
  static constexpr int kChunkRows = 64, kRowStride = 132;
  static constexpr int kSumBytes = kChunkRows * kRowStride * 4;
  static_assert(kChunkRows == 8 * kWarps && kChunkRows == kMoeTallTile);

  // k is a multiple of 128, so all stages are full.
  static constexpr int kStageSteps = 4;
  static constexpr int kStepWeightBytes = 8 * R::words32 * 4;
  static constexpr int kWeightBytes = kStageSteps * kStepWeightBytes;
  static constexpr int kStageBytes = kWeightBytes + kStageSteps * kRows * 32;

  // What is said about a piece, the product of one matrix and one part: see MoePiece. Two stages a
  // piece at least, so four pieces are enough while no more than six stages are under way.
  static constexpr int kPieces = 4;
  static constexpr int kPieceBytes = 32 + 2 * 256 + 4 * kRows;
  static constexpr int kRoomBytes =
      gemm_room_bytes(Room::kLarge, kRows) - kSumBytes - kPieces * kPieceBytes - 128;
  static constexpr int kFit = kRoomBytes / kStageBytes;
  static constexpr int kStages = kFit < 6 ? kFit : 6;
  static constexpr int kRingBytes = kStages * kStageBytes;
  // Ring, sums, pieces, barriers of full stages, of empty ones.
  static constexpr int kSharedBytes =
      kRingBytes + kSumBytes + kPieces * kPieceBytes + 2 * kStages * 8;
  static_assert(kStages >= 3 && kStageBytes % 128 == 0 && kPieceBytes % 16 == 0);

  static __device__ __forceinline__ void block_barrier() { named_barrier<1, kThreads>(); }
};

// In shared memory, for whoever multiplies and finishes a piece.
struct alignas(16) MoePiece {
  int strip;
  int first, tiles;       // the part, in tiles of rows
  int rows;               // of the part that are there
  int reserved[4];
  uint16_t svh[128];      // of the strip
  uint16_t next_suh[128]; // up alone
  int row_pair[kMoePartRows];  // down alone
};

}  // namespace exl3
