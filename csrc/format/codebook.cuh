// The three EXL3 codebooks: a fixed function from a 16-bit state to an fp16 value.
//
// Torch-free; compiles with any C++20 compiler and with bare nvcc for host and device. Everything
// is integer or exact fp32 arithmetic followed by one rounding, so host, device and compile time
// give the same bits. Kernels may evaluate the values with other instructions (HADD2, dp4a, vector
// adds) as long as those bits stay; the constants are here once.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define EXL3_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define EXL3_HOST_DEVICE inline
#endif

namespace exl3 {

// An fp16 number whose exponent field is neither 0 nor 31, as fp32.
EXL3_HOST_DEVICE constexpr float normal_half_to_float(uint32_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  return __builtin_bit_cast(float, sign | (((half & 0x7FFFu) << 13) + (112u << 23)));
}

// Rounds to the nearest fp16 number, ties to even, and stays fp32. Right for zero and for
// 2^-14 <= |x| < 65520, where fp16 is fp32 with 13 mantissa bits less; no codebook value lies
// outside.
EXL3_HOST_DEVICE constexpr float round_to_half(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x);
  return __builtin_bit_cast(float, (u + 0xFFFu + ((u >> 13) & 1u)) & ~0x1FFFu);
}

// Bits of a number that is exactly an fp16 number, in the range of `round_to_half`.
EXL3_HOST_DEVICE constexpr uint16_t half_bits(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x);
  const uint32_t magnitude = u & 0x7FFFFFFFu;
  const uint32_t half = magnitude == 0 ? 0 : (magnitude >> 13) - (112u << 10);
  return static_cast<uint16_t>(((u >> 16) & 0x8000u) | half);
}

// Masking leaves each half of the product with a random sign and mantissa and an exponent field of
// 12 to 15, so the halves are fp16 numbers of magnitude 1/8 to 2 and their sum is exact in fp32.
inline constexpr uint32_t kHalvesMask = 0x8FFF8FFFu;
inline constexpr uint32_t kHalvesFlip = 0x3B603B60u;

EXL3_HOST_DEVICE constexpr float sum_of_halves(uint32_t product) {
  const uint32_t halves = (product & kHalvesMask) ^ kHalvesFlip;
  return round_to_half(normal_half_to_float(halves & 0xFFFFu) + normal_half_to_float(halves >> 16));
}

// Codebook policies. `kIndex` is the number the operators take; `value` and `bits` want a state of
// 16 bits with nothing above them, because higher bits would change the product.

struct Codebook3inst {
  static constexpr int kIndex = 0;
  static constexpr bool kHasHalfRates = false;
  static constexpr uint32_t kMultiplier = 89226354u;
  static constexpr uint32_t kAddend = 64248484u;

  EXL3_HOST_DEVICE static constexpr uint32_t product(uint32_t state) {
    return state * kMultiplier + kAddend;
  }
  EXL3_HOST_DEVICE static constexpr float value(uint32_t state) {
    return sum_of_halves(product(state));
  }
  EXL3_HOST_DEVICE static constexpr uint16_t bits(uint32_t state) {
    return half_bits(value(state));
  }
};

struct CodebookMcg {
  static constexpr int kIndex = 1;
  static constexpr bool kHasHalfRates = false;
  static constexpr uint32_t kMultiplier = 0xCBAC1FEDu;  // also what the marker tensor holds
  static constexpr uint32_t kAddend = 0;

  EXL3_HOST_DEVICE static constexpr uint32_t product(uint32_t state) { return state * kMultiplier; }
  EXL3_HOST_DEVICE static constexpr float value(uint32_t state) {
    return sum_of_halves(product(state));
  }
  EXL3_HOST_DEVICE static constexpr uint16_t bits(uint32_t state) {
    return half_bits(value(state));
  }
};

struct CodebookMul1 {
  static constexpr int kIndex = 2;
  static constexpr bool kHasHalfRates = true;
  static constexpr uint32_t kMultiplier = 0x83DCD12Du;  // also what the marker tensor holds
  static constexpr uint32_t kAddend = 0;
  // value = (kSlope * byte sum + kOffset) / 2^18, rounded once to fp16. The numerator has 20 bits,
  // so fp32 holds it exactly. In fp16 terms: fma(1024 + byte sum, 0x1EEE, 0xC931).
  static constexpr int32_t kSlope = 1774;
  static constexpr int32_t kOffset = -905216;
  static constexpr float kUnit = 1.0f / (1 << 18);

  EXL3_HOST_DEVICE static constexpr uint32_t product(uint32_t state) { return state * kMultiplier; }
  EXL3_HOST_DEVICE static constexpr int32_t byte_sum(uint32_t product) {
    const uint32_t pairs = (product & 0x00FF00FFu) + ((product >> 8) & 0x00FF00FFu);
    return static_cast<int32_t>((pairs & 0xFFFFu) + (pairs >> 16));
  }
  EXL3_HOST_DEVICE static constexpr float value(uint32_t state) {
    const int32_t numerator = kSlope * byte_sum(product(state)) + kOffset;
    return round_to_half(static_cast<float>(numerator) * kUnit);
  }
  EXL3_HOST_DEVICE static constexpr uint16_t bits(uint32_t state) {
    return half_bits(value(state));
  }
};

static_assert(CodebookMul1::kSlope * 1020 + CodebookMul1::kOffset < (1 << 24) &&
                  -CodebookMul1::kOffset < (1 << 24),
              "the numerator must be exact in fp32");

}  // namespace exl3
