// Multiplying tall tiles that are seldom full: routing fills the last tile of an expert by chance.
#pragma once

#include "linear/gemm_multiply.cuh"

namespace exl3 {

// Some k16 steps, as multiply_many, for the first kPairs pairs of octets of rows alone. A loop for
// each number of pairs, because branches between the products would keep loads from running ahead.
template <class C, int kPairs>
__device__ __forceinline__ void multiply_pairs(const LaneState<C>& state,
                                               const DecodeConstants& constants,
                                               const uint8_t* weights, const uint8_t* rows,
                                               int lane, int steps, Accumulators<C>& acc) {
  static_assert(C::kWarpTiles == 2);
#pragma unroll 1
  for (; steps > 0; --steps) {
    uint32_t a[2][4];
    TileWords<C> words;
    words.load(state, weights, 0);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      exact_fragment<C::kHalfBits, C::kFamily>(words.run(state, t), constants, a[t]);
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const uint4 v = *reinterpret_cast<const uint4*>(rows + pair * 512 + lane * 16);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        mma_m16n8k16(acc[t][2 * pair], a[t], v.x, v.y);
        mma_m16n8k16(acc[t][2 * pair + 1], a[t], v.z, v.w);
      }
    }
    weights += C::kStepWeightBytes;
    rows += C::kStepRowBytes;
  }
}

// The same for as many rows as there are, rounded up to a quarter or a half of the tile.
template <class C>
__device__ __forceinline__ void multiply_present(const LaneState<C>& state,
                                                 const DecodeConstants& constants,
                                                 const uint8_t* weights, const uint8_t* rows,
                                                 int lane, int steps, int present,
                                                 Accumulators<C>& acc) {
  constexpr int kAll = C::kRowTiles / 2;
  if (present > C::kRows / 2) {
    multiply_pairs<C, kAll>(state, constants, weights, rows, lane, steps, acc);
  } else if (present > C::kRows / 4) {
    multiply_pairs<C, kAll / 2>(state, constants, weights, rows, lane, steps, acc);
  } else {
    multiply_pairs<C, kAll / 4>(state, constants, weights, rows, lane, steps, acc);
  }
}

}  // namespace exl3
