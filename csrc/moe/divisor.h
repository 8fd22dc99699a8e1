// Division by a number that the host knows. Plain C++, host and device.
#pragma once

#include <cstdint>

#include "format/codebook.cuh"

namespace exl3 {

// For numbers below 2^31. Code that runs once costs by the instruction, and this is three.
struct Divisor {
  uint32_t magic, shift;

  static Divisor of(uint32_t divisor) {
    uint32_t shift = 0;
    while ((uint64_t{1} << shift) < divisor) ++shift;
    const uint64_t excess = (uint64_t{1} << shift) - divisor;
    return {static_cast<uint32_t>((excess << 32) / divisor + 1), shift};
  }
  EXL3_HOST_DEVICE int divide(int n) const {
    const auto high = static_cast<uint32_t>((uint64_t{magic} * static_cast<uint32_t>(n)) >> 32);
    return static_cast<int>((high + static_cast<uint32_t>(n)) >> shift);
  }
};

}  // namespace exl3
