// Sizes of the product for one row that plan and launch must agree on. Plain C++.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/partition.cuh"

namespace exl3 {

inline constexpr int kStreamWarps = 16;  // of a thread block; one block a multiprocessor

// Bytes of shared memory for the rings of all warps. The rest holds the activations.
inline constexpr int kStreamRingBytes = 128 * 1024;
inline constexpr int kStreamBlockBytes = 256;  // of 128 activations

// Blocks of 128 inputs that a position needs at most: those of its range, or all.
constexpr int64_t stream_input_blocks(int64_t k, int64_t strips, int64_t positions) {
  const int64_t most_units = (strips * (k / 16) + positions - 1) / positions;
  return std::min(k / 128, (most_units + 7) / 8 + 1);
}

// Positions for so many strips: as many as there are multiprocessors, or up to 5 % fewer where then
// no position has parts of two strips, or all have the same whole ones.
constexpr int stream_positions(int multiprocessors, int64_t strips) {
  for (int p = multiprocessors; strips > 0 && 100 * p >= 95 * multiprocessors; --p) {
    if (p % strips == 0 || strips % p == 0) return p;
  }
  return multiprocessors;
}

inline constexpr int kStreamMeetBytes = 128;  // what the kernel declares itself, at most

// Whether shared memory has room for the activations.
constexpr bool stream_fits(int64_t k, int64_t strips, int64_t positions, int64_t shared_bytes) {
  if (positions < 1) return false;
  const int64_t inputs = stream_input_blocks(k, strips, positions) * kStreamBlockBytes;
  return kStreamRingBytes + kStreamMeetBytes + inputs <= shared_bytes;
}

// How the steps of a part, which lies in one shard, are dealt to the warps of its position.
EXL3_HOST_DEVICE constexpr EvenSplit stream_shares(UnitRange part) {
  return EvenSplit::of(part.end - part.begin, kStreamWarps);
}

}  // namespace exl3
