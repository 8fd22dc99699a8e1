// Sizes of the product that plan and launch must agree on: thread blocks, images, partial sums.
// Plain C++.
#pragma once

#include <cstdint>

namespace exl3 {

// Warps of a thread block at a tile height. Where the accumulators leave room, sixteen: they hide
// the latencies of decoding, and one block a multiprocessor means fewer partial sums than two.
constexpr int gemm_warps(int rows) { return rows == 32 || rows == 64 ? 16 : 8; }

// The one tile height with fast forms: their second product a tile costs more than it saves above.
inline constexpr int kFastRows = 8;

// Thread blocks of a multiprocessor that the registers allow.
constexpr int gemm_blocks_of_sm(int rows) { return rows <= 16 ? 2 : 1; }

// The same where shared memory decides as well: below 200 KB there is room for one.
constexpr int gemm_blocks_of_sm(int rows, int64_t shared_bytes) {
  return shared_bytes < 200 * 1024 ? 1 : gemm_blocks_of_sm(rows);
}

// Bytes of the image of one row tile: fp16 activations in the order of B fragments,
// [k / 16][rows / 8 in pairs][lane][registers].
constexpr int64_t image_bytes(int64_t k, int rows) { return k * rows * 2; }

// fp32 partial sums that one thread block may publish: [rows][128].
constexpr int64_t partial_bytes(int rows) { return int64_t{rows} * 128 * 4; }

}  // namespace exl3
