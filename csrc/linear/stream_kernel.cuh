// The product for one row, up to the sums that the finishing kernel adds up and transforms.
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
#include "linear/stream_sums.cuh"

namespace exl3 {

// The sums of a warp as fp32, channel by channel. They are in the first column of the product.
template <class C>
__device__ __forceinline__ void store_sums(const Accumulators<C>& acc, const float (&inputs)[4],
                                           float* to, int lane) {
  if (lane % 4 != 0) return;
#pragma unroll
  for (int t = 0; t < C::kWarpTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      to[16 * t + 8 * half + lane / 4] = whole_sum<C>(acc[t][0][2 * half], inputs[0]);
    }
  }
}

// Adds the inputs of a k16 step, row by row as the accumulators have them: the product with a tile
// of ones.
__device__ __forceinline__ void add_inputs(const uint32_t (&x)[1][2], float (&sums)[4]) {
  const uint32_t ones[4] = {0x3C003C00u, 0x3C003C00u, 0x3C003C00u, 0x3C003C00u};
  mma_m16n8k16(sums, ones, x[0][0], x[0][1]);
}

// Adds the sums of the warps, in their order, strip by strip of the part [begin, end).
template <class C>
__device__ __forceinline__ void add_warps(const StreamParams& p, const float* meet,
                                          EvenSplit shares, int begin, int end) {
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const int strip_steps = p.k / 16;
  const UnitRange of_lane = shares.range(min(lane, C::kWarps - 1));
  const int last_strip = lane < C::kWarps && of_lane.begin < of_lane.end
                             ? (begin + of_lane.end - 1) / strip_steps
                             : -1;
  const int first_strip = begin / strip_steps;
  const int strips = (end - 1) / strip_steps - first_strip + 1;
#pragma unroll 1
  for (int s = warp; s < strips; s += C::kWarps) {
    const uint32_t warps = __ballot_sync(0xFFFFFFFFu, last_strip == first_strip + s);
    const float4 z = sum_of_warps<C::kWarps>(warps, meet + 4 * lane, 128);
    *reinterpret_cast<float4*>(p.partials + (int64_t{blockIdx.x} + first_strip + s) * 128 +
                               4 * lane) = z;
  }
}

// The plan uses it on sm_90 alone, so it is empty elsewhere.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
template <class C, bool kPrepares>
__global__ void stream_kernel(const __grid_constant__ StreamParams p) {}
#else

template <class C, bool kPrepares>
__global__ void __maxnreg__(C::kRegisters) stream_kernel(const __grid_constant__ StreamParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t* ring = shared + warp * C::kRingBytes;
  uint8_t* inputs = shared + C::kWarps * C::kRingBytes;
  float* meet = reinterpret_cast<float*>(shared);
  const int strip_steps = p.k / 16;
  // Read again where it is needed, as are the numbers of the thread: registers are short.
  const auto range = [&] { return p.split.range(block_index()); };
  release_dependents();

  const LaneState<C> state(lane, 0);
  const uint32_t fetch_to = shared_address(ring) + 16 * lane;

#pragma unroll 1
  for (int begin = range().begin; begin < range().end;) {
    const StreamShard& shard = shard_of_strip(p, begin / strip_steps);
    const int shard_begin = shard.columns.strip_begin * strip_steps;
    const int end = min(range().end, shard_end_strip(p, shard) * strip_steps);
    const EvenSplit shares = stream_shares({begin, end});
    const UnitRange of_part = shares.range(warp);
    const UnitRange share{begin + of_part.begin, begin + of_part.end};
    const uint8_t* from =
        shard.weights + int64_t{share.begin - shard_begin} * C::kStepWeightBytes + 16 * lane;
    // Inputs of the range, or all of them where the range has more.
    const int blocks = p.k / 128;
    const int first_block = begin / 8, range_blocks = (end + 7) / 8 - first_block;
    const bool all = range_blocks > blocks;
    const int from_block = all ? 0 : first_block % blocks;
    const int input_blocks = all ? blocks : range_blocks;
    prefetch_scales(p, shard, from_block, input_blocks);
    if constexpr (kPrepares) {
      if (p.prologue.kind == PrologueKind::kNorm) prefetch_norm(p);
    }

    Accumulators<C> acc;
    float input_sums[4];
    int strip = share.begin / strip_steps;
    int unit = share.begin, fetched = share.begin;
    // All columns of the product get the one row; the first is read in the end.
    const uint8_t* x_of_step =
        inputs + lane % 4 * 8 +
        (all ? share.begin - strip * strip_steps : share.begin - 8 * first_block) * 32;
    // Turn by turn a stage is fetched, and the one fetched kStages - 1 turns before is multiplied.
    // There is one place for each thing, because code costs more to fetch once than to run.
    int slot = 0;
#pragma unroll 1
    for (int turn = 0;; ++turn) {
      if (turn == C::kEarlyStages) {
        // Weights depend on no other kernel, so some of them come first; but not all that there is
        // room for, or the activations would wait behind them.
        const bool first_part = begin == range().begin;
        if (first_part) await_predecessors();
        if constexpr (kPrepares) {
          prepare_inputs(p, shard, first_part, from_block, input_blocks, inputs);
        } else {
          transform_inputs(p, shard, from_block, input_blocks, inputs,
                           [&](int at, float (&v)[16]) { load_inputs<16>(p.input, 0, at, v); });
        }
        __syncthreads();
        // They hold nothing yet, and said here they take no registers while the inputs are made.
        clear_sums(acc, input_sums);
      }
      const int bytes = (share.end - fetched) * C::kStepWeightBytes - 16 * (thread_index() % 32);
      const uint32_t to = fetch_to + slot * C::kStageBytes;
#pragma unroll
      for (int i = 0; i < C::kStageBytes; i += 512) {
        if (i < bytes) copy_async_16(to + i, from + i);
      }
      copy_async_commit();
      from += C::kStageBytes;
      fetched += C::kStageSteps;
      slot = slot + 1 == C::kStages ? 0 : slot + 1;
      if (turn < C::kStages - 1) continue;

      copy_async_wait<C::kStages - 1>();
      __syncwarp();
      const uint8_t* weights = ring + slot * C::kStageBytes;
      const int stage_end = min(unit + C::kStageSteps, share.end);
#pragma unroll 1
      while (true) {
        if (unit == min((strip + 1) * strip_steps, share.end)) {
          // The end of a strip or of the share. The last sums of all warps meet in shared memory,
          // in place of the ring.
          const bool last = unit == share.end;
          float* out = p.ends + int64_t{strip} * 128;
          if (last) {
            copy_async_wait<0>();
            __syncthreads();
            out = meet + thread_index() / 32 * 128;
          }
          store_sums<C>(acc, input_sums, out, thread_index() % 32);
          if (last) goto share_done;
          clear_sums(acc, input_sums);
          ++strip;
          if (all) x_of_step = inputs + thread_index() % 4 * 8;
        }
        if (unit == stage_end) break;
        RowFragments<C> x;
        const uint2 v = *reinterpret_cast<const uint2*>(x_of_step);
        x[0][0] = v.x, x[0][1] = v.y;
        multiply_step<C>(state, p.constants, weights, x, acc);
        if constexpr (C::kSumsInputs) add_inputs(x, input_sums);
        weights += C::kStepWeightBytes;
        x_of_step += 32;
        ++unit;
      }
      __syncwarp();
    }
  share_done:
    __syncthreads();
    add_warps<C>(p, meet, shares, begin, end);
    begin = end;
    if (begin < range().end) __syncthreads();
  }
}
#endif

}  // namespace exl3
