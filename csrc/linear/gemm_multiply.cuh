// Decoding and multiplying the steps of a stage.
#pragma once

#include <cstdint>

#include "device/decode.cuh"
#include "device/instructions.cuh"
#include "linear/gemm_config.cuh"

namespace exl3 {

// Doubles one fp16 of a pair: what both halves of a weight are multiplied by.
template <int kHalf>
__device__ __forceinline__ uint32_t doubled(uint32_t pair) {
  return __byte_perm(pair, 0u, kHalf == 0 ? 0x1010u : 0x3232u);
}

// The t-th tile of 16 channels of a strip that a lane of a group's warp `part` decodes. Four tiles
// lie interleaved word by word. In a warp of one tile eight lanes at a time take a tile each, so
// that its lanes meet different banks; which rows of a product hold which channels is free.
template <class C>
__device__ __forceinline__ int tile_of_lane(int part, int lane, int t) {
  if constexpr (C::kWarpTiles == 1) return (part & 4) | ((part + lane / 8) & 3);
  return part * C::kWarpTiles + t;
}

template <class C>
struct LaneState {
  LaneWords<C::kHalfBits> words;
  uint32_t weight_offset;  // of this lane's tiles within a step
  explicit __device__ __forceinline__ LaneState(int lane, int part) : words(lane) {
    const int tile = tile_of_lane<C>(part, lane, 0);
    weight_offset = (tile >> 2) * (C::R::words32 * 16) + (tile & 3) * 4;
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
    } else if constexpr (kLoad == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      out[0] = v.x, out[1] = v.y;
    } else {
      out[0] = *reinterpret_cast<const uint32_t*>(from);
    }
  }
};

template <class C>
using Accumulators = float[C::kWarpTiles][C::kRowTiles][4];

template <class C>
__device__ __forceinline__ void clear_accumulators(Accumulators<C>& acc) {
#pragma unroll
  for (int t = 0; t < C::kWarpTiles; ++t) {
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[t][r][i] = 0.0f;
    }
  }
}

// B fragments of one k16 step.
template <class C>
using RowFragments = uint32_t[C::kRowTiles][2];

// Few rows: acc += the tiles of one k16 step times its activations.
template <class C>
__device__ __forceinline__ void multiply_step(const LaneState<C>& state,
                                              const DecodeConstants& constants,
                                              const uint8_t* weights, const RowFragments<C>& x,
                                              Accumulators<C>& acc) {
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

// The same, for activations in the order of the image.
template <class C>
__device__ __forceinline__ void multiply_few(const LaneState<C>& state,
                                             const DecodeConstants& constants,
                                             const uint8_t* weights, const uint8_t* rows, int lane,
                                             Accumulators<C>& acc) {
  RowFragments<C> x;
  if constexpr (C::kRows == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(rows + lane * 8);
    x[0][0] = v.x, x[0][1] = v.y;
  } else {
    const uint4 v = *reinterpret_cast<const uint4*>(rows + lane * 16);
    x[0][0] = v.x, x[0][1] = v.y, x[1][0] = v.z, x[1][1] = v.w;
  }
  multiply_step<C>(state, constants, weights, x, acc);
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

}  // namespace exl3
