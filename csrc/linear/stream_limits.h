// Sizes of the streaming product that plan and launch must agree on. Plain C++.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/partition.cuh"

namespace exl3 {

inline constexpr int kStreamRows = 8;    // most rows of a call
inline constexpr int kStreamWarps = 16;  // of a thread block; one block a multiprocessor

// Bytes of shared memory for the rings of all warps. The rest is for activations, and what few rows
// leave free is better spent on a deeper ring.
constexpr int stream_ring_limit(int kept_rows) { return (kept_rows <= 2 ? 192 : 96) * 1024; }

// Rows of activations that are kept in shared memory.
constexpr int stream_kept_rows(int64_t m) { return m <= 1 ? 1 : m <= 2 ? 2 : m <= 4 ? 4 : 8; }

// Bytes of one block of 128 inputs there.
constexpr int stream_block_bytes(int kept_rows) { return kept_rows * 256; }

// Blocks of 128 inputs that a position needs at most: those of its range, or all.
constexpr int64_t stream_input_blocks(int64_t k, int64_t strips, int64_t positions) {
  const int64_t most_units = (strips * (k / 16) + positions - 1) / positions;
  return std::min(k / 128, (most_units + 7) / 8 + 1);
}

// Whether shared memory has room for the activations.
constexpr bool stream_fits(int64_t m, int64_t k, int64_t strips, int64_t positions,
                           int64_t shared_bytes) {
  if (m < 1 || m > kStreamRows || positions < 1) return false;
  const int kept = stream_kept_rows(m);
  return stream_ring_limit(kept) +
             stream_input_blocks(k, strips, positions) * stream_block_bytes(kept) <=
         shared_bytes;
}

// How the steps of a part, which lies in one shard, are dealt to the warps of its position.
EXL3_HOST_DEVICE constexpr EvenSplit stream_shares(UnitRange part) {
  return EvenSplit::of(part.end - part.begin, kStreamWarps);
}

}  // namespace exl3
