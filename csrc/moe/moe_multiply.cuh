// Multiplying tall tiles that are seldom full: routing fills the last tile of an expert by chance.
#pragma once

#include "linear/gemm_multiply.cuh"

namespace exl3 {

// One k16 step, as multiply_many, for the first `pairs` pairs of octets of rows alone. The branches
// are the same for all threads of the block.
template <class C>
__device__ __forceinline__ void multiply_present(const LaneState<C>& state,
                                                 const DecodeConstants& constants,
                                                 const uint8_t* weights, const uint8_t* rows,
                                                 int lane, int pairs, Accumulators<C>& acc) {
  static_assert(C::kWarpTiles == 2);
  uint32_t a[2][4];
  TileWords<C> words;
  words.load(state, weights, 0);
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    exact_fragment<C::kHalfBits, C::kFamily>(words.run(state, t), constants, a[t]);
  }
#pragma unroll
  for (int pair = 0; pair < C::kRowTiles / 2; ++pair) {
    if (pair >= pairs) break;
    const uint4 v = *reinterpret_cast<const uint4*>(rows + pair * 512 + lane * 16);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      mma_m16n8k16(acc[t][2 * pair], a[t], v.x, v.y);
      mma_m16n8k16(acc[t][2 * pair + 1], a[t], v.z, v.w);
    }
  }
}

}  // namespace exl3
