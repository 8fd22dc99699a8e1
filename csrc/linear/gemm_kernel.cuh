// out = diag-scaled Hadamard of (image * W), for 8 to 128 rows a tile: `stream` and `tile` in one.
//
// A strip (128 output channels, one Hadamard block) is the M side of mma.m16n8k16, the rows of the
// batch are its N side. The eight warps of a block form groups; a group covers the 128 channels of a
// strip and takes every kGroups-th unit of k (32 inputs) of the block's range. With few rows a group
// is one warp and eight groups split k; with many rows two or four warps share a group's
// activations. Each tile of weights is decoded once in a block, in registers.
//
// Told in execution order: ring and barriers, producer, main loop, sum over groups, exchange of
// partial sums between blocks, output transform.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

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

  using R = Rate<kHalfBits>;
  static constexpr int kGroupWarps = kRows <= 16 ? 1 : kRows <= 64 ? 2 : 4;
  static constexpr int kGroups = kGemmThreads / 32 / kGroupWarps;
  static constexpr int kWarpTiles = 8 / kGroupWarps;  // tiles of 16 channels a warp owns
  static constexpr int kRowTiles = kRows / 8;
  static constexpr int kUnitSteps = 2;  // k16 steps of a unit; the split of k must not depend on rows

  static constexpr int kStepWeightBytes = 8 * R::words32 * 4;
  static constexpr int kStepRowBytes = kRows * 32;
  static constexpr int kWeightBytes = kUnitSteps * kStepWeightBytes;
  static constexpr int kRowBytes = kUnitSteps * kStepRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kRowBytes;

  // Rows whose sums over the groups go through shared memory at once. Row stride 132 floats: the
  // four lanes of a quad hold different rows and the eight quads different channels, so 8 * 4 banks.
  static constexpr int kChunkRows = kGroups == 8 ? (kHalfBits >= 14 ? 4 : 8) : 8 * 8 / kGroups;
  static constexpr int kRowStride = 132;
  static constexpr int kSumBytes = kGroups * kChunkRows * kRowStride * 4;

  static constexpr int shared_bytes(int stages) {
    return kGroups * stages * (kStageBytes + 8) + kSumBytes;
  }
  // What the smaller cards can give a block is 99 KB; two stages must fit there.
  static_assert(2 * kGroups * (kStageBytes + 8) + kSumBytes <= 99 * 1024);
  static_assert(kForm == Form::kExact || kRows <= 16, "fast forms pay only with few rows");
  static_assert(kRows % kChunkRows == 0);
};

// The group's ring of units in shared memory: filled by bulk copies that one lane issues (sm_90 and
// later) or by 16-byte copies of all its lanes.
template <class C>
struct Ring {
  uint32_t data, barriers;  // shared addresses
  int stages;
  int thread;  // 0 to 32 * kGroupWarps - 1
  uint64_t weight_policy, row_policy;

  __device__ __forceinline__ void init() {
#if EXL3_HAS_BULK_COPY
    if (thread == 0) {
      for (int i = 0; i < stages; ++i) barrier_init(barriers + 8 * i, 1);
      barrier_init_fence();
    }
    weight_policy = evict_first_policy();
    row_policy = evict_last_policy();
#endif
  }

  __device__ __forceinline__ void fill_weights(int slot, const uint8_t* weights) const {
    const uint32_t to = data + slot * C::kStageBytes;
#if EXL3_HAS_BULK_COPY
    if (thread == 0) {
      barrier_expect(barriers + 8 * slot, C::kStageBytes);
      copy_bulk(to, weights, C::kWeightBytes, barriers + 8 * slot, weight_policy);
    }
#else
    for (int i = thread * 16; i < C::kWeightBytes; i += C::kGroupWarps * 512) {
      copy_async_16(to + i, weights + i);
    }
#endif
  }

  __device__ __forceinline__ void fill_rows(int slot, const uint8_t* rows) const {
    const uint32_t to = data + slot * C::kStageBytes + C::kWeightBytes;
#if EXL3_HAS_BULK_COPY
    if (thread == 0) copy_bulk(to, rows, C::kRowBytes, barriers + 8 * slot, row_policy);
#else
    for (int i = thread * 16; i < C::kRowBytes; i += C::kGroupWarps * 512) {
      copy_async_16(to + i, rows + i);
    }
#endif
  }

  // Ends a fill, also one of nothing, so that the groups of cp.async can be counted.
  __device__ __forceinline__ void commit() const {
#if !EXL3_HAS_BULK_COPY
    copy_async_commit();
#endif
  }

  __device__ __forceinline__ void wait(int slot, uint32_t parity) const {
#if EXL3_HAS_BULK_COPY
    barrier_wait(barriers + 8 * slot, parity);
#else
    // All but the newest stages - 2 fills are complete; the count must be a constant.
    switch (stages) {
      case 2: copy_async_wait<0>(); break;
      case 3: copy_async_wait<1>(); break;
      case 4: copy_async_wait<2>(); break;
      default: copy_async_wait<3>(); break;
    }
#endif
  }
};

template <class C>
__device__ __forceinline__ void group_barrier(int group) {
  if constexpr (C::kGroupWarps == 1) {
    __syncwarp();
  } else {
    named_barrier(1 + group, C::kGroupWarps * 32);
  }
}

__device__ __forceinline__ const GemmShard& shard_of_strip(const GemmParams& p, int strip) {
  int s = 0;
  while (s + 1 < p.shard_count && strip >= p.shards[s + 1].strip_begin) ++s;
  return p.shards[s];
}

// Walks the units of one group through all segments (strip pieces) of the block's range.
template <class C>
struct Producer {
  const GemmParams& p;
  int strip_units, group;
  int segment, end;  // next segment to start, end of the range
  int left;          // units still to fetch of the current segment
  int64_t row_tile_bytes;
  const uint8_t *weights, *rows;

  __device__ __forceinline__ void next_segment() {
    const int strip = segment / strip_units, first = segment - strip * strip_units;
    const int stop = min(end, (strip + 1) * strip_units);
    const GemmShard& shard = shard_of_strip(p, strip);
    const int unit = first + group;
    left = max(0, (stop - segment - group + C::kGroups - 1) / C::kGroups);
    weights = shard.weights + (int64_t{strip - shard.strip_begin} * strip_units + unit) *
                                  C::kWeightBytes;
    rows = shard.image + row_tile_bytes + int64_t{unit} * C::kRowBytes;
    segment = stop;
  }
  __device__ __forceinline__ bool ready() {
    while (left == 0 && segment < end) next_segment();
    return left > 0;
  }
  __device__ __forceinline__ void advance() {
    weights += C::kGroups * C::kWeightBytes;
    rows += C::kGroups * C::kRowBytes;
    --left;
  }
};

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
    weight_offset = C::kGroupWarps == 1 ? 0
                    : C::kGroupWarps == 2
                        ? part * kHalfStripBytes
                        : (part >> 1) * kHalfStripBytes + (part & 1) * 8;
  }
};

// acc += the tiles of one k16 step times its activations.
template <class C>
__device__ __forceinline__ void multiply_step(const LaneState<C>& state,
                                              const DecodeConstants& constants, uint32_t weights,
                                              uint32_t rows, int lane,
                                              float (&acc)[C::kWarpTiles][C::kRowTiles][4]) {
  constexpr int kLoad = C::kWarpTiles < 4 ? C::kWarpTiles : 4;  // tiles that one load serves
  const auto load_words = [&](int word, int half, uint32_t (&out)[kLoad]) {
    const uint32_t address =
        weights + state.weight_offset + half * (C::R::words32 * 16) + word * 16;
    if constexpr (kLoad == 4) {
      const uint4 v = load_shared_128(address);
      out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    } else {
      const uint2 v = load_shared_64(address);
      out[0] = v.x, out[1] = v.y;
    }
  };
  uint32_t x[C::kRowTiles][2];
  if constexpr (C::kRows == 8) {
    const uint2 v = load_shared_64(rows + lane * 8);
    x[0][0] = v.x, x[0][1] = v.y;
  } else if constexpr (C::kRows <= 32) {
#pragma unroll
    for (int pair = 0; pair < C::kRowTiles / 2; ++pair) {
      const uint4 v = load_shared_128(rows + pair * 512 + lane * 16);
      x[2 * pair][0] = v.x, x[2 * pair][1] = v.y, x[2 * pair + 1][0] = v.z;
      x[2 * pair + 1][1] = v.w;
    }
  }

#pragma unroll
  for (int half = 0; half < C::kWarpTiles / kLoad; ++half) {
    uint32_t last[kLoad], previous[kLoad], before[kLoad] = {};
    load_words(state.words.last, half, last);
    load_words(state.words.previous, half, previous);
    if constexpr (C::R::lane_words == 3) load_words(state.words.before, half, before);
    if constexpr (C::kForm == Form::kFast && C::kFamily == Family::kHalves) {
#pragma unroll
      for (int t = 0; t < kLoad; ++t) {
        const AlignedRun run =
            align_run<C::kHalfBits>(last[t], previous[t], before[t], state.words.shift);
        uint32_t even[4], odd[4];
        two_term_fragment<C::kHalfBits>(run, constants, even, odd);
#pragma unroll
        for (int r = 0; r < C::kRowTiles; ++r) {
          auto& d = acc[half * kLoad + t][r];
          mma_m16n8k16(d, even, doubled<0>(x[r][0]), doubled<0>(x[r][1]));
          mma_m16n8k16(d, odd, doubled<1>(x[r][0]), doubled<1>(x[r][1]));
        }
      }
    } else {
      uint32_t a[kLoad][4];
#pragma unroll
      for (int t = 0; t < kLoad; ++t) {
        const AlignedRun run =
            align_run<C::kHalfBits>(last[t], previous[t], before[t], state.words.shift);
        if constexpr (C::kForm == Form::kFast) {
          byte_sum_fragment<C::kHalfBits>(run, constants, a[t]);
        } else {
          exact_fragment<C::kHalfBits, C::kFamily>(run, constants, a[t]);
        }
        if constexpr (C::kRows <= 32) {
#pragma unroll
          for (int r = 0; r < C::kRowTiles; ++r) {
            mma_m16n8k16(acc[half * kLoad + t][r], a[t], x[r][0], x[r][1]);
          }
        }
      }
      if constexpr (C::kRows > 32) {
#pragma unroll
        for (int pair = 0; pair < C::kRowTiles / 2; ++pair) {
          const uint4 v = load_shared_128(rows + pair * 512 + lane * 16);
#pragma unroll
          for (int t = 0; t < kLoad; ++t) {
            mma_m16n8k16(acc[half * kLoad + t][2 * pair], a[t], v.x, v.y);
            mma_m16n8k16(acc[half * kLoad + t][2 * pair + 1], a[t], v.z, v.w);
          }
        }
      }
    }
  }
}

__device__ __forceinline__ float load_bias(const void* bias, Dtype dtype, int64_t at) {
  switch (dtype) {
    case Dtype::kBfloat16: return __bfloat162float(static_cast<const __nv_bfloat16*>(bias)[at]);
    case Dtype::kFloat16: return __half2float(static_cast<const __half*>(bias)[at]);
    default: return static_cast<const float*>(bias)[at];
  }
}

// Four neighbouring channels of one row: svh, bias, rounding, store of those that are wanted.
__device__ __forceinline__ void store_channels(const GemmParams& p, const GemmShard& shard,
                                               int64_t row, int channel, const float (&z)[4]) {
  float y[4];
  const uint2 scales = *reinterpret_cast<const uint2*>(shard.svh + channel);
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&scales.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&scales.y));
  y[0] = z[0] * low.x, y[1] = z[1] * low.y, y[2] = z[2] * high.x, y[3] = z[3] * high.y;
  const int first = channel - shard.n_begin;
  const int64_t column = int64_t{shard.out_begin} + first;
  if (p.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i >= 0 && first + i < shard.n_out) {
        y[i] += load_bias(p.bias, p.bias_dtype, column + i);
      }
    }
  }
  uint16_t bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bits[i] = p.out_dtype == Dtype::kBfloat16 ? __bfloat16_as_ushort(__float2bfloat16_rn(y[i]))
                                              : __half_as_ushort(__float2half_rn(y[i]));
  }
  uint16_t* to = static_cast<uint16_t*>(p.out) + row * p.out_stride + column;
  if (first >= 0 && first + 4 <= shard.n_out && (reinterpret_cast<uintptr_t>(to) & 7) == 0) {
    *reinterpret_cast<uint2*>(to) = make_uint2(bits[0] | static_cast<uint32_t>(bits[1]) << 16,
                                               bits[2] | static_cast<uint32_t>(bits[3]) << 16);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first + i >= 0 && first + i < shard.n_out) to[i] = bits[i];
  }
}

template <class C>
__global__ void __launch_bounds__(kGemmThreads, gemm_blocks_of_sm(C::kRows))
    gemm_kernel(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = warp / C::kGroupWarps, part = warp % C::kGroupWarps;
  const int stages = p.stages;
  float* sums = reinterpret_cast<float*>(shared + C::kGroups * stages * C::kStageBytes);

  Ring<C> ring;
  ring.data = shared_address(shared) + group * stages * C::kStageBytes;
  ring.barriers = shared_address(shared) + C::kGroups * stages * C::kStageBytes + C::kSumBytes +
                  group * stages * 8;
  ring.stages = stages;
  ring.thread = part * 32 + lane;
  ring.init();

  // Later positions are started first, because an owner waits for positions after its own.
  const int position = p.positions - 1 - static_cast<int>(blockIdx.x);
  const int row_tile = blockIdx.y;
  const int strip_units = p.k / (16 * C::kUnitSteps);
  const int64_t units = int64_t{p.strips} * strip_units;
  const UnitRange range = unit_range(units, position, p.positions);

  release_dependents();
  group_barrier<C>(group);
  Producer<C> producer{p, strip_units, group, range.begin, range.end, 0,
                       row_tile * p.image_tile_bytes, nullptr, nullptr};
  {
    // Weights depend on nothing, so the ring starts to fill while the transform still runs.
    Producer<C> ahead = producer;
    for (int i = 0; i < stages - 1 && ahead.ready(); ++i) {
      ring.fill_weights(i, ahead.weights);
      ahead.advance();
    }
    await_predecessors();
    for (int i = 0; i < stages - 1; ++i) {
      if (producer.ready()) {
        ring.fill_rows(i, producer.rows);
        producer.advance();
      }
      ring.commit();
    }
  }

  const LaneState<C> state(lane, part);
  int slot = 0;
  uint32_t parity = 0;
  float acc[C::kWarpTiles][C::kRowTiles][4];

  for (int begin = range.begin; begin < range.end;) {
    const int strip = begin / strip_units;
    const int end = min(range.end, (strip + 1) * strip_units);
#pragma unroll
    for (int t = 0; t < C::kWarpTiles; ++t) {
#pragma unroll
      for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[t][r][i] = 0.0f;
      }
    }

#pragma unroll 1
    for (int unit = begin + group; unit < end; unit += C::kGroups) {
      ring.wait(slot, parity);
      group_barrier<C>(group);  // everybody is done with the slot before this one
      if (producer.ready()) {
        const int free_slot = slot == 0 ? stages - 1 : slot - 1;
        ring.fill_weights(free_slot, producer.weights);
        ring.fill_rows(free_slot, producer.rows);
        producer.advance();
      }
      ring.commit();
      const uint32_t stage = ring.data + slot * C::kStageBytes;
#pragma unroll
      for (int step = 0; step < C::kUnitSteps; ++step) {
        multiply_step<C>(state, p.constants, stage + step * C::kStepWeightBytes,
                         stage + C::kWeightBytes + step * C::kStepRowBytes, lane, acc);
      }
      if (++slot == stages) slot = 0, parity ^= 1;
    }

    // The sums of the groups meet in shared memory, a chunk of rows at a time, and one warp a row
    // adds them in order of the groups.
    const bool owner = begin == strip * strip_units;
    const bool whole = owner && end == (strip + 1) * strip_units;
    const int last =
        whole || !owner
            ? position
            : last_contributor(units, position, p.positions, (strip + 1) * strip_units);
    const int64_t tile_slots = int64_t{row_tile} * p.positions;
    const int rows_left = p.m - row_tile * C::kRows;
    const GemmShard& shard = shard_of_strip(p, strip);
    const int channel = (strip - shard.strip_begin) * 128 + 4 * lane;
    if (last > position) {
      if (threadIdx.x == 0) {
        for (int other = position + 1; other <= last; ++other) {
          await_flag(p.flags + tile_slots + other);
        }
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < C::kRows; chunk += C::kChunkRows) {
      __syncthreads();
#pragma unroll
      for (int t = 0; t < C::kWarpTiles; ++t) {
        const int first = (part * C::kWarpTiles + t) * 16 + lane / 4;
#pragma unroll
        for (int r = 0; r < C::kRowTiles; ++r) {
          if (8 * r + 7 < chunk || 8 * r >= chunk + C::kChunkRows) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = 8 * r + 2 * (lane % 4) + i % 2 - chunk;
            if (C::kChunkRows >= 8 || (row >= 0 && row < C::kChunkRows)) {
              sums[(group * C::kChunkRows + row) * C::kRowStride + first + 8 * (i / 2)] =
                  acc[t][r][i];
            }
          }
        }
      }
      __syncthreads();
      for (int row = warp; row < C::kChunkRows && chunk + row < rows_left;
           row += kGemmThreads / 32) {
        float z[4] = {};
#pragma unroll
        for (int g = 0; g < C::kGroups; ++g) {
          const float4 v = *reinterpret_cast<const float4*>(
              sums + (g * C::kChunkRows + row) * C::kRowStride + 4 * lane);
          z[0] += v.x, z[1] += v.y, z[2] += v.z, z[3] += v.w;
        }
        const int64_t in_partial = int64_t{chunk + row} * 128 + 4 * lane;
        if (!owner) {
          float* to = p.partials + (tile_slots + position) * (C::kRows * 128) + in_partial;
          *reinterpret_cast<float4*>(to) = make_float4(z[0], z[1], z[2], z[3]);
          continue;
        }
        for (int other = position + 1; other <= last; ++other) {
          const float4 v = __ldcg(reinterpret_cast<const float4*>(
              p.partials + (tile_slots + other) * (C::kRows * 128) + in_partial));
          z[0] += v.x, z[1] += v.y, z[2] += v.z, z[3] += v.w;
        }
        const int64_t out_row = int64_t{row_tile} * C::kRows + chunk + row;
        float scale = kHadamardScale;
        float offset = 0.0f;
        if constexpr (C::kForm == Form::kFast && C::kFamily == Family::kByteSum) {
          // sum_k (slope * s + offset) x = slope * sum_k s x + offset * sum_k x, and a constant over
          // the channels of a block is an impulse at its first channel after the transform.
          float total = 0.0f;
          const int blocks = p.k / 128;
          for (int b = lane; b < blocks; b += 32) total += shard.block_sums[out_row * blocks + b];
#pragma unroll
          for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, d);
          offset = total * (CodebookMul1::kOffset * CodebookMul1::kUnit) * kRootOf128;
          scale *= CodebookMul1::kSlope * CodebookMul1::kUnit * 16777216.0f;
        }
        hadamard_128(z, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) z[i] *= scale;
        if (lane == 0) z[0] += offset;
        store_channels(p, shard, out_row, channel, z);
      }
    }
    if (!owner) {
      // Every thread's stores come before the flag: barrier, then a release at device scope.
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) publish_flag(p.flags + tile_slots + position);
    }
    begin = end;
  }
}

}  // namespace exl3
