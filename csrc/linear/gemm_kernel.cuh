// out = diag-scaled Hadamard of (image * W), for 8 to 128 rows a tile: `stream` and `tile` in one.
// On sm_90 tall_kernel.cuh takes the tiles of 32 rows and more.
//
// A strip (128 output channels, one Hadamard block) is the M side of mma.m16n8k16, the rows of the
// batch are its N side. The warps of a block form groups; a group covers the 128 channels of a
// strip, and the groups split the k16 steps of the block's range evenly. With few rows a group is
// one warp and eight groups split k; with many rows four warps share a group's activations. Each
// tile of weights is decoded once in a block, in registers.
//
// Told in execution order: ring, main loop, sum over groups, exchange of partial sums between
// blocks, output transform.
#pragma once

#include <cstdint>

#include "device/hadamard.cuh"
#include "device/instructions.cuh"
#include "device/partition.cuh"
#include "linear/gemm_fetch.cuh"
#include "linear/gemm_multiply.cuh"
#include "linear/gemm_sums.cuh"
#include "linear/output.cuh"

namespace exl3 {

// Registers for two blocks on a multiprocessor only help where its shared memory has room for two.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
#define EXL3_GEMM_BLOCKS(rows) 1
#else
#define EXL3_GEMM_BLOCKS(rows) gemm_blocks_of_sm(rows)
#endif

// Whether the device code being compiled launches an instance; the host decides likewise.
#if defined(__CUDA_ARCH__)
inline constexpr int kArchitectureHere = __CUDA_ARCH__ / 10;
#else
inline constexpr int kArchitectureHere = 0;
#endif
inline constexpr Room kRoomHere = gemm_room(kArchitectureHere);
template <class C>
inline constexpr bool kLaunchedHere =
    C::kRoom == (gemm_gains_from_room(C::kRows) ? kRoomHere : Room::kSmall);

template <class C>
__global__ void __launch_bounds__(C::kThreads, EXL3_GEMM_BLOCKS(C::kRows))
    gemm_kernel(const __grid_constant__ GemmParams p) {
  if constexpr (!kLaunchedHere<C> || tall_runs(kArchitectureHere, C::kRows)) return;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = warp / C::kGroupWarps, part = warp % C::kGroupWarps;
  uint8_t* ring = shared + group * C::kStages * C::kStageBytes;
  float* sums = reinterpret_cast<float*>(shared + C::kGroups * C::kStages * C::kStageBytes);

  // Later positions are started first, because an owner waits for positions after its own.
  const int position = p.positions - 1 - static_cast<int>(blockIdx.x);
  const int row_tile = blockIdx.y;
  const int strip_steps = p.k / 16;
  const int64_t units = int64_t{p.strips} * strip_steps;
  const UnitRange range = unit_range(units, position, p.positions);
  release_dependents();

  const uint32_t fetch_to = shared_address(ring) + C::fetching_bytes();
  Fetcher<C> fetcher(p, range);
  {
    // Weights depend on no other kernel, so the ring starts to fill while the input transform runs.
    Fetcher<C> ahead = fetcher;
#pragma unroll 1
    for (int i = 0; i < C::kEarlyStages && ahead.ready(); ++i, ahead.advance()) {
      ahead.fetch_weights(fetch_to + i * C::kStageBytes);
    }
    await_predecessors();
#pragma unroll 1
    for (int i = 0; i < C::kStages - 1; ++i) {
      if (fetcher.ready()) {
        if (i >= C::kEarlyStages) fetcher.fetch_weights(fetch_to + i * C::kStageBytes);
        fetcher.fetch_rows(fetch_to + i * C::kStageBytes);
        fetcher.advance();
      }
      copy_async_commit();
    }
  }

  const LaneState<C> state(lane, part);
  int slot = 0;
  Accumulators<C> acc;

#pragma unroll 1
  for (int begin = range.begin; begin < range.end;) {
    const int strip = begin / strip_steps;
    const int end = min(range.end, (strip + 1) * strip_steps);
    clear_accumulators<C>(acc);

    const UnitRange share = share_of_group<C>(begin, end, group);
#pragma unroll 1
    for (int done = share.begin; done < share.end; done += C::kStageSteps) {
      copy_async_wait<C::kStages - 2>();
      group_barrier<C>(group);  // all copies are there, and nobody reads the slot before this one
      if (fetcher.ready()) {
        const uint32_t to = fetch_to + (slot == 0 ? C::kStages - 1 : slot - 1) * C::kStageBytes;
        fetcher.fetch_weights(to);
        fetcher.fetch_rows(to);
        fetcher.advance();
      }
      copy_async_commit();
      const uint8_t* weights = ring + slot * C::kStageBytes;
      const uint8_t* rows = weights + C::kWeightBytes;
      int steps = min(share.end - done, C::kStageSteps);
      if constexpr (C::kRows <= 16) {
#pragma unroll 1
        for (; steps >= 2; steps -= 2) {
          multiply_few<C>(state, p.constants, weights, rows, lane, acc);
          multiply_few<C>(state, p.constants, weights + C::kStepWeightBytes,
                          rows + C::kStepRowBytes, lane, acc);
          weights += 2 * C::kStepWeightBytes;
          rows += 2 * C::kStepRowBytes;
        }
        if (steps > 0) multiply_few<C>(state, p.constants, weights, rows, lane, acc);
      } else if (C::kDecodeAhead && steps == C::kStageSteps) {
        multiply_many<C, C::kStageSteps>(state, p.constants, weights, rows, lane, acc);
      } else {
#pragma unroll 1
        for (; steps > 0; --steps) {
          multiply_many<C, 1>(state, p.constants, weights, rows, lane, acc);
          weights += C::kStepWeightBytes;
          rows += C::kStepRowBytes;
        }
      }
      slot = slot + 1 == C::kStages ? 0 : slot + 1;
    }

    // Shares differ by a step at most, so a group may have had one stage less. It waits once more:
    // nothing needs that but the race checker, which counts the barriers a warp has passed.
    const int most_steps = (end - begin + C::kGroups - 1) / C::kGroups;
    if (C::kGroupWarps > 1 && stages_of<C>(most_steps) > stages_of<C>(share.end - share.begin)) {
      group_barrier<C>(group);
    }

    const GemmShard& shard = shard_of_strip(p, strip);
    const int channel = (strip - shard.columns.strip_begin) * 128 + 4 * lane;
    const uint2 raw_scales = __ldg(reinterpret_cast<const uint2*>(shard.columns.svh + channel));
    const bool owner = begin == strip * strip_steps;
    const int strip_end = (strip + 1) * strip_steps;
    const int last = !owner || end == strip_end
                         ? position
                         : last_contributor(units, position, p.positions, strip_end);
    float* partials = p.partials + int64_t{row_tile} * p.positions * (C::kRows * 128);
    uint32_t* flags = p.flags + int64_t{row_tile} * p.positions;
    const int rows_left = p.m - row_tile * C::kRows;
    // Each row is finished by one warp, which adds groups and then positions in their order.
    float z[C::kWarpRows][4];
    sum_groups<C>(sums, acc, z, rows_left, warp, lane);

    if (!owner) {
#pragma unroll
      for (int i = 0; i < C::kWarpRows; ++i) {
        const int row = warp + C::kWarps * i;
        if (row >= rows_left) continue;
        float* to = partials + (int64_t{position} * C::kRows + row) * 128 + 4 * lane;
        *reinterpret_cast<float4*>(to) = make_float4(z[i][0], z[i][1], z[i][2], z[i][3]);
      }
      // The barrier puts every thread's stores before the release, which is at device scope.
      __syncthreads();
      if (threadIdx.x == 0) publish_flag(flags + position);
      begin = end;
      continue;
    }

    if (last > position) {
      for (int other = position + 1 + threadIdx.x; other <= last; other += C::kThreads) {
        await_flag(flags + other);
      }
      __syncthreads();
      add_partials<C>(partials, z, position + 1, last, warp, lane, rows_left);
    }
    const float4 scales = unpack_scales(raw_scales);
    const int64_t first_row = int64_t{row_tile} * C::kRows + warp;
    hadamard_128(z, lane);
#pragma unroll
    for (int i = 0; i < C::kWarpRows; ++i) {
      if (warp + C::kWarps * i >= rows_left) continue;
      float scale = kHadamardScale, offset = 0.0f;
      if constexpr (C::kForm == Form::kFast && C::kFamily == Family::kByteSum) {
        // sum_k (slope * s + offset) x = slope * sum_k s x + offset * sum_k x, and a constant over
        // the channels of a block is an impulse at its first channel after the transform.
        const int blocks = p.k / 128;
        const float* block_sums = shard.block_sums + (first_row + C::kWarps * i) * blocks;
        float total = 0.0f;
        for (int b = lane; b < blocks; b += 32) total += __ldcg(block_sums + b);
#pragma unroll
        for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, d);
        offset = total * (CodebookMul1::kOffset * CodebookMul1::kUnit) * kRootOf128;
        scale *= CodebookMul1::kSlope * CodebookMul1::kUnit * 16777216.0f;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) z[i][j] *= scale;
      if (lane == 0) z[i][0] += offset;
      store_channels(p.out, shard.columns, first_row + C::kWarps * i, channel, scales, z[i]);
    }
    begin = end;
  }
}

}  // namespace exl3
