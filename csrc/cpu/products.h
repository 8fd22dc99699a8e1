// Constants for decoding products straight to binary32.
#pragma once

#include <cstdint>

namespace exl3::cpu {

// 3inst and mcg: a product's halves become binary16 numbers after AND 0x8FFF, XOR 0x3B60. The
// same numbers as binary32 come out directly when the half is brought to bits 31 (sign, kept by an
// arithmetic shift) and 24..13, and mask and constant are widened accordingly.
inline constexpr uint32_t kWideMask = 0x81FFE000u;
inline constexpr int32_t kWideXor = 0x3F6C0000;

// mul1: (1774 b - 905216) / 2^18 from the float 2^23 + b (the sum of bytes b added to the bits of
// 2^23). One fused multiply-add gives it exactly: both constants have at most 24 bits, and so has
// the result.
inline constexpr float kMul1Scale = 1774.0f / 262144.0f;
inline constexpr float kMul1Offset = -(56768.0f + 3.453125f);

}  // namespace exl3::cpu
