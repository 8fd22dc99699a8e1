// Eight-lane vectors: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/products.h"

namespace exl3::cpu {
namespace {

struct LaneBits;
template <class V, int kHalfBits, int kGroup>
struct GatheredRun;
template <int kHalfBits>
void gather_lanes(const uint32_t* words, LaneBits& out);

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  static constexpr int kLanes = 8;
  static constexpr int kGemmRows = 3;  // 12 accumulators of 16 registers
  static constexpr int kGemmVectors = 4;

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F set1(float v) { return _mm256_set1_ps(v); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F quad(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }

  static F load_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static F load_bfloat(const uint16_t* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
  }

  template <int kStride>
  static F butterfly(F v) {
    F other, sign;
    const float n = -0.0f;
    if constexpr (kStride == 1) {
      other = _mm256_permute_ps(v, 0xB1);
      sign = _mm256_setr_ps(0, n, 0, n, 0, n, 0, n);
    } else if constexpr (kStride == 2) {
      other = _mm256_permute_ps(v, 0x4E);
      sign = _mm256_setr_ps(0, 0, n, n, 0, 0, n, n);
    } else {
      other = _mm256_permute2f128_ps(v, v, 1);
      sign = _mm256_setr_ps(0, 0, 0, 0, n, n, n, n);
    }
    return _mm256_add_ps(other, _mm256_xor_ps(v, sign));
  }

  static void store_quad_sums(float* out, F v) {
    v = _mm256_add_ps(v, _mm256_permute_ps(v, 0xB1));
    v = _mm256_add_ps(v, _mm256_permute_ps(v, 0x4E));
    out[0] = _mm256_cvtss_f32(v);
    out[1] = _mm_cvtss_f32(_mm256_extractf128_ps(v, 1));
  }

  // Round to nearest, ties to even; finite values only.
  static void store_bfloat(uint16_t* p, F v) {
    const I bits = _mm256_castps_si256(v);
    const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const I sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const I high = _mm256_srli_epi32(sum, 16);
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  // in[4 c + s], c < 16, to out[stride s + c].
  static void transpose_quads(const float* in, float* out, int stride) {
    for (int s = 0; s < 4; ++s) {
      for (int c = 0; c < 16; ++c) out[stride * s + c] = in[4 * c + s];
    }
  }

  static I load_bits(const uint32_t* p) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  }
  template <int kBits>
  static I shift_right(I v) {
    return _mm256_srli_epi32(v, kBits);
  }
  template <int kBits>
  static I shift_left(I v) {
    return _mm256_slli_epi32(v, kBits);
  }
  static I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
  static I low16(I v) { return _mm256_and_si256(v, _mm256_set1_epi32(0xFFFF)); }

  static I products(I window, uint32_t multiplier, uint32_t addend) {
    const I p = _mm256_mullo_epi32(window, _mm256_set1_epi32(static_cast<int>(multiplier)));
    return addend == 0 ? p : _mm256_add_epi32(p, _mm256_set1_epi32(static_cast<int>(addend)));
  }
  static F mul1_unrounded(I p) {
    const I pairs = _mm256_maddubs_epi16(p, _mm256_set1_epi8(1));  // at most 510: no saturation
    const I sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    const I biased = _mm256_or_si256(sums, _mm256_set1_epi32(0x4B000000));
    return fma(_mm256_castsi256_ps(biased), set1(kMul1Scale), set1(kMul1Offset));
  }
  static F high_half(I p) { return masked_half(_mm256_srai_epi32(p, 3)); }
  static F low_half(I p) { return masked_half(_mm256_srai_epi32(_mm256_slli_epi32(p, 16), 3)); }

  template <int kHalfBits, class Bits = LaneBits>
  static Bits open_tile(const uint32_t* words) {
    Bits lanes;
    gather_lanes<kHalfBits>(words, lanes);
    return lanes;
  }
  template <int kHalfBits, int kGroup>
  static auto read_run(const LaneBits& lanes) {
    return GatheredRun<Avx2, kHalfBits, kGroup>::read(lanes);
  }

 private:
  static F masked_half(I p) {
    const I masked = _mm256_and_si256(p, _mm256_set1_epi32(static_cast<int>(kWideMask)));
    return _mm256_castsi256_ps(_mm256_xor_si256(masked, _mm256_set1_epi32(kWideXor)));
  }
};

}  // namespace
}  // namespace exl3::cpu
