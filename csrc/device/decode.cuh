// Decoding on the device: from the words of a tile to the fragment of m16n8k16 that a lane holds.
//
// A lane needs the words that hold its run of eight windows (`LaneWords`), shifts them so that the
// run ends at bit 0, cuts the eight 16-bit windows out (`windows`), multiplies each by the codebook
// constant (`products`) and turns pairs of products into pairs of fp16 weights (`exact_fragment`)
// or into the fast forms that skip the last rounding (`two_term_fragment`, `byte_sum_fragment`).
//
// What decides here is not the number of instructions but the pipe they take. On Hopper logic,
// shifts and PRMT share one half-rate pipe, IMAD and dp4a the other, so a shift may be cheaper as a
// multiplication by a power of two; the compiler would turn that back into a shift, which is why
// the powers come from memory (`DecodeConstants`). docs/kernels-cuda.md has the counts and the
// rates.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/forms.h"
#include "format/codebook.cuh"
#include "format/windows.cuh"

namespace exl3 {

// Which words of a tile a lane reads and how far they are shifted.
template <int kHalfBits>
struct LaneWords {
  using R = Rate<kHalfBits>;
  int last, previous, before;  // word indices; `before` only counts where three words are needed
  uint32_t shift;

  __device__ __forceinline__ explicit LaneWords(int lane) {
    last = R::lane_word(lane);
    previous = last == 0 ? R::words32 - 1 : last - 1;
    before = previous == 0 ? R::words32 - 1 : previous - 1;
    shift = static_cast<uint32_t>(R::lane_shift(lane));
  }
};

__device__ __forceinline__ uint32_t shift_pair(uint32_t low, uint32_t high, uint32_t shift) {
  return __funnelshift_r(low, high, shift);
}

// The 16 bits of `v` from bit kOffset on.
template <int kOffset, bool kMultiply>
__device__ __forceinline__ uint32_t cut(uint32_t v, const DecodeConstants& constants) {
  static_assert(kOffset >= 0 && kOffset <= 16);
  if constexpr (kOffset == 0) return v & 0xFFFFu;
  if constexpr (kOffset == 8) return __byte_perm(v, 0u, 0x4421u);
  if constexpr (kOffset == 16) return v >> 16;
  if constexpr (kMultiply) {
    uint32_t shifted;
    asm("mul.lo.u32 %0, %1, %2;" : "=r"(shifted) : "r"(v), "r"(constants.power[kOffset]));
    return shifted >> 16;
  }
  return (v >> kOffset) & 0xFFFFu;
}

// The lane's run in three registers: `low` holds its last 32 bits, `middle` the 32 before them.
struct AlignedRun {
  uint32_t low, middle, top;
};

template <int kHalfBits>
__device__ __forceinline__ AlignedRun align_run(uint32_t last, uint32_t previous, uint32_t before,
                                                uint32_t shift) {
  using R = Rate<kHalfBits>;
  if constexpr (kHalfBits == 8 || kHalfBits == 16) return {last, previous, before};
  const uint32_t low = shift_pair(last, previous, shift);
  if constexpr (R::span <= 32) return {low, 0, 0};
  if constexpr (R::lane_words == 2) return {low, previous >> shift, 0};
  return {low, shift_pair(previous, before, shift), before >> shift};
}

// States of the eight steps of a run. Offsets 0, 8 and 16 of a register take one instruction, all
// others two, so each rate has its own choice of intermediate registers.
template <int kHalfBits, bool kMultiply>
__device__ __forceinline__ void windows(const AlignedRun& run, const DecodeConstants& constants,
                                        uint32_t (&w)[8]) {
  const uint32_t low = run.low, middle = run.middle;
#define EXL3_CUT(register, offset) cut<offset, kMultiply>(register, constants)
  if constexpr (kHalfBits == 2) {
    w[7] = EXL3_CUT(low, 0), w[6] = EXL3_CUT(low, 1), w[5] = EXL3_CUT(low, 2);
    w[4] = EXL3_CUT(low, 3), w[3] = EXL3_CUT(low, 4), w[2] = EXL3_CUT(low, 5);
    w[1] = EXL3_CUT(low, 6), w[0] = EXL3_CUT(low, 7);
  } else if constexpr (kHalfBits == 3) {
    w[7] = EXL3_CUT(low, 0), w[6] = EXL3_CUT(low, 2), w[5] = EXL3_CUT(low, 3);
    w[4] = EXL3_CUT(low, 5), w[3] = EXL3_CUT(low, 6), w[2] = EXL3_CUT(low, 8);
    w[1] = EXL3_CUT(low, 9), w[0] = EXL3_CUT(low, 11);
  } else if constexpr (kHalfBits == 4) {
    const uint32_t a = low >> 2, b = low >> 4, c = low >> 6;
    w[7] = EXL3_CUT(low, 0), w[3] = EXL3_CUT(low, 8);
    w[6] = EXL3_CUT(a, 0), w[2] = EXL3_CUT(a, 8);
    w[5] = EXL3_CUT(b, 0), w[1] = EXL3_CUT(b, 8);
    w[4] = EXL3_CUT(c, 0), w[0] = EXL3_CUT(c, 8);
  } else if constexpr (kHalfBits == 5) {
    const uint32_t a = low >> 5, b = shift_pair(low, middle, 10);
    w[7] = EXL3_CUT(low, 0), w[6] = EXL3_CUT(low, 3), w[4] = EXL3_CUT(low, 8);
    w[1] = EXL3_CUT(low, 15);
    w[5] = EXL3_CUT(a, 0), w[2] = EXL3_CUT(a, 8);
    w[3] = EXL3_CUT(b, 0), w[0] = EXL3_CUT(b, 8);
  } else if constexpr (kHalfBits == 6) {
    const uint32_t a = shift_pair(low, middle, 12);
    w[7] = EXL3_CUT(low, 0), w[6] = EXL3_CUT(low, 3), w[5] = EXL3_CUT(low, 6);
    w[4] = EXL3_CUT(low, 9);
    w[3] = EXL3_CUT(a, 0), w[2] = EXL3_CUT(a, 3), w[1] = EXL3_CUT(a, 6), w[0] = EXL3_CUT(a, 9);
  } else if constexpr (kHalfBits == 7) {
    const uint32_t a = shift_pair(low, middle, 18);
    w[7] = EXL3_CUT(low, 0), w[6] = EXL3_CUT(low, 4), w[5] = EXL3_CUT(low, 7);
    w[4] = EXL3_CUT(low, 11), w[3] = EXL3_CUT(low, 14);
    w[2] = EXL3_CUT(a, 0), w[1] = EXL3_CUT(a, 3), w[0] = EXL3_CUT(a, 7);
  } else if constexpr (kHalfBits == 8) {
    const uint32_t a = shift_pair(low, middle, 4), b = shift_pair(low, middle, 24);
    w[7] = EXL3_CUT(low, 0), w[5] = EXL3_CUT(low, 8), w[3] = EXL3_CUT(low, 16);
    w[6] = EXL3_CUT(a, 0), w[4] = EXL3_CUT(a, 8), w[2] = EXL3_CUT(a, 16);
    w[1] = EXL3_CUT(b, 0), w[0] = EXL3_CUT(b, 4);
  } else if constexpr (kHalfBits == 10) {
    const uint32_t a = shift_pair(low, middle, 20);
    w[7] = EXL3_CUT(low, 0), w[6] = EXL3_CUT(low, 5), w[5] = EXL3_CUT(low, 10);
    w[4] = EXL3_CUT(low, 15);
    w[3] = EXL3_CUT(a, 0), w[2] = EXL3_CUT(a, 5), w[1] = EXL3_CUT(a, 10), w[0] = EXL3_CUT(a, 15);
  } else if constexpr (kHalfBits == 12) {
    const uint32_t a = shift_pair(low, middle, 24), b = shift_pair(low, middle, 18);
    w[7] = EXL3_CUT(low, 0), w[6] = EXL3_CUT(low, 6), w[5] = EXL3_CUT(low, 12);
    w[4] = EXL3_CUT(b, 0);
    w[3] = EXL3_CUT(a, 0), w[2] = EXL3_CUT(a, 6), w[1] = EXL3_CUT(a, 12);
    w[0] = EXL3_CUT(middle, 10);
  } else if constexpr (kHalfBits == 14) {
    const uint32_t a = shift_pair(low, middle, 28), b = shift_pair(low, middle, 21);
    const uint32_t c = shift_pair(middle, run.top, 17);
    w[7] = EXL3_CUT(low, 0), w[6] = EXL3_CUT(low, 7), w[5] = EXL3_CUT(low, 14);
    w[4] = EXL3_CUT(b, 0);
    w[3] = EXL3_CUT(a, 0), w[2] = EXL3_CUT(a, 7), w[1] = EXL3_CUT(a, 14);
    w[0] = EXL3_CUT(c, 0);
  } else {
    static_assert(kHalfBits == 16);
    const uint32_t a = shift_pair(low, middle, 24), b = shift_pair(middle, run.top, 24);
    w[7] = EXL3_CUT(low, 0), w[6] = EXL3_CUT(low, 8), w[5] = EXL3_CUT(low, 16);
    w[4] = EXL3_CUT(a, 0);
    w[3] = EXL3_CUT(middle, 0), w[2] = EXL3_CUT(middle, 8), w[1] = EXL3_CUT(middle, 16);
    w[0] = EXL3_CUT(b, 0);
  }
#undef EXL3_CUT
}

// Codebook products of the eight steps. At 4 and 8 bits two windows lie exactly 16 bits apart, so
// one register holds both; the upper one's product, moved up by 16, is what the product of the
// whole register has too much. That saves the mask of the lower one for one more multiplication.
template <int kHalfBits, Family kFamily>
__device__ __forceinline__ void products(const AlignedRun& run, const DecodeConstants& constants,
                                         uint32_t (&p)[8]) {
  if constexpr (kFamily == Family::kHalves && (kHalfBits == 8 || kHalfBits == 16)) {
    constexpr bool kFour = kHalfBits == 8;
    const uint32_t r[4] = {
        run.low, shift_pair(run.low, run.middle, kFour ? 4 : 8),
        kFour ? shift_pair(run.low, run.middle, 8) : run.middle,
        kFour ? shift_pair(run.low, run.middle, 12) : shift_pair(run.middle, run.top, 8)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int lower = kFour || i < 2 ? 7 - i : 5 - i;
      const int upper = kFour ? lower - 4 : lower - 2;
      p[upper] = (r[i] >> 16) * constants.multiplier + constants.addend;
      p[lower] = p[upper] * 0xFFFF0000u + (r[i] * constants.multiplier + constants.unmasked_addend);
    }
  } else {
    uint32_t w[8];
    windows<kHalfBits, kFamily == Family::kHalves>(run, constants, w);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      p[j] = kFamily == Family::kHalves ? w[j] * constants.multiplier + constants.addend
                                        : w[j] * CodebookMul1::kMultiplier;
    }
  }
}

// Two fp16 numbers of magnitude 1/8 to 2 whose sum is the weight.
__device__ __forceinline__ uint32_t masked_halves(uint32_t product) {
  uint32_t halves;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;"
      : "=r"(halves)
      : "r"(product), "n"(kHalvesMask), "n"(kHalvesFlip));
  return halves;
}

__device__ __forceinline__ uint32_t sum_of_bytes(uint32_t product, uint32_t addend) {
  return __dp4a(product, 0x01010101u, addend);
}

// The weights of two products as fp16 pair, rounded as the format says.
template <Family kFamily>
__device__ __forceinline__ uint32_t weight_pair(uint32_t p, uint32_t q) {
  uint32_t pair;
  if constexpr (kFamily == Family::kByteSum) {
    // 0x6400 is 1024, where fp16 counts in ones: 1024 + sum is an integer in the low bits.
    const uint32_t sums = __byte_perm(sum_of_bytes(p, 0x6400u), sum_of_bytes(q, 0x6400u), 0x5410u);
    asm("fma.rn.f16x2 %0, %1, %2, %3;"
        : "=r"(pair)
        : "r"(sums), "r"(0x1EEE1EEEu), "r"(0xC931C931u));
  } else {
    // Two scalar additions read the halves in place; packing them costs one PRMT instead of two.
    asm("{\n"
        ".reg .f16 a, b, c, d, e, f;\n"
        "mov.b32 {a, b}, %1;\n"
        "mov.b32 {c, d}, %2;\n"
        "add.f16 e, a, b;\n"
        "add.f16 f, c, d;\n"
        "mov.b32 %0, {e, f};\n"
        "}"
        : "=r"(pair)
        : "r"(masked_halves(p)), "r"(masked_halves(q)));
  }
  return pair;
}

// The A operand of m16n8k16 for one tile: 16 channels by 16 inputs, exact weights. Steps 0,1 | 4,5
// | 2,3 | 6,7 of a lane are the four registers of the operand.
template <int kHalfBits, Family kFamily>
__device__ __forceinline__ void exact_fragment(const AlignedRun& run,
                                               const DecodeConstants& constants, uint32_t (&a)[4]) {
  uint32_t p[8];
  products<kHalfBits, kFamily>(run, constants, p);
  a[0] = weight_pair<kFamily>(p[0], p[1]);
  a[1] = weight_pair<kFamily>(p[4], p[5]);
  a[2] = weight_pair<kFamily>(p[2], p[3]);
  a[3] = weight_pair<kFamily>(p[6], p[7]);
}

// Two A operands whose k entries are the two halves of one weight each: entries 2c, 2c+1 belong to
// input 2c in the first and 2c+1 in the second, so the activations have to be doubled likewise.
template <int kHalfBits>
__device__ __forceinline__ void two_term_fragment(const AlignedRun& run,
                                                  const DecodeConstants& constants,
                                                  uint32_t (&even)[4], uint32_t (&odd)[4]) {
  uint32_t p[8];
  products<kHalfBits, Family::kHalves>(run, constants, p);
  even[0] = masked_halves(p[0]), even[1] = masked_halves(p[4]);
  even[2] = masked_halves(p[2]), even[3] = masked_halves(p[6]);
  odd[0] = masked_halves(p[1]), odd[1] = masked_halves(p[5]);
  odd[2] = masked_halves(p[3]), odd[3] = masked_halves(p[7]);
}

// Byte sums, 0 to 1020, as fp16 subnormals in units of 2^-24: exact in the tensor cores.
template <int kHalfBits>
__device__ __forceinline__ void byte_sum_fragment(const AlignedRun& run,
                                                  const DecodeConstants& constants,
                                                  uint32_t (&a)[4]) {
  uint32_t p[8];
  products<kHalfBits, Family::kByteSum>(run, constants, p);
  const auto pair = [&](int j) {
    return __byte_perm(sum_of_bytes(p[j], 0u), sum_of_bytes(p[j + 1], 0u), 0x5410u);
  };
  a[0] = pair(0), a[1] = pair(4), a[2] = pair(2), a[3] = pair(6);
}

}  // namespace exl3
