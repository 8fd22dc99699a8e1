// What host and device must agree on about decoding: families, forms, constants. Plain C++.
#pragma once

#include <cstdint>

namespace exl3 {

// 3inst and mcg differ in two constants only, so they are one family.
enum class Family : int { kHalves = 0, kByteSum = 1 };

// kExact gives the format's own fp16 weights. kFast leaves out their last rounding: the two halves
// of a product become two terms of the sum (kHalves), or the byte sum itself is multiplied and the
// affine map of the codebook follows after the sum over k (kByteSum).
enum class Form : int { kExact = 0, kFast = 1 };

struct DecodeConstants {
  uint32_t multiplier;
  uint32_t addend;
  uint32_t unmasked_addend;  // addend * (1 + 2^16), for products of two windows at once
  uint32_t power[17];        // power[o] = 2^(16 - o)
};

inline DecodeConstants decode_constants(uint32_t multiplier, uint32_t addend) {
  DecodeConstants constants{multiplier, addend, addend + (addend << 16), {}};
  for (int o = 0; o <= 16; ++o) constants.power[o] = 1u << (16 - o);
  return constants;
}

}  // namespace exl3
