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

// What a block takes of shared memory. Every card has 99 KB; sm_90 has 227 KB, which some tiles
// make use of: longer stages of the ring, and fewer passes of sums. Same work, same order of
// additions.
enum class Room { kSmall, kLarge };

// What the code of an architecture (10 * major + minor) is compiled for.
constexpr Room gemm_room(int architecture) {
  return architecture == 90 ? Room::kLarge : Room::kSmall;
}

// Tile heights of linear layers that warpgroups multiply (tall_kernel.cuh), in code for sm_90
// alone. The image is in their order then.
constexpr bool tall_runs(Room room, int rows) { return room == Room::kLarge && rows >= 32; }
constexpr bool tall_runs(int architecture, int rows) {
  return tall_runs(gemm_room(architecture), rows);
}

// Tiles of gemm_kernel and of the experts' kernel that were measured to gain from room, by 3 to 5 %
// (docs/kernels-cuda.md); 16 and 64 rows lost.
constexpr bool gemm_gains_from_room(int rows) { return rows == 8 || rows == 32 || rows == 128; }

// Bytes of shared memory for a block, so that as many fit as the registers allow. Of two blocks
// each pays 1 KB that the system keeps.
constexpr int gemm_room_bytes(Room room, int rows) {
  return room == Room::kSmall ? 99 * 1024 : (228 * 1024) / gemm_blocks_of_sm(rows) - 1024;
}

// Bytes of the image of one row tile: fp16 activations in the order of B fragments,
// [k / 16][rows / 8 in pairs][lane][registers].
constexpr int64_t image_bytes(int64_t k, int rows) { return k * rows * 2; }

// Parts of strips that a thread block may publish: with tall tiles its first and its last strip.
constexpr int parts_of_position(int rows) { return rows >= 32 ? 2 : 1; }

// fp32 partial sums of one part: [rows][128].
constexpr int64_t partial_bytes(int rows) { return int64_t{rows} * 128 * 4; }

}  // namespace exl3
