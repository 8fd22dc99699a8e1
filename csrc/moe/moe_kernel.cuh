// The grouped product: tiles of rows of different experts times their matrices.
//
// As gemm_kernel: the same ring, decoder, main loop and sums over groups. What differs is where
// work comes from (the lists of plan, read from memory) and what is done with a finished block of
// outputs. For gate and up it is one item of twice the steps: the sums of gate are set aside, and
// where both are complete the epilogue makes the image of down from them.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/hadamard.cuh"
#include "linear/gemm_kernel.cuh"
#include "moe/moe_fetch.cuh"
#include "moe/moe_multiply.cuh"
#include "moe/moe_routing.cuh"

namespace exl3 {

// Registers that hold the sums of gate while up is multiplied; taller tiles have none to spare and
// set them aside in memory.
template <class C>
inline constexpr bool kKeepGate = C::kRows == 8;

// Sums in the rotated basis, already transformed, to outputs, in place.
template <class C>
__device__ __forceinline__ void scale_row(const MoeGemmParams& p, const float* block_sums,
                                          int64_t padded_row, float4 scales, int lane,
                                          float (&z)[4]) {
  float scale = kHadamardScale, offset = 0.0f;
  if constexpr (C::kForm == Form::kFast && C::kFamily == Family::kByteSum) {
    const int blocks = p.k / 128;
    const float* sums = block_sums + padded_row * blocks;
    float total = 0.0f;
    for (int b = lane; b < blocks; b += 32) total += __ldcg(sums + b);
    offset = warp_sum(total) * (CodebookMul1::kOffset * CodebookMul1::kUnit) * kRootOf128;
    scale *= CodebookMul1::kSlope * CodebookMul1::kUnit * 16777216.0f;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) z[j] *= scale;
  if (lane == 0) z[0] += offset;
  z[0] *= scales.x, z[1] *= scales.y, z[2] *= scales.z, z[3] *= scales.w;
}

template <class C>
__device__ __forceinline__ void store_partials(float* partials, int position,
                                               const float (&z)[C::kWarpRows][4], int warp,
                                               int lane, int rows) {
#pragma unroll
  for (int i = 0; i < C::kWarpRows; ++i) {
    const int row = warp + C::kWarps * i;
    if (row >= rows) continue;
    float* to = partials + (int64_t{position} * C::kRows + row) * 128 + 4 * lane;
    *reinterpret_cast<float4*>(to) = make_float4(z[i][0], z[i][1], z[i][2], z[i][3]);
  }
}

// Tiles whose image of down is put together in shared memory first, in place of the sums: a row's
// part of it is single words far apart. It does not fit in for the tallest, and tiles of 16 rows
// have no registers for it.
template <class C>
inline constexpr bool kStageImage = C::kRows == 32 || C::kRows == 64;

// Gate and up of a finished item to the image of down.
template <class C>
__device__ __forceinline__ void store_pair(const MoeGemmParams& p, const MoeItem& item, float* sums,
                                           float (&gate)[C::kWarpRows][4],
                                           float (&up)[C::kWarpRows][4], int warp, int lane) {
  // Steps of the image are so far apart there that the lanes of a warp meet different banks.
  constexpr int kStepWords = C::kRows * 8, kStepStride = kStepWords + 4;
  static_assert(!kStageImage<C> || 8 * kStepStride * 4 <= C::kSumBytes);
  auto* stage = reinterpret_cast<uint32_t*>(sums);
  if constexpr (kStageImage<C>) __syncthreads();
  const int64_t column = int64_t{item.strip} * 128 + 4 * lane;
  const int64_t scales = item.expert * p.svh_stride + column;
  const float4 gate_scales = load_scales(p.svh[0] + scales);
  const float4 up_scales = load_scales(p.svh[1] + scales);
  const float4 suh = load_scales(p.next_suh + int64_t{item.expert} * p.strips * 128 + column);
  uint8_t* image = p.next_image + item.tile * p.next_tile_bytes;
#pragma unroll
  for (int i = 0; i < C::kWarpRows; ++i) {
    const int row = warp + C::kWarps * i;
    const int64_t padded_row = int64_t{item.tile} * C::kRows + row;
    float v[4] = {};
    if (row < item.rows) {
      float both[2][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) both[0][j] = gate[i][j], both[1][j] = up[i][j];
      hadamard_128(both, lane);
      scale_row<C>(p, p.block_sums[0], padded_row, gate_scales, lane, both[0]);
      scale_row<C>(p, p.block_sums[1], padded_row, up_scales, lane, both[1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int channel = static_cast<int>(column) + j;
        const bool counts = channel >= p.inner_begin && channel < p.inner_end;
        v[j] = counts ? gated(p.slope, p.cubic, p.beta, p.limit, both[0][j], both[1][j]) : 0.0f;
      }
      to_down_input(suh, lane, v);
    }
    // Rows that are not there become zeros, so that nothing reads what nobody wrote.
    const float sum = kStageImage<C>
                          ? store_words(stage + lane / 4 * kStepStride, C::kRows, row, lane, v)
                          : store_image(image, C::kRows, item.strip, row, lane, v);
    if (p.next_sums != nullptr) {
      const float whole = warp_sum(sum);
      if (lane == 0) p.next_sums[padded_row * p.strips + item.strip] = whole;
    }
  }
  if constexpr (kStageImage<C>) {
    __syncthreads();
    constexpr int kFours = kStepWords / 4;
    auto* to = reinterpret_cast<uint4*>(image) + int64_t{item.strip} * 8 * kFours;
#pragma unroll 1
    for (int i = threadIdx.x; i < 8 * kFours; i += C::kThreads) {
      to[i] = *reinterpret_cast<const uint4*>(stage + i / kFours * kStepStride + i % kFours * 4);
    }
  }
}

// A finished item to fp32 rows.
template <class C>
__device__ __forceinline__ void store_rows(const MoeGemmParams& p, const MoeItem& item,
                                           float (&z)[C::kWarpRows][4], int warp, int lane) {
  const int64_t column = int64_t{item.strip} * 128 + 4 * lane;
  const float4 scales = load_scales(p.svh[0] + item.expert * p.svh_stride + column);
#pragma unroll
  for (int i = 0; i < C::kWarpRows; ++i) {
    const int row = warp + C::kWarps * i;
    if (row >= item.rows) continue;
    const int64_t padded_row = int64_t{item.tile} * C::kRows + row;
    const int64_t place = p.out_by_pair ? __ldcg(p.row_pair + padded_row) : padded_row;
    hadamard_128(z[i], lane);
    scale_row<C>(p, p.block_sums[0], padded_row, scales, lane, z[i]);
    *reinterpret_cast<float4*>(p.out + place * p.out_stride + column) =
        make_float4(z[i][0], z[i][1], z[i][2], z[i][3]);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, EXL3_GEMM_BLOCKS(C::kRows))
    moe_gemm_kernel(const __grid_constant__ MoeGemmParams p) {
  if constexpr (!kLaunchedHere<C>) return;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = warp / C::kGroupWarps, part = warp % C::kGroupWarps;
  uint8_t* ring = shared + group * C::kStages * C::kStageBytes;
  float* sums = reinterpret_cast<float*>(shared + C::kGroups * C::kStages * C::kStageBytes);

  // What plan wrote is there: gather lets this kernel start only once plan is done.
  release_dependents();
  const MoeUnits units = MoeUnits::of<C>(p);
  const int position = units.positions() - 1 - static_cast<int>(blockIdx.x);
  if (position < 0) {
    await_predecessors();
    return;
  }
  const UnitRange range{units.begin(position), units.end(position)};
  const int steps_of_matrix = p.k / 16;

  const uint32_t fetch_to = shared_address(ring) + C::fetching_bytes();
  MoeFetcher<C> fetcher(p, range);
  // Weights depend on no kernel before, so the ring fills with them while the others still run;
  // rows follow once they are there. One loop for both: code that runs once costs by the
  // instruction.
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 1) {
      await_predecessors();
      fetcher.restart(range.begin);
    }
#pragma unroll 1
    for (int i = 0; i < C::kStages - 1; ++i) {
      if (fetcher.ready()) {
        const uint32_t to = fetch_to + i * C::kStageBytes;
        if (pass == 0) {
          fetcher.fetch_weights(to);
        } else {
          fetcher.fetch_rows(to);
        }
        fetcher.advance();
      }
      if (pass == 1) copy_async_commit();
    }
  }

  const LaneState<C> state(lane, part);
  int slot = 0;
  Accumulators<C> acc;
  [[maybe_unused]] float kept_gate[kKeepGate<C> ? C::kWarpRows : 1][4];

#pragma unroll 1
  for (int begin = range.begin; begin < range.end;) {
    // One piece: the steps of one matrix that this block has of one item.
    const int piece = p.by_steps.divide(begin);
    const int end = min(range.end, (piece + 1) * steps_of_matrix);
    const int item_index = p.pair ? piece >> 1 : piece;
    const int item_begin = item_index * units.item_steps;
    const int item_end = item_begin + units.item_steps;
    clear_accumulators<C>(acc);

    // Only the tallest tile is worth asking how full it is.
    int present = 0;
    if constexpr (C::kRows == 128) present = moe_item<C>(p, item_index).rows;
    const UnitRange share = share_of_group<C>(begin, end, group);
#pragma unroll 1
    for (int done = share.begin; done < share.end; done += C::kStageSteps) {
      copy_async_wait<C::kStages - 2>();
      group_barrier<C>(group);
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
      } else if constexpr (C::kRows == 128) {
        multiply_present<C>(state, p.constants, weights, rows, lane, steps, present, acc);
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
    const int most_steps = (end - begin + C::kGroups - 1) / C::kGroups;
    if (C::kGroupWarps > 1 && stages_of<C>(most_steps) > stages_of<C>(share.end - share.begin)) {
      group_barrier<C>(group);  // for the race checker alone, as in gemm_kernel
    }

    // Looked up only now: the main loop has no registers for it.
    const MoeItem item = moe_item<C>(p, item_index);
    float z[C::kWarpRows][4] = {};
    sum_groups<C>(sums, acc, z, item.rows, warp, lane);

    // Partial sums of single products and of gate, of up, and what owners set aside of gate.
    const int64_t half = int64_t{p.positions} * (C::kRows * 128);
    float *const partials = p.partials, *const aside = p.partials + 2 * half;
    // Where this block begins within the item: it may have steps of gate, of up or of both.
    const int own_begin = max(range.begin, item_begin), middle = item_begin + steps_of_matrix;
    const bool owner = own_begin == item_begin;
    if (p.pair && (piece & 1) == 0) {
      if constexpr (kKeepGate<C>) {
#pragma unroll
        for (int i = 0; i < C::kWarpRows; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) kept_gate[i][j] = z[i][j];
        }
      } else {
        store_partials<C>(owner ? aside : partials, position, z, warp, lane, item.rows);
      }
      if (end < range.end) {
        begin = end;  // the steps of up follow in this block
        continue;
      }
#pragma unroll
      for (int i = 0; i < C::kWarpRows; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) z[i][j] = 0.0f;
      }
    }
    if (!owner) {
      if constexpr (kKeepGate<C>) {
        if (p.pair && own_begin < middle) {
          store_partials<C>(partials, position, kept_gate, warp, lane, item.rows);
        }
      }
      if (!p.pair || end > middle) {
        store_partials<C>(p.pair ? partials + half : partials, position, z, warp, lane, item.rows);
      }
      // The barrier puts every thread's stores before the release, which is at device scope.
      __syncthreads();
      if (threadIdx.x == 0) publish_flag(p.flags + position);
      begin = end;
      continue;
    }

    int last = position;
    if (end < item_end) {
      last = units.owner_of(item_end - 1);
      for (int other = position + 1 + threadIdx.x; other <= last; other += C::kThreads) {
        await_flag(p.flags + other);
      }
      __syncthreads();
    }
    if (p.pair) {
      float gate[C::kWarpRows][4];
#pragma unroll
      for (int i = 0; i < C::kWarpRows; ++i) {
        if constexpr (kKeepGate<C>) {
#pragma unroll
          for (int j = 0; j < 4; ++j) gate[i][j] = kept_gate[i][j];
        } else {
          // This thread's own stores.
          const int row = warp + C::kWarps * i;
          float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (row < item.rows) {
            v = *reinterpret_cast<const float4*>(
                aside + (int64_t{position} * C::kRows + row) * 128 + 4 * lane);
          }
          gate[i][0] = v.x, gate[i][1] = v.y, gate[i][2] = v.z, gate[i][3] = v.w;
        }
      }
      if (last > position) {
        // The position that has the middle inside has steps of both.
        const int middle_owner = units.owner_of(middle);
        const int last_gate =
            end >= middle ? position : middle_owner - (units.begin(middle_owner) == middle ? 1 : 0);
        const int first_up = max(position + 1, middle_owner);
        add_partials<C>(partials, gate, position + 1, last_gate, warp, lane, item.rows);
        add_partials<C>(partials + half, z, first_up, last, warp, lane, item.rows);
      }
      store_pair<C>(p, item, sums, gate, z, warp, lane);
    } else {
      if (last > position) add_partials<C>(partials, z, position + 1, last, warp, lane, item.rows);
      store_rows<C>(p, item, z, warp, lane);
    }
    begin = end;
  }
}

}  // namespace exl3
