// Four lanes in plain C++, for processors without a path of their own. Fused multiply-add is
// replaced by multiply and add: it would be a library call here.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "cpu/half.h"
#include "cpu/products.h"

namespace exl3::cpu {
namespace {

struct LaneBits;
template <class V, int kHalfBits, int kGroup>
struct GatheredRun;
template <int kHalfBits>
void gather_lanes(const uint32_t* words, LaneBits& out);

struct Portable {
  using F = std::array<float, 4>;
  using I = std::array<uint32_t, 4>;
  static constexpr int kLanes = 4;
  static constexpr int kGemmRows = 2;
  static constexpr int kGemmVectors = 4;

  template <class T, class Fn>
  static T each(Fn&& fn) {
    return T{fn(0), fn(1), fn(2), fn(3)};
  }
  static F load(const float* p) { return {p[0], p[1], p[2], p[3]}; }
  static void store(float* p, F v) { std::memcpy(p, v.data(), sizeof(v)); }
  static F set1(float v) { return {v, v, v, v}; }
  static F add(F a, F b) {
    return each<F>([&](int i) { return a[i] + b[i]; });
  }
  static F sub(F a, F b) {
    return each<F>([&](int i) { return a[i] - b[i]; });
  }
  static F mul(F a, F b) {
    return each<F>([&](int i) { return a[i] * b[i]; });
  }
  static F fma(F a, F b, F c) { return add(mul(a, b), c); }
  static F quad(const float* p) { return load(p); }

  static F load_half(const uint16_t* p) {
    Half half[4];
    std::memcpy(half, p, sizeof(half));
    return each<F>([&](int i) { return static_cast<float>(half[i]); });
  }
  static F load_bfloat(const uint16_t* p) {
    return as_float(each<I>([&](int i) { return static_cast<uint32_t>(p[i]) << 16; }));
  }

  template <int kStride>
  static F butterfly(F v) {
    return each<F>(
        [&](int i) { return i & kStride ? v[i - kStride] - v[i] : v[i] + v[i + kStride]; });
  }
  static void store_quad_sums(float* out, F v) { *out = (v[0] + v[1]) + (v[2] + v[3]); }

  // Round to nearest, ties to even; finite values only.
  static void store_bfloat(uint16_t* p, F v) {
    I bits;
    std::memcpy(bits.data(), v.data(), sizeof(bits));
    for (int i = 0; i < 4; ++i) {
      p[i] = static_cast<uint16_t>((bits[i] + 0x7FFF + (bits[i] >> 16 & 1)) >> 16);
    }
  }
  // in[4 c + s], c < 16, to out[stride s + c].
  static void transpose_quads(const float* in, float* out, int stride) {
    for (int s = 0; s < 4; ++s) {
      for (int c = 0; c < 16; ++c) out[stride * s + c] = in[4 * c + s];
    }
  }

  static I load_bits(const uint32_t* p) { return {p[0], p[1], p[2], p[3]}; }
  template <int kBits>
  static I shift_right(I v) {
    return each<I>([&](int i) { return v[i] >> kBits; });
  }
  template <int kBits>
  static I shift_left(I v) {
    return each<I>([&](int i) { return v[i] << kBits; });
  }
  static I bit_or(I a, I b) {
    return each<I>([&](int i) { return a[i] | b[i]; });
  }
  static I low16(I v) {
    return each<I>([&](int i) { return v[i] & 0xFFFF; });
  }

  static I products(I window, uint32_t multiplier, uint32_t addend) {
    return each<I>([&](int i) { return window[i] * multiplier + addend; });
  }
  static F mul1_unrounded(I p) {
    return each<F>([&](int i) {
      const uint32_t pairs = (p[i] & 0x00FF00FF) + (p[i] >> 8 & 0x00FF00FF);
      const auto sum = static_cast<int32_t>((pairs & 0xFFFF) + (pairs >> 16));
      return static_cast<float>(1774 * sum - 905216) * 0x1p-18f;
    });
  }
  static F high_half(I p) { return masked_half(p); }
  static F low_half(I p) { return masked_half(shift_left<16>(p)); }

  template <int kHalfBits, class Bits = LaneBits>
  static Bits open_tile(const uint32_t* words) {
    Bits lanes;
    gather_lanes<kHalfBits>(words, lanes);
    return lanes;
  }
  template <int kHalfBits, int kGroup>
  static auto read_run(const LaneBits& lanes) {
    return GatheredRun<Portable, kHalfBits, kGroup>::read(lanes);
  }

 private:
  static F as_float(I bits) {
    F v;
    std::memcpy(v.data(), bits.data(), sizeof(v));
    return v;
  }
  static F masked_half(I p) {
    return as_float(each<I>([&](int i) {
      const auto moved = static_cast<uint32_t>(static_cast<int32_t>(p[i]) >> 3);
      return (moved & kWideMask) ^ static_cast<uint32_t>(kWideXor);
    }));
  }
};

}  // namespace
}  // namespace exl3::cpu
