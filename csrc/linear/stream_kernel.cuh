// out = H(image * W) in one pass over the weight, for up to eight rows: the product itself.
//
// A position (thread block) takes an even, contiguous range of the k16 steps of all strips, and its
// warps take even, contiguous shares of that: no warp waits for another between the transform of
// the activations and the end of its share, and no position waits for another at all. What they
// leave is added up by the finishing kernel:
//
//   partials[p + s]  the sum of the warps of position p whose share ends in strip s,
//   ends[s]          what a warp found of strip s whose share goes on into the next strip.
//
// Ranges that cross from one shard of a fused layer to the next are done in two parts, because the
// activations are scaled by another suh there.
#pragma once

#include <cstdint>

#include "device/instructions.cuh"
#include "device/partition.cuh"
#include "linear/gemm_multiply.cuh"
#include "linear/output.cuh"
#include "linear/stream_config.cuh"
#include "linear/stream_input.cuh"

namespace exl3 {

// Fetches the steps of one warp into its ring, stage by stage.
template <class C>
struct StreamFetcher {
  const uint8_t* from;  // with the lane's offset
  int left;             // steps

  // `stage` is the shared address of the slot plus the lane's offset.
  __device__ __forceinline__ void fetch(uint32_t stage, int lane) {
    const uint64_t policy = evict_first_policy();  // each weight is read once
    if (left >= C::kStageSteps && C::kStageBytes % 512 == 0) {
#pragma unroll
      for (int i = 0; i < C::kStageBytes; i += 512) copy_async_16(stage + i, from + i, policy);
    } else {
      const int bytes = min(left, C::kStageSteps) * C::kStepWeightBytes - 16 * lane;
#pragma unroll
      for (int i = 0; i < C::kStageBytes; i += 512) {
        if (i < bytes) copy_async_16(stage + i, from + i, policy);
      }
    }
    copy_async_commit();
    from += C::kStageBytes;
    left -= C::kStageSteps;
  }
};

// The sums of a warp as fp32 [row][channel], `stride` floats a row.
template <class C>
__device__ __forceinline__ void store_sums(const Accumulators<C>& acc, const float (&inputs)[4],
                                           float* to, int stride, int m, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * (lane % 4) + i;
    if (row >= m) continue;
#pragma unroll
    for (int t = 0; t < C::kWarpTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float z = acc[t][0][2 * half + i];
        if constexpr (C::kSumsInputs) {
          // sum_k (slope * s + offset) x, where the byte sums s were read as subnormals.
          constexpr float kSlope = CodebookMul1::kSlope * CodebookMul1::kUnit * 16777216.0f;
          z = z * kSlope + inputs[i] * (CodebookMul1::kOffset * CodebookMul1::kUnit);
        }
        to[row * stride + 16 * t + 8 * half + lane / 4] = z;
      }
    }
  }
}

// Adds the inputs of a k16 step, row by row as the accumulators have them: the product with a tile
// of ones.
__device__ __forceinline__ void add_inputs(const uint32_t (&x)[1][2], float (&sums)[4]) {
  const uint32_t ones[4] = {0x3C003C00u, 0x3C003C00u, 0x3C003C00u, 0x3C003C00u};
  mma_m16n8k16(sums, ones, x[0][0], x[0][1]);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    stream_kernel(const __grid_constant__ StreamParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t* ring = shared + warp * C::kRingBytes;
  uint8_t* inputs = shared + C::kWarps * C::kRingBytes;
  const int position = blockIdx.x;
  const int strip_steps = p.k / 16;
  const UnitRange range = p.split.range(position);
  release_dependents();

  const LaneState<C> state(lane, 0);
  const uint32_t fetch_to = shared_address(ring) + 16 * lane;
  // Of the rows kept, which the lane's column of the product reads; the others repeat them.
  const int row_offset = (lane / 4 % p.kept_rows) * 32 + lane % 4 * 8;
  const int step_bytes = p.kept_rows * 32;

#pragma unroll 1
  for (int begin = range.begin; begin < range.end;) {
    const StreamShard& shard = shard_of_strip(p, begin / strip_steps);
    const int shard_begin = shard.columns.strip_begin * strip_steps;
    const int end = min(range.end, shard_end_strip(p, shard) * strip_steps);
    const EvenSplit shares = stream_shares({begin, end});
    const UnitRange of_part = shares.range(warp);
    const UnitRange share{begin + of_part.begin, begin + of_part.end};
    StreamFetcher<C> fetcher{
        shard.weights + int64_t{share.begin - shard_begin} * C::kStepWeightBytes + 16 * lane,
        share.end - share.begin};
    // Inputs of the range, or all of them where the range has more.
    const int blocks = p.k / 128;
    const int first_block = begin / 8, range_blocks = (end + 7) / 8 - first_block;
    const bool all = range_blocks > blocks;
    const int from_block = all ? 0 : first_block % blocks;
    const int input_blocks = all ? blocks : range_blocks;
    prefetch_scales(p, shard, from_block, input_blocks);
    // Weights depend on no other kernel, so the ring starts to fill before the activations exist.
#pragma unroll 1
    for (int i = 0; i < kEarlyStages; ++i) fetcher.fetch(fetch_to + i * C::kStageBytes, lane);
    if (begin == range.begin) await_predecessors();

    transform_inputs(p, shard, from_block, input_blocks, inputs, warp, lane);
#pragma unroll 1
    for (int i = kEarlyStages; i < C::kStages - 1; ++i) {
      fetcher.fetch(fetch_to + i * C::kStageBytes, lane);
    }
    __syncthreads();

    Accumulators<C> acc;
    float sums[1][4];  // of the inputs
    const auto clear = [&] {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[0][i] = 0.0f;
#pragma unroll
        for (int t = 0; t < C::kWarpTiles; ++t) acc[t][0][i] = 0.0f;
      }
    };
    clear();
    int strip = share.begin / strip_steps;
    int slot = 0;
    const uint8_t* rows =
        inputs + (all ? share.begin - strip * strip_steps : share.begin - 8 * first_block) *
                     step_bytes + row_offset;
#pragma unroll 1
    for (int unit = share.begin; unit < share.end;) {
      copy_async_wait<C::kStages - 2>();
      __syncwarp();
      const uint8_t* weights = ring + slot * C::kStageBytes;
      int left = min(C::kStageSteps, share.end - unit);
#pragma unroll 1
      while (true) {
        const int steps = min(left, (strip + 1) * strip_steps - unit);
        int done = 0;
#pragma unroll 1
        for (; done + 2 <= steps; done += 2) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            RowFragments<C> x;
            const uint2 v = *reinterpret_cast<const uint2*>(rows + i * step_bytes);
            x[0][0] = v.x, x[0][1] = v.y;
            multiply_step<C>(state, p.constants, weights + i * C::kStepWeightBytes, x, acc);
            if constexpr (C::kSumsInputs) add_inputs(x, sums[0]);
          }
          weights += 2 * C::kStepWeightBytes;
          rows += 2 * step_bytes;
        }
        if (done < steps) {
          RowFragments<C> x;
          const uint2 v = *reinterpret_cast<const uint2*>(rows);
          x[0][0] = v.x, x[0][1] = v.y;
          multiply_step<C>(state, p.constants, weights, x, acc);
          if constexpr (C::kSumsInputs) add_inputs(x, sums[0]);
          weights += C::kStepWeightBytes;
          rows += step_bytes;
        }
        unit += steps;
        left -= steps;
        if (unit < (strip + 1) * strip_steps || unit == share.end) break;
        store_sums<C>(acc, sums[0], p.ends + int64_t{strip} * p.m * 128, 128, p.m, lane);
        clear();
        ++strip;
        if (all) rows = inputs + row_offset;
        if (left == 0) break;
      }
      __syncwarp();
      fetcher.fetch(fetch_to + (slot == 0 ? C::kStages - 1 : slot - 1) * C::kStageBytes, lane);
      slot = slot + 1 == C::kStages ? 0 : slot + 1;
    }

    // The sums of the warps meet in shared memory, in place of the ring.
    copy_async_wait<0>();
    __syncthreads();
    float* meet = reinterpret_cast<float*>(shared);
    store_sums<C>(acc, sums[0], meet + warp * C::kRows * C::kRowStride, C::kRowStride, p.m, lane);
    __syncthreads();
    const UnitRange of_lane = shares.range(min(lane, C::kWarps - 1));
    const int last_strip = lane < C::kWarps && of_lane.begin < of_lane.end
                               ? (begin + of_lane.end - 1) / strip_steps
                               : -1;
    const int first_strip = begin / strip_steps;
    const int items = ((end - 1) / strip_steps - first_strip + 1) * p.m;
#pragma unroll 1
    for (int item = warp; item < items; item += C::kWarps) {
      const int of_strip = first_strip + item / p.m, row = item % p.m;
      const uint32_t warps = __ballot_sync(0xFFFFFFFFu, last_strip == of_strip);
      float4 z = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) {
        if ((warps >> w & 1) == 0) continue;
        const float4 v = *reinterpret_cast<const float4*>(
            meet + (w * C::kRows + row) * C::kRowStride + 4 * lane);
        z.x += v.x, z.y += v.y, z.z += v.z, z.w += v.w;
      }
      *reinterpret_cast<float4*>(
          p.partials + ((int64_t{position} + of_strip) * p.m + row) * 128 + 4 * lane) = z;
    }
    begin = end;
    if (begin < range.end) __syncthreads();
  }
}

}  // namespace exl3
