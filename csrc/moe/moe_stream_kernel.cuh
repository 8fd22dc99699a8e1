// The products of the route for few tokens, up to the sums that the next kernel adds up: gate and
// up, and down, are one kernel that makes its inputs in two ways.
//
// As linear/stream_kernel.cuh, for several rows and many matrices: a position takes a contiguous
// range of the k16 steps of all strips of all tiles, its warps take contiguous shares of that, also
// across strips and matrices. No warp waits for another between the inputs and the end of its
// share, and no position waits for another at all.
#pragma once

#include <cstdint>

#include "device/instructions.cuh"
#include "linear/gemm_multiply.cuh"
#include "linear/stream_config.cuh"
#include "linear/stream_kernel.cuh"
#include "linear/stream_sums.cuh"
#include "moe/moe_stream_inputs.cuh"

namespace exl3 {

// Where a warp is in its share. In shared memory, because the main loop has no registers for what
// it looks at once a strip.
struct MoeProgress {
  int share_end;
  int strip, unit;             // strip that is multiplied; where it ends in the share
  int rows;                    // of its tile
  int fetch_segment, fetched;  // matrix that is fetched; where it ends in the share

  static __device__ __forceinline__ MoeProgress of(const MoeStreamWork& work, const MoeRoute& route,
                                                   int warp) {
    const int of_warp = MoeShares::of_warp(route.end - route.begin);
    const int begin = min(route.begin + warp * of_warp, route.end);
    const int strip = work.by_steps.divide(begin);
    return {min(begin + of_warp, route.end),  strip - 1, begin, 0,
            work.by_strips.divide(strip) - 1, begin};
  }

  // To the next matrix: where its words begin, in bytes, and how many steps there are.
  template <class C>
  __device__ __forceinline__ int64_t next_matrix(const MoeStreamParams& p, const MoeRoute& route,
                                                 int& steps) {
    const int units = p.work.strips * p.work.steps, segment = fetch_segment + 1, begin = fetched;
    const int end = min((segment + 1) * units, share_end);
    __syncwarp();
    if (thread_index() % 32 == 0) fetch_segment = segment, fetched = end;
    __syncwarp();
    steps = end - begin;
    const bool second = p.work.halves == 2 && (segment & 1) != 0;
    const int64_t expert = route.expert[p.work.tile_of(segment)];
    const int64_t word =
        __ldg(reinterpret_cast<const long long*>((second ? p.table[1] : p.table[0]) + expert * 2));
    return 2 * word + int64_t{begin - segment * units} * C::kStepWeightBytes;
  }

  // To the next strip: where its inputs are, in bytes, and how many steps there are.
  __device__ __forceinline__ int next_strip(const MoeStreamParams& p, const MoeRoute& route,
                                            int& steps) {
    const int next = strip + 1, begin = unit, end = min((next + 1) * p.work.steps, share_end);
    const int segment = p.work.by_strips.divide(next);
    const int rows_of_tile = route.rows[p.work.tile_of(segment)], lane = thread_index() % 32;
    __syncwarp();
    if (lane == 0) strip = next, unit = end, rows = rows_of_tile;
    __syncwarp();
    steps = end - begin;
    // Columns of the product past the rows repeat the last one; nobody reads them.
    const int row = min(lane / 4, rows_of_tile - 1);
    return ((segment - route.first_segment) * p.ids.rows + row) *
               moe_stream_row_bytes(p.work.steps * 16) +
           (begin - next * p.work.steps) * 32 + lane % 4 * 8;
  }
};

// Brings near where the words of gate and up begin, which every warp asks for before its first
// word.
__device__ __forceinline__ void prefetch_tables(const MoeStreamParams& p) {
  const int lines = (p.ids.experts + 7) / 8, i = threadIdx.x;  // of eight entries
  if (blockIdx.x == 0 && i < 2 * lines) {
    prefetch_l2(i < lines ? p.table[0] + 16 * i : p.table[1] + 16 * (i - lines));
  }
}

// The sums of a warp as fp32, row by row of 128 channels.
template <class C>
__device__ __forceinline__ void store_warp(const Accumulators<C>& acc, const float (&inputs)[4],
                                           float* to, int rows, int lane) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = 2 * (lane % 4) + j;
    if (row >= rows) continue;
#pragma unroll
    for (int t = 0; t < C::kWarpTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to[row * 128 + 16 * t + 8 * half + lane / 4] =
            whole_sum<C>(acc[t][0][2 * half + j], inputs[j]);
      }
    }
  }
}

// Adds the sums of the warps, in their order, strip by strip and row by row of units [begin, end).
__device__ __forceinline__ void add_warps(const MoeStreamParams& p, const MoeRoute& route,
                                          const float* meet) {
  const int begin = route.begin, end = route.end;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const int rows = p.ids.rows, of_warp = MoeShares::of_warp(end - begin);
  const int first = begin + lane * of_warp, stop = min(first + of_warp, end);
  const int last_strip =
      lane < kStreamWarps && first < stop ? p.work.by_steps.divide(stop - 1) : -1;
  const int first_strip = p.work.by_steps.divide(begin);
  const int tasks = (p.work.by_steps.divide(end - 1) - first_strip + 1) * rows;
#pragma unroll 1
  for (int task = warp; task < tasks; task += kStreamWarps) {
    const int s = rows == 1 ? task : rows == 2 ? task >> 1 : task >> 2, row = task & (rows - 1);
    const int strip = first_strip + s;
    const int tile = p.work.tile_of(p.work.by_strips.divide(strip));
    if (row >= route.rows[tile]) continue;
    const uint32_t warps = __ballot_sync(0xFFFFFFFFu, last_strip == strip);
    const float4 z = sum_of_warps<kStreamWarps>(warps, meet + row * 128 + 4 * lane, rows * 128);
    *reinterpret_cast<float4*>(p.to.partials + ((int64_t{blockIdx.x} + strip) * rows + row) * 128 +
                               4 * lane) = z;
  }
}

// Chosen on sm_90 alone, so it is empty elsewhere.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
template <class C>
__global__ void moe_stream_kernel(const __grid_constant__ MoeStreamParams p) {}
#else

template <class C>
__global__ void __maxnreg__(C::kRegisters)
    moe_stream_kernel(const __grid_constant__ MoeStreamParams p) {
  static_assert(C::kRingBytes >= kMoeStreamRows * 512, "sums take the place of the ring");
  static_assert(sizeof(MoeRoute) + C::kWarps * sizeof(MoeProgress) <= kMoeRouteBytes);
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ MoeRoute route;
  __shared__ MoeProgress progress_of_warp[C::kWarps];
  uint8_t* ring = shared + threadIdx.x / 32 * C::kRingBytes;
  uint8_t* inputs = shared + C::kWarps * C::kRingBytes;
  float* meet = reinterpret_cast<float*>(shared);

  // The routing is the work of a kernel before gate and up. They let down start only once it is
  // there, so that down may read it at once.
  if (!p.down) {
    prefetch_tables(p);
    await_predecessors();
  }
  release_dependents();
  if (!find_range<C::kThreads>(p, route)) {
    if (p.down) await_predecessors();
    return;
  }
  MoeProgress& progress = progress_of_warp[threadIdx.x / 32];
  if (threadIdx.x % 32 == 0) progress = MoeProgress::of(p.work, route, threadIdx.x / 32);
  __syncwarp();

  const LaneState<C> state(threadIdx.x % 32, 0);
  const uint32_t fetch_to = shared_address(ring) + 16 * (threadIdx.x % 32);
  const uint8_t* from = nullptr;
  const uint8_t* x_of_step = nullptr;
  int fetch_left = 0;    // steps of the matrix that the warp still has to fetch
  int strip_left = 0;    // steps of the strip that it still has to multiply
  uint32_t lengths = 0;  // steps of the stages in the ring, four bits each, the last one lowest
  Accumulators<C> acc;
  float input_sums[4];
  // Turn by turn a stage is fetched, and the one fetched kStages - 1 turns before is multiplied;
  // a stage ends where a matrix ends. There is one place for each thing, because code costs more to
  // fetch once than to run.
  int slot = 0;
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    if (turn == C::kEarlyStages) {
      // Weights depend on no other kernel, so some of them come first; but not all that there is
      // room for, or what the inputs are made of would wait behind them.
      if (p.down) {
        prefetch_scales(p, route);
        await_predecessors();
      }
      make_inputs(p, route, inputs);
      __syncthreads();
      // They hold nothing yet, and said here they take no registers while the inputs are made.
      clear_sums(acc, input_sums);
      x_of_step = nullptr, strip_left = 0;
    }
    if (fetch_left == 0 && progress.fetched < progress.share_end) {
      from = p.weights + progress.next_matrix<C>(p, route, fetch_left) + 16 * (thread_index() % 32);
    }
    const int steps = min(fetch_left, C::kStageSteps);
    const int bytes = steps * C::kStepWeightBytes - 16 * (thread_index() % 32);
    const uint32_t to = fetch_to + slot * C::kStageBytes;
#pragma unroll
    for (int i = 0; i < C::kStageBytes; i += 512) {
      if (i < bytes) copy_async_16(to + i, from + i);
    }
    copy_async_commit();
    from += C::kStageBytes;
    fetch_left -= steps;
    lengths = lengths << 4 | static_cast<uint32_t>(steps);
    slot = slot + 1 == C::kStages ? 0 : slot + 1;
    if (turn < C::kStages - 1) continue;

    copy_async_wait<C::kStages - 1>();
    __syncwarp();
    const uint8_t* weights = ring + slot * C::kStageBytes;
    int stage_left = lengths >> 4 * (C::kStages - 1) & 15;
#pragma unroll 1
    while (true) {
      if (strip_left == 0) {
        // The end of a strip or of the share, and before the first strip. The last sums of all
        // warps meet in shared memory, in place of the ring.
        const bool last = progress.unit == progress.share_end;
        const int stride = p.ids.rows * 128;
        float* out = p.to.ends + int64_t{progress.strip} * stride;
        if (last) {
          copy_async_wait<0>();
          __syncthreads();
          out = meet + thread_index() / 32 * stride;
        }
        if (x_of_step != nullptr) {
          store_warp<C>(acc, input_sums, out, progress.rows, thread_index() % 32);
        }
        if (last) goto share_done;
        clear_sums(acc, input_sums);
        x_of_step = inputs + progress.next_strip(p, route, strip_left);
      }
      if (stage_left == 0) break;
      RowFragments<C> x;
      const uint2 v = *reinterpret_cast<const uint2*>(x_of_step);
      x[0][0] = v.x, x[0][1] = v.y;
      multiply_step<C>(state, p.constants, weights, x, acc);
      if constexpr (C::kSumsInputs) add_inputs(x, input_sums);
      weights += C::kStepWeightBytes;
      x_of_step += 32;
      --stage_left, --strip_left;
    }
    __syncwarp();
  }
share_done:
  __syncthreads();
  add_warps(p, route, meet);
}
#endif

}  // namespace exl3
