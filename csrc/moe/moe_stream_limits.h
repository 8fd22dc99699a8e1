// Sizes of the route for few tokens that choice, launch and kernels must agree on. Plain C++.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear/stream_limits.h"

namespace exl3 {

inline constexpr int kMoeStreamPairs = 64;  // (token, slot) of one call; more go in several
inline constexpr int kMoeStreamRows = 4;    // of a tile: 1, 2 or 4
// Parts that a strip may fall into: adding them up takes time as well.
inline constexpr int kMoeStreamParts = 12;
// Bytes of shared memory of a product for its routing and the progress of its warps.
inline constexpr int kMoeRouteBytes = 2048;

// Inputs of one row of a tile, padded so that the rows of a fragment lie in different banks.
constexpr int moe_stream_row_bytes(int64_t k) { return static_cast<int>(k * 2 + 32); }

// The least k16 steps of a thread block: one for each warp, and not too many parts a strip.
constexpr int moe_stream_least(int64_t steps) {
  return static_cast<int>(
      std::max<int64_t>(kStreamWarps, (steps + kMoeStreamParts - 1) / kMoeStreamParts));
}

// The most segments (a matrix of a tile) that the range of a block can touch.
constexpr int64_t moe_stream_segments(int64_t most_segments, int64_t strips, int64_t steps,
                                      int64_t positions) {
  const int64_t units = strips * steps;
  const int64_t share = std::max<int64_t>((most_segments * units + positions - 1) / positions,
                                          moe_stream_least(steps));
  return std::min(most_segments, (share + units - 2) / units + 1);
}

// Shared memory of a product beyond the rings: the inputs of its segments.
constexpr int64_t moe_stream_input_bytes(int64_t most_tiles, int64_t halves, int64_t k,
                                         int64_t strips, int64_t positions, int rows) {
  return moe_stream_segments(most_tiles * halves, strips, k / 16, positions) * rows *
         moe_stream_row_bytes(k);
}

}  // namespace exl3
