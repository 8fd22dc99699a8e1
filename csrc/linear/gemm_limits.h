// How many thread blocks of the product a multiprocessor holds. Plain C++, for plan and launch.
#pragma once

#include <cstdint>

namespace exl3 {

// Thread blocks of a multiprocessor that the registers allow at this tile height.
constexpr int gemm_blocks_of_sm(int rows) { return rows <= 64 ? 2 : 1; }

// The same where shared memory decides as well: below 160 KB there is room for one.
constexpr int gemm_blocks_of_sm(int rows, int64_t shared_bytes) {
  return shared_bytes < 160 * 1024 ? 1 : gemm_blocks_of_sm(rows);
}

}  // namespace exl3
