// The end of a segment of tall_kernel: sums over groups, exchange with other blocks, outputs.
//
// A strip that is cut lies at the end of the ranges of all blocks that have a part of it, but for
// the last one, which goes on with the next strip. Those share the rows: each adds up, transforms
// and stores its own, so that a strip of many parts does not wait for one block. Parts are added in
// the order of k whoever does it.
//
// Blocks that share a strip wait for each other. They are neighbours in the order in which blocks
// start, so the waits end where as many run at once as a strip has parts; a strip of more parts
// than any device is sure to run at once belongs to its first block, which waits for earlier
// starters.
#pragma once

#include <cstdint>

#include "device/hadamard.cuh"
#include "device/instructions.cuh"
#include "device/partition.cuh"
#include "linear/gemm_multiply.cuh"
#include "linear/gemm_sums.cuh"
#include "linear/output.cuh"
#include "linear/tall_config.cuh"

namespace exl3 {

// The blocks that have units of a strip, as positions, and what is this block's part in it.
struct StripBlocks {
  static constexpr int kMostSharing = 8;
  int first, last;
  int finishers;  // positions first to first + finishers - 1
  int index;      // of this block among them all

  // shared: whether blocks share the rows out; else the first one finishes them all.
  __device__ __forceinline__ StripBlocks(const EvenSplit& split, int strip, int strip_steps,
                                         int position, bool shared) {
    first = split.part_of(strip * strip_steps);
    last = split.part_of((strip + 1) * strip_steps - 1);
    const bool ends_with_it = split.range(last).end == (strip + 1) * strip_steps;
    const int parts = last - first + 1;
    finishers = shared && parts <= kMostSharing ? max(1, parts - (ends_with_it ? 0 : 1)) : 1;
    index = position - first;
  }
  __device__ __forceinline__ bool finishes() const { return index < finishers; }
  // Whether other blocks finish rows of which this one has a part.
  __device__ __forceinline__ bool publishes() const {
    return first < last && (finishers > 1 || !finishes());
  }
  // Where the part of a position is kept: the end of its range and the beginning are two parts.
  __device__ __forceinline__ int part(int position) const {
    return 2 * position + (position - first < finishers ? 1 : 0);
  }
};

// Which of the finishers has the i-th row of a warp: a warp's rows go to different ones.
__device__ __forceinline__ int finisher_of_row(int warp, int i, int finishers) {
  return (warp + i) % finishers;
}

template <class C>
__device__ __forceinline__ const float4* part_of_row(const float* partials, int part, int row,
                                                     int lane) {
  return reinterpret_cast<const float4*>(partials + (int64_t{part} * C::kRows + row) * 128) + lane;
}

__device__ __forceinline__ void add_four(float (&z)[4], float4 v, bool first) {
  z[0] = first ? v.x : z[0] + v.x, z[1] = first ? v.y : z[1] + v.y;
  z[2] = first ? v.z : z[2] + v.z, z[3] = first ? v.w : z[3] + v.w;
}

// The rows `mine` (a bit each) of z become the sums over all parts of the strip. Eight loads are
// under way at a time, because each takes the better part of a microsecond.
template <class C>
__device__ __forceinline__ void add_parts(const float* partials, const StripBlocks& blocks,
                                          int position, uint32_t mine, int warp, int lane,
                                          float (&z)[C::kWarpRows][4]) {
  constexpr int kBatch = C::kWarpRows >= 8 ? 1 : 8 / C::kWarpRows;
  constexpr bool kOwnFirst = !C::kShareRows;
  float total[kOwnFirst ? 1 : C::kWarpRows][4];
#pragma unroll 1
  for (int begin = blocks.first + (kOwnFirst ? 1 : 0); begin <= blocks.last; begin += kBatch) {
    float4 v[kBatch][C::kWarpRows];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
#pragma unroll
      for (int i = 0; i < C::kWarpRows; ++i) {
        const int other = begin + j;
        v[j][i] = kOwnFirst ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                            : make_float4(z[i][0], z[i][1], z[i][2], z[i][3]);
        if ((mine >> i & 1) != 0 && other <= blocks.last && other != position) {
          v[j][i] =
              __ldcg(part_of_row<C>(partials, blocks.part(other), warp + C::kWarps * i, lane));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (begin + j > blocks.last) continue;
#pragma unroll
      for (int i = 0; i < C::kWarpRows; ++i) {
        if constexpr (kOwnFirst) {
          add_four(z[i], v[j][i], false);
        } else {
          add_four(total[i], v[j][i], begin + j == blocks.first);
        }
      }
    }
  }
  if constexpr (!kOwnFirst) {
#pragma unroll
    for (int i = 0; i < C::kWarpRows; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) z[i][j] = total[i][j];
    }
  }
}

// The same for one row of many parts.
template <class C>
__device__ __forceinline__ void add_parts_of_row(const float* partials, const StripBlocks& blocks,
                                                 int position, int row, int lane, float (&z)[4]) {
  constexpr int kBatch = 8;
  float total[4];
#pragma unroll 1
  for (int begin = blocks.first; begin <= blocks.last; begin += kBatch) {
    float4 v[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int other = begin + j;
      v[j] = make_float4(z[0], z[1], z[2], z[3]);
      if (other <= blocks.last && other != position) {
        v[j] = __ldcg(part_of_row<C>(partials, blocks.part(other), row, lane));
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (begin + j <= blocks.last) add_four(total, v[j], begin + j == blocks.first);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) z[j] = total[j];
}

// Outputs of a row in the rotated basis.
template <class C>
__device__ __forceinline__ void store_row(const GemmParams& p, const Columns& columns, int row,
                                          int channel, float4 scales, float (&z)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) z[j] *= kHadamardScale;
  store_channels(p.out, columns, int64_t{blockIdx.y} * C::kRows + row, channel, scales, z);
}

// Units begin to end of the block at `position`, whose products are in acc; `sums` is shared memory
// of kSumBytes.
template <class C>
__device__ __forceinline__ void finish_segment(const GemmParams& p, const EvenSplit& split,
                                               int begin, int position, float* sums,
                                               const Accumulators<C>& acc, int warp, int lane) {
  const int strip_steps = p.k / 16, strip = begin / strip_steps;
  const int row_tile = blockIdx.y;
  const GemmShard& shard = shard_of_strip(p, strip);
  const int channel = (strip - shard.columns.strip_begin) * 128 + 4 * lane;
  const uint2 raw_scales = __ldg(reinterpret_cast<const uint2*>(shard.columns.svh + channel));
  const StripBlocks blocks(split, strip, strip_steps, position, C::kShareRows);
  float* partials = p.partials + int64_t{row_tile} * p.positions * (2 * C::kRows * 128);
  const uint32_t* flags = p.flags + int64_t{row_tile} * p.positions * 2;
  const int rows_left = p.m - row_tile * C::kRows;

  float z[C::kWarpRows][4];
  sum_groups<C>(sums, acc, z, rows_left, warp, lane);

  uint32_t mine = 0;  // rows of this warp that this block finishes
#pragma unroll
  for (int i = 0; i < C::kWarpRows; ++i) {
    const int row = warp + C::kWarps * i;
    const bool finishes = C::kShareRows ? finisher_of_row(warp, i, blocks.finishers) == blocks.index
                                        : blocks.finishes();
    if (row >= rows_left) continue;
    if (finishes) {
      mine |= 1u << i;
    } else {
      float* to = partials + (int64_t{blocks.part(position)} * C::kRows + row) * 128 + 4 * lane;
      *reinterpret_cast<float4*>(to) = make_float4(z[i][0], z[i][1], z[i][2], z[i][3]);
    }
  }
  if (blocks.publishes()) C::publish_part();
  if (!blocks.finishes()) return;

  if (blocks.first < blocks.last) {
    for (int other = blocks.first + threadIdx.x; other <= blocks.last; other += C::kThreads) {
      if (other != position) await_flag(flags + blocks.part(other));
    }
    C::block_barrier();
  }
  if (mine == 0) return;
  const float4 scales = unpack_scales(raw_scales);
  if (C::kShareRows && blocks.finishers >= C::kWarpRows) {  // one row of a warp, of many parts
    float one[4];
    int row = 0;
#pragma unroll
    for (int i = 0; i < C::kWarpRows; ++i) {
      if ((mine >> i & 1) == 0) continue;
      row = warp + C::kWarps * i;
#pragma unroll
      for (int j = 0; j < 4; ++j) one[j] = z[i][j];
    }
    add_parts_of_row<C>(partials, blocks, position, row, lane, one);
    hadamard_128(one, lane);
    store_row<C>(p, shard.columns, row, channel, scales, one);
    return;
  }
  if (blocks.first < blocks.last) {
    add_parts<C>(partials, blocks, position, mine, warp, lane, z);
  }
  hadamard_128(z, lane);
#pragma unroll
  for (int i = 0; i < C::kWarpRows; ++i) {
    if ((mine >> i & 1) == 0) continue;
    store_row<C>(p, shard.columns, warp + C::kWarps * i, channel, scales, z[i]);
  }
}

// The warp that publishes: the parts of a block as they are stored, its first and its last strip.
template <class C>
__device__ __forceinline__ void publish_parts(const GemmParams& p, const EvenSplit& split,
                                              const UnitRange& range, int position, int lane) {
  const int strip_steps = p.k / 16;
  uint32_t* flags = p.flags + int64_t{blockIdx.y} * p.positions * 2;
#pragma unroll 1
  for (int begin = range.begin; begin < range.end;) {
    const int strip = begin / strip_steps;
    const StripBlocks blocks(split, strip, strip_steps, position, C::kShareRows);
    if (blocks.publishes()) {
      C::await_part();
      if (lane == 0) publish_flag(flags + blocks.part(position));
      __syncwarp();
    }
    begin = (strip + 1) * strip_steps;
  }
}

}  // namespace exl3
