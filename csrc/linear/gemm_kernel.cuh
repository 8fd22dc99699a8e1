// out = diag-scaled Hadamard of (image * W), for 8 to 128 rows a tile: `stream` and `tile` in one.
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

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <utility>

#include "device/convert.cuh"
#include "device/decode.cuh"
#include "device/hadamard.cuh"
#include "device/instructions.cuh"
#include "device/partition.cuh"
#include "linear/gemm.h"

namespace exl3 {

template <int kHalfBits_, Family kFamily_, Form kForm_, int kRows_>
struct GemmConfig {
  static constexpr int kHalfBits = kHalfBits_;
  static constexpr Family kFamily = kFamily_;
  static constexpr Form kForm = kForm_;
  static constexpr int kRows = kRows_;

  // What the smaller cards can give a block; two blocks of that size fit on the larger ones.
  static constexpr int kLimit = 99 * 1024;

  using R = Rate<kHalfBits>;
  static constexpr int kGroupWarps = kRows <= 16 ? 1 : 4;
  static constexpr int kWarps = gemm_warps(kRows);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kGroups = kWarps / kGroupWarps;
  static constexpr int kGroupThreads = 32 * kGroupWarps;
  static constexpr int kWarpTiles = 8 / kGroupWarps;  // tiles of 16 channels a warp owns
  static constexpr int kRowTiles = kRows / 8;

  // Rows whose sums over the groups go through shared memory at once. Row stride 132 floats: the
  // four lanes of a quad hold different rows and the eight quads different channels, so 8 * 4
  // banks.
  static constexpr int kChunkRows = kGroupWarps == 4 ? 16 : kHalfBits >= 14 ? 4 : 8;
  static constexpr int kWarpRows = kRows / kWarps;  // rows that one warp finishes
  static constexpr int kRowStride = 132;
  static constexpr int kSumBytes = kGroups * kChunkRows * kRowStride * 4;

  // One stage of the ring holds up to so many k16 steps. This has no say in the order of additions.
  static constexpr int kStepWeightBytes = 8 * R::words32 * 4;
  static constexpr int kStepRowBytes = kRows * 32;
  static constexpr int kStepBytes = kStepWeightBytes + kStepRowBytes;
  static constexpr int kStageSteps = (kLimit - kSumBytes) / (kGroups * 4 * kStepBytes) >= 2 ? 4 : 2;
  static constexpr int kWeightBytes = kStageSteps * kStepWeightBytes;
  static constexpr int kRowBytes = kStageSteps * kStepRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kRowBytes;
  // Two stages must fit, more than four do not help.
  static constexpr int kFit = (kLimit - kSumBytes) / (kGroups * kStageBytes);
  static constexpr int kStages = kFit < 4 ? kFit : 4;
  static constexpr int kSharedBytes = kGroups * kStages * kStageBytes + kSumBytes;
  static_assert(kStages >= 2);
  static_assert(kForm == Form::kExact || kRows == kFastRows, "with more rows they do not pay");
  static_assert(kRows % kChunkRows == 0 && kStageSteps % 2 == 0);
};

__device__ __forceinline__ const GemmShard& shard_of_strip(const GemmParams& p, int strip) {
  int s = 0;
  while (s + 1 < p.shard_count && strip >= p.shards[s + 1].strip_begin) ++s;
  return p.shards[s];
}

// The k16 steps that a group takes of a segment: an even share, contiguous.
template <class C>
__device__ __forceinline__ UnitRange share_of_group(int begin, int end, int group) {
  const int steps = end - begin;
  return {begin + steps * group / C::kGroups, begin + steps * (group + 1) / C::kGroups};
}

// Fetches the steps of one group through all segments (strip pieces) of the block's range. Every
// thread of the group holds one and copies every kGroupThreads-th 16 bytes.
template <class C>
struct Fetcher {
  const GemmParams& p;
  int strip_steps, group;
  int segment, end;  // next segment to start, end of the range
  int left;          // steps still to fetch of the current segment
  int64_t row_tile_bytes;
  uint32_t thread_bytes;  // 16 times the thread's number in the group
  uint64_t policy;
  const uint8_t *weights, *rows;

  __device__ __forceinline__ void next_segment() {
    const int strip = segment / strip_steps;
    const int stop = min(end, (strip + 1) * strip_steps);
    const UnitRange share = share_of_group<C>(segment, stop, group);
    const GemmShard& shard = shard_of_strip(p, strip);
    left = share.end - share.begin;
    weights =
        shard.weights + thread_bytes +
        (int64_t{share.begin} - int64_t{shard.strip_begin} * strip_steps) * C::kStepWeightBytes;
    rows = shard.image + row_tile_bytes + thread_bytes +
           int64_t{share.begin - strip * strip_steps} * C::kStepRowBytes;
    segment = stop;
  }
  __device__ __forceinline__ bool ready() {
    while (left == 0 && segment < end) next_segment();
    return left > 0;
  }
  // Copies up to one stage. `stage` is the shared address of the slot plus thread_bytes.
  template <int kStepBytes_, int kStageBytes_, class Copy>
  __device__ __forceinline__ void copy(Copy&& copy_16) const {
    constexpr int kStride = C::kGroupThreads * 16;
    if (kStageBytes_ % kStride == 0 && left >= C::kStageSteps) {
#pragma unroll
      for (int i = 0; i < kStageBytes_; i += kStride) copy_16(i);
      return;
    }
    const int bytes = min(left, C::kStageSteps) * kStepBytes_ - static_cast<int>(thread_bytes);
#pragma unroll
    for (int i = 0; i < kStageBytes_; i += kStride) {
      if (i < bytes) copy_16(i);
    }
  }
  __device__ __forceinline__ void fetch_weights(uint32_t stage) const {
    copy<C::kStepWeightBytes, C::kWeightBytes>(
        [&](int i) { copy_async_16(stage + i, weights + i, policy); });
  }
  __device__ __forceinline__ void fetch_rows(uint32_t stage) const {
    copy<C::kStepRowBytes, C::kRowBytes>(
        [&](int i) { copy_async_16(stage + C::kWeightBytes + i, rows + i); });
  }
  __device__ __forceinline__ void advance() {
    weights += C::kWeightBytes;
    rows += C::kRowBytes;
    left = max(0, left - C::kStageSteps);
  }
};

template <class C>
__device__ __forceinline__ void group_barrier(int group) {
  if constexpr (C::kGroupWarps == 1) {
    __syncwarp();
  } else {
    named_barrier(1 + group, C::kGroupThreads);
  }
}

// Doubles one fp16 of a pair: what both halves of a weight are multiplied by.
template <int kHalf>
__device__ __forceinline__ uint32_t doubled(uint32_t pair) {
  return __byte_perm(pair, 0u, kHalf == 0 ? 0x1010u : 0x3232u);
}

template <class C>
struct LaneState {
  LaneWords<C::kHalfBits> words;
  uint32_t weight_offset;  // of this warp's tiles within a step
  explicit __device__ __forceinline__ LaneState(int lane, int part) : words(lane) {
    // Four tiles lie interleaved word by word, so a warp of two tiles takes half of each 16 bytes.
    constexpr int kHalfStripBytes = C::R::words32 * 16;
    weight_offset = C::kGroupWarps == 1   ? 0
                    : C::kGroupWarps == 2 ? part * kHalfStripBytes
                                          : (part >> 1) * kHalfStripBytes + (part & 1) * 8;
  }
};

// The words of the lane for kLoad tiles: what one or two shared loads a word bring.
template <class C>
struct TileWords {
  static constexpr int kLoad = C::kWarpTiles < 4 ? C::kWarpTiles : 4;
  uint32_t last[kLoad], previous[kLoad], before[kLoad];

  __device__ __forceinline__ void load(const LaneState<C>& state, const uint8_t* step, int half) {
    const uint8_t* from = step + state.weight_offset + half * (C::R::words32 * 16);
    load_word(from + state.words.last * 16, last);
    load_word(from + state.words.previous * 16, previous);
    if constexpr (C::R::lane_words == 3) load_word(from + state.words.before * 16, before);
  }
  __device__ __forceinline__ AlignedRun run(const LaneState<C>& state, int t) const {
    return align_run<C::kHalfBits>(last[t], previous[t], C::R::lane_words == 3 ? before[t] : 0u,
                                   state.words.shift);
  }

 private:
  static __device__ __forceinline__ void load_word(const uint8_t* from, uint32_t (&out)[kLoad]) {
    if constexpr (kLoad == 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      out[0] = v.x, out[1] = v.y;
    }
  }
};

template <class C>
using Accumulators = float[C::kWarpTiles][C::kRowTiles][4];

// Few rows: acc += the tiles of one k16 step times its activations, which fit in registers.
template <class C>
__device__ __forceinline__ void multiply_few(const LaneState<C>& state,
                                             const DecodeConstants& constants,
                                             const uint8_t* weights, const uint8_t* rows, int lane,
                                             Accumulators<C>& acc) {
  uint32_t x[C::kRowTiles][2];
  if constexpr (C::kRows == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(rows + lane * 8);
    x[0][0] = v.x, x[0][1] = v.y;
  } else {
    const uint4 v = *reinterpret_cast<const uint4*>(rows + lane * 16);
    x[0][0] = v.x, x[0][1] = v.y, x[1][0] = v.z, x[1][1] = v.w;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    TileWords<C> words;
    words.load(state, weights, half);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      auto& d = acc[half * 4 + t];
      const AlignedRun run = words.run(state, t);
      if constexpr (C::kForm == Form::kFast && C::kFamily == Family::kHalves) {
        uint32_t even[4], odd[4];
        two_term_fragment<C::kHalfBits>(run, constants, even, odd);
#pragma unroll
        for (int r = 0; r < C::kRowTiles; ++r) {
          mma_m16n8k16(d[r], even, doubled<0>(x[r][0]), doubled<0>(x[r][1]));
          mma_m16n8k16(d[r], odd, doubled<1>(x[r][0]), doubled<1>(x[r][1]));
        }
      } else {
        uint32_t a[4];
        if constexpr (C::kForm == Form::kFast) {
          byte_sum_fragment<C::kHalfBits>(run, constants, a);
        } else {
          exact_fragment<C::kHalfBits, C::kFamily>(run, constants, a);
        }
#pragma unroll
        for (int r = 0; r < C::kRowTiles; ++r) mma_m16n8k16(d[r], a, x[r][0], x[r][1]);
      }
    }
  }
}

// Many rows: kSteps steps, where the tiles of the next step are decoded between the products of the
// one before. The tensor cores and the integer pipes then work at the same time in one warp, which
// matters because few warps fit.
template <class C, int kSteps>
__device__ __forceinline__ void multiply_many(const LaneState<C>& state,
                                              const DecodeConstants& constants,
                                              const uint8_t* weights, const uint8_t* rows, int lane,
                                              Accumulators<C>& acc) {
  static_assert(C::kWarpTiles == 2);
  constexpr int kPairs = C::kRowTiles / 2;
  uint32_t a[2][2][4];
  TileWords<C> words;
  words.load(state, weights, 0);
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    exact_fragment<C::kHalfBits, C::kFamily>(words.run(state, t), constants, a[0][t]);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const bool more = step + 1 < kSteps;
    if (more) words.load(state, weights + (step + 1) * C::kStepWeightBytes, 0);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const uint4 v =
          *reinterpret_cast<const uint4*>(rows + step * C::kStepRowBytes + pair * 512 + lane * 16);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        mma_m16n8k16(acc[t][2 * pair], a[step % 2][t], v.x, v.y);
        mma_m16n8k16(acc[t][2 * pair + 1], a[step % 2][t], v.z, v.w);
      }
      if (more && (pair + 1) * 2 % kPairs == 0) {
        const int t = (pair + 1) * 2 / kPairs - 1;
        exact_fragment<C::kHalfBits, C::kFamily>(words.run(state, t), constants,
                                                 a[(step + 1) % 2][t]);
      }
    }
  }
}

// Four neighbouring channels of one row: svh, bias, rounding, store of those that are wanted.
__device__ __forceinline__ void store_channels(const GemmParams& p, const GemmShard& shard,
                                               int64_t row, int channel, float4 scales,
                                               const float (&z)[4]) {
  float y[4] = {z[0] * scales.x, z[1] * scales.y, z[2] * scales.z, z[3] * scales.w};
  const int first = channel - shard.n_begin;
  const int64_t column = int64_t{shard.out_begin} + first;
  if (p.bias != nullptr) {
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      if (first + i < 0 || first + i >= shard.n_out) continue;
      const float bias = load_as_float(p.bias, p.bias_dtype, column + i);
      y[0] += i == 0 ? bias : 0.0f, y[1] += i == 1 ? bias : 0.0f;
      y[2] += i == 2 ? bias : 0.0f, y[3] += i == 3 ? bias : 0.0f;
    }
  }
  uint2 bits;
  if (p.out_dtype == Dtype::kBfloat16) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(y[0], y[1]);
    const __nv_bfloat162 high = __floats2bfloat162_rn(y[2], y[3]);
    bits = make_uint2(*reinterpret_cast<const uint32_t*>(&low),
                      *reinterpret_cast<const uint32_t*>(&high));
  } else {
    const __half2 low = __floats2half2_rn(y[0], y[1]), high = __floats2half2_rn(y[2], y[3]);
    bits = make_uint2(*reinterpret_cast<const uint32_t*>(&low),
                      *reinterpret_cast<const uint32_t*>(&high));
  }
  uint16_t* to = static_cast<uint16_t*>(p.out) + row * p.out_stride + column;
  if (first >= 0 && first + 4 <= shard.n_out && (reinterpret_cast<uintptr_t>(to) & 7) == 0) {
    *reinterpret_cast<uint2*>(to) = bits;
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    if (first + i < 0 || first + i >= shard.n_out) continue;
    to[i] = static_cast<uint16_t>((i < 2 ? bits.x : bits.y) >> 16 * (i % 2));
  }
}

// Accumulators of a chunk of rows to shared memory: sums[group][row][channel].
template <class C, int chunk>
__device__ __forceinline__ void spread_sums(float* sums, const Accumulators<C>& acc, int group,
                                            int part, int lane) {
#pragma unroll
  for (int t = 0; t < C::kWarpTiles; ++t) {
    const int channel = (part * C::kWarpTiles + t) * 16 + lane / 4;
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

// Calls f with 0 to kCount - 1 as constants.
template <int kCount, class F>
__device__ __forceinline__ void for_constant(F&& f) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (f(std::integral_constant<int, kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// Registers for two blocks on a multiprocessor only help where its shared memory has room for two.
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
#define EXL3_GEMM_BLOCKS(rows) 1
#else
#define EXL3_GEMM_BLOCKS(rows) gemm_blocks_of_sm(rows)
#endif

template <class C>
__global__ void __launch_bounds__(C::kThreads, EXL3_GEMM_BLOCKS(C::kRows))
    gemm_kernel(const __grid_constant__ GemmParams p) {
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

  const uint32_t thread_bytes = 16 * (part * 32 + lane);
  const uint32_t fetch_to = shared_address(ring) + thread_bytes;
  Fetcher<C> fetcher{p,
                     strip_steps,
                     group,
                     range.begin,
                     range.end,
                     0,
                     row_tile * p.image_tile_bytes,
                     thread_bytes,
                     evict_first_policy(),  // each weight is read once
                     nullptr,
                     nullptr};
  {
    // Weights depend on no other kernel, so the ring starts to fill while the input transform runs.
    Fetcher<C> ahead = fetcher;
#pragma unroll 1
    for (int i = 0; i < C::kStages - 1 && ahead.ready(); ++i, ahead.advance()) {
      ahead.fetch_weights(fetch_to + i * C::kStageBytes);
    }
    await_predecessors();
#pragma unroll 1
    for (int i = 0; i < C::kStages - 1; ++i) {
      if (fetcher.ready()) {
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
    const GemmShard& shard = shard_of_strip(p, strip);
    const int channel = (strip - shard.strip_begin) * 128 + 4 * lane;
    const uint2 raw_scales = __ldg(reinterpret_cast<const uint2*>(shard.svh + channel));
#pragma unroll
    for (int t = 0; t < C::kWarpTiles; ++t) {
#pragma unroll
      for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[t][r][i] = 0.0f;
      }
    }

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
      } else if (steps == C::kStageSteps) {
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

    const bool owner = begin == strip * strip_steps;
    const int strip_end = (strip + 1) * strip_steps;
    const int last = !owner || end == strip_end
                         ? position
                         : last_contributor(units, position, p.positions, strip_end);
    float* partials = p.partials + int64_t{row_tile} * p.positions * (C::kRows * 128);
    uint32_t* flags = p.flags + int64_t{row_tile} * p.positions;
    const int rows_left = p.m - row_tile * C::kRows;
    // The sums of the groups meet in shared memory, a chunk of rows at a time; each row is finished
    // by one warp, which adds groups and then positions in their order.
    float z[C::kWarpRows][4];
    for_constant<C::kRows / C::kChunkRows>([&](auto index) {
      constexpr int kChunk = decltype(index)::value * C::kChunkRows;
      if (kChunk >= rows_left) return;
      __syncthreads();
      spread_sums<C, kChunk>(sums, acc, group, part, lane);
      __syncthreads();
      collect_sums<C, kChunk>(sums, z, warp, lane);
    });

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
    const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&raw_scales.x));
    const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&raw_scales.y));
    const float4 scales = make_float4(low.x, low.y, high.x, high.y);
    const int64_t first_row = int64_t{row_tile} * C::kRows + warp;
#pragma unroll
    for (int i = 0; i < C::kWarpRows; ++i) hadamard_128(z[i], lane);
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
        for (int b = lane; b < blocks; b += 32) total += block_sums[b];
#pragma unroll
        for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, d);
        offset = total * (CodebookMul1::kOffset * CodebookMul1::kUnit) * kRootOf128;
        scale *= CodebookMul1::kSlope * CodebookMul1::kUnit * 16777216.0f;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) z[i][j] *= scale;
      if (lane == 0) z[i][0] += offset;
      store_channels(p, shard, first_row + C::kWarps * i, channel, scales, z[i]);
    }
    begin = end;
  }
}

}  // namespace exl3
