// What follows the main loop: sums over groups and positions.
#pragma once

#include <cstdint>

#include "linear/gemm_config.cuh"
#include "linear/gemm_multiply.cuh"

namespace exl3 {

// Accumulators of a chunk of rows to shared memory: sums[group][row][channel].
template <class C, int chunk>
__device__ __forceinline__ void spread_sums(float* sums, const Accumulators<C>& acc, int group,
                                            int part, int lane) {
#pragma unroll
  for (int t = 0; t < C::kWarpTiles; ++t) {
    const int channel = tile_of_lane<C>(part, lane, t) * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      if (8 * r + 7 < chunk || 8 * r >= chunk + C::kChunkRows) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * r + 2 * (lane % 4) + i % 2 - chunk;
        if (C::kChunkRows >= 8 || (row >= 0 && row < C::kChunkRows)) {
          sums[(group * C::kChunkRows + row) * C::kRowStride + channel + 8 * (i / 2)] =
              acc[t][r][i];
        }
      }
    }
  }
}

// z[i] = sums over the groups, in their order, of row warp + kWarps * i, channels 4 * lane to 4 *
// lane + 3; of the rows of one chunk.
template <class C, int chunk>
__device__ __forceinline__ void collect_sums(const float* sums, float (&z)[C::kWarpRows][4],
                                             int warp, int lane) {
#pragma unroll
  for (int i = 0; i < C::kWarpRows; ++i) {
    // Chunks of four rows, which only the highest rates have, fill half of the warps each.
    const int row = C::kChunkRows < 8 ? warp - chunk % 8 : warp + C::kWarps * i - chunk;
    if (C::kWarps * (i + 1) <= chunk || C::kWarps * i >= chunk + C::kChunkRows) continue;
    if (C::kChunkRows < 8 && (row < 0 || row >= C::kChunkRows)) continue;
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      const float4 v = *reinterpret_cast<const float4*>(
          sums + (g * C::kChunkRows + row) * C::kRowStride + 4 * lane);
      z[i][0] = g == 0 ? v.x : z[i][0] + v.x, z[i][1] = g == 0 ? v.y : z[i][1] + v.y;
      z[i][2] = g == 0 ? v.z : z[i][2] + v.z, z[i][3] = g == 0 ? v.w : z[i][3] + v.w;
    }
  }
}

// The sums of the groups, which meet in shared memory a chunk of rows at a time; afterwards a warp
// has whole rows. `rows`: those there are.
template <class C>
__device__ __forceinline__ void sum_groups(float* sums, const Accumulators<C>& acc,
                                           float (&z)[C::kWarpRows][4], int rows, int warp,
                                           int lane) {
  const int group = warp / C::kGroupWarps, part = warp % C::kGroupWarps;
  for_constant<C::kRows / C::kChunkRows>([&](auto index) {
    constexpr int kChunk = decltype(index)::value * C::kChunkRows;
    if (kChunk >= rows) return;
    C::block_barrier();
    spread_sums<C, kChunk>(sums, acc, group, part, lane);
    C::block_barrier();
    collect_sums<C, kChunk>(sums, z, warp, lane);
  });
}

// Adds the partial sums of positions first to last. At least eight loads are under way at a time,
// because each takes the better part of a microsecond.
template <class C>
__device__ __forceinline__ void add_partials(const float* partials, float (&z)[C::kWarpRows][4],
                                             int first, int last, int warp, int lane,
                                             int rows_left) {
  constexpr int kBatch = C::kWarpRows >= 8 ? 1 : 8 / C::kWarpRows;
#pragma unroll 1
  for (int other = first; other <= last; other += kBatch) {
    float4 v[kBatch][C::kWarpRows];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
#pragma unroll
      for (int i = 0; i < C::kWarpRows; ++i) {
        v[j][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (other + j <= last && warp + C::kWarps * i < rows_left) {
          v[j][i] = __ldcg(reinterpret_cast<const float4*>(
              partials + (int64_t{other + j} * C::kRows + warp + C::kWarps * i) * 128 + 4 * lane));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
#pragma unroll
      for (int i = 0; i < C::kWarpRows; ++i) {
        z[i][0] += v[j][i].x, z[i][1] += v[j][i].y, z[i][2] += v[j][i].z, z[i][3] += v[j][i].w;
      }
    }
  }
}

}  // namespace exl3
