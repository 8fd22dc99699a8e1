// Sixteen-lane vectors: AVX-512 with VBMI2 and VNNI.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <type_traits>

#include "cpu/products.h"
#include "format/windows.cuh"

namespace exl3::cpu {
namespace {

template <int kHalfBits, int kGroup>
struct Avx512Run;

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  static constexpr int kLanes = 16;
  static constexpr int kGemmRows = 6;     // 24 accumulators, 4 weights and one activation: 29 of
  static constexpr int kGemmVectors = 4;  // the 32 registers

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F set1(float v) { return _mm512_set1_ps(v); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  // p[0..3] repeated over the lanes.
  static F quad(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }

  static F load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_bfloat(const uint16_t* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
  }

  template <int kStride>
  static F butterfly(F v) {
    F other;
    if constexpr (kStride == 1) other = _mm512_permute_ps(v, 0xB1);
    if constexpr (kStride == 2) other = _mm512_permute_ps(v, 0x4E);
    if constexpr (kStride == 4) other = _mm512_shuffle_f32x4(v, v, 0xB1);
    if constexpr (kStride == 8) other = _mm512_shuffle_f32x4(v, v, 0x4E);
    constexpr __mmask16 kUpper =
        kStride == 1 ? 0xAAAA : (kStride == 2 ? 0xCCCC : (kStride == 4 ? 0xF0F0 : 0xFF00));
    // a + b below, a - b above; negation is exact, so this is one rounding like the scalar form.
    const F negated = _mm512_mask_xor_ps(v, kUpper, v, _mm512_set1_ps(-0.0f));
    return _mm512_add_ps(other, negated);
  }

  // Sums of four neighbouring lanes, ((0+1)+(2+3)): four results.
  static void store_quad_sums(float* out, F v) {
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xB1));
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4E));
    const __m512i pick = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(pick, v)));
  }

  // Round to nearest, ties to even; finite values only.
  static void store_bfloat(uint16_t* p, F v) {
    const I bits = _mm512_castps_si512(v);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const I sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
  }
  // in[4 c + s], c < 16, to out[stride s + c].
  static void transpose_quads(const float* in, float* out, int stride) {
    const F z0 = load(in), z1 = load(in + 16), z2 = load(in + 32), z3 = load(in + 48);
    const F a = _mm512_unpacklo_ps(z0, z1), b = _mm512_unpackhi_ps(z0, z1);
    const F c = _mm512_unpacklo_ps(z2, z3), d = _mm512_unpackhi_ps(z2, z3);
    // Each row now has its columns in the order (c mod 4, c / 4); one permutation mends that.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const F rows[4] = {_mm512_shuffle_ps(a, c, 0x44), _mm512_shuffle_ps(a, c, 0xEE),
                       _mm512_shuffle_ps(b, d, 0x44), _mm512_shuffle_ps(b, d, 0xEE)};
    for (int s = 0; s < 4; ++s) store(out + stride * s, _mm512_permutexvar_ps(order, rows[s]));
  }

  static I products(I window, uint32_t multiplier, uint32_t addend) {
    const I p = _mm512_mullo_epi32(window, _mm512_set1_epi32(static_cast<int>(multiplier)));
    return addend == 0 ? p : _mm512_add_epi32(p, _mm512_set1_epi32(static_cast<int>(addend)));
  }
  // (1774 b - 905216) / 2^18, exactly, b = sum of the four bytes: mul1 before its rounding. The sum
  // is formed as the float 2^23 + b; see products.h.
  static F mul1_unrounded(I p) {
    const I sum = _mm512_dpbusd_epi32(_mm512_set1_epi32(0x4B000000), p, _mm512_set1_epi8(1));
    return fma(_mm512_castsi512_ps(sum), set1(kMul1Scale), set1(kMul1Offset));
  }
  // Both binary16 halves of ((p & mask) ^ constant), widened; see products.h.
  static F high_half(I p) { return masked_half(_mm512_srai_epi32(p, 3)); }
  static F low_half(I p) { return masked_half(_mm512_srai_epi32(_mm512_slli_epi32(p, 16), 3)); }

  template <int kHalfBits>
  static const uint32_t* open_tile(const uint32_t* words) {
    return words;
  }
  template <int kHalfBits, int kGroup>
  static Avx512Run<kHalfBits, kGroup> read_run(const uint32_t* words) {
    return Avx512Run<kHalfBits, kGroup>::read(words);
  }

 private:
  static F masked_half(I p) {
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        p, _mm512_set1_epi32(static_cast<int>(kWideMask)), _mm512_set1_epi32(kWideXor), 0x6A));
  }
};

// The ring bits of 16 lanes of one tile, right-aligned: bit 0 of `lo` is the last bit of the lane.
template <int kHalfBits, int kGroup>
struct Avx512Run {
  using R = Rate<kHalfBits>;
  __m512i lo, hi, top;

  // Positions, in the 32 dwords that `read` gathers, of each lane's word `kBack` before its last.
  template <int kBack>
  static __m512i index() {
    alignas(64) static constexpr auto kValue = [] {
      std::array<int32_t, 16> value{};
      for (int i = 0; i < 16; ++i) {
        value[i] = R::lane_word(16 * kGroup + i) - kBack - (R::words32 * kGroup / 2 - 3);
      }
      return value;
    }();
    return _mm512_load_si512(kValue.data());
  }
  static __m512i shifts() {
    alignas(64) static constexpr auto kValue = [] {
      std::array<int32_t, 16> value{};
      for (int i = 0; i < 16; ++i) value[i] = R::lane_shift(16 * kGroup + i);
      return value;
    }();
    return _mm512_load_si512(kValue.data());
  }
  // kCount dwords from `words`, the rest zero; never reads past the tile.
  template <int kCount>
  static __m512i load(const uint32_t* words) {
    constexpr __mmask16 kMask = kCount >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << kCount) - 1);
    if constexpr (kCount >= 16) return _mm512_loadu_si512(words);
    return _mm512_maskz_loadu_epi32(kMask, words);
  }

  static Avx512Run read(const uint32_t* words) {
    // a and b hold the 32 dwords that start three before the first one of this group of lanes;
    // the first group wraps around to the end of the tile (tail-biting).
    constexpr int kHalfTile = R::words32 / 2;
    __m512i a, b = _mm512_setzero_si512();
    if constexpr (kGroup == 0) {
      const __m512i first = load<(kHalfTile < 16 ? kHalfTile : 16)>(words);
      const __m512i tail = _mm512_maskz_loadu_epi32(0xE000, words + R::words32 - 16);
      a = _mm512_alignr_epi32(first, tail, 13);
      if constexpr (kHalfTile > 13) {
        const __m512i second = load<(kHalfTile > 16 ? kHalfTile - 16 : 0)>(words + 16);
        b = _mm512_alignr_epi32(second, first, 13);
      }
    } else {
      constexpr int kFrom = kHalfTile - 3, kLeft = R::words32 - kFrom;
      a = load<(kLeft < 16 ? kLeft : 16)>(words + kFrom);
      if constexpr (kLeft > 16) b = load<kLeft - 16>(words + kFrom + 16);
    }
    const auto pick = [&](auto back) {
      constexpr int kBack = decltype(back)::value;
      if constexpr (kHalfTile + 3 <= 16) return _mm512_permutexvar_epi32(index<kBack>(), a);
      return _mm512_permutex2var_epi32(a, index<kBack>(), b);
    };
    const __m512i s = shifts(), w0 = pick(std::integral_constant<int, 0>{}),
                  w1 = pick(std::integral_constant<int, 1>{}),
                  w2 = pick(std::integral_constant<int, 2>{});
    Avx512Run run;
    run.lo = _mm512_shrdv_epi32(w0, w1, s);
    run.hi = _mm512_shrdv_epi32(w1, w2, s);
    if constexpr (R::span > 64) {
      run.top = _mm512_shrdv_epi32(w2, pick(std::integral_constant<int, 3>{}), s);
    }
    return run;
  }

  template <int j>
  __m512i window() const {
    constexpr int kOff = R::window_offset(j);
    __m512i w;
    if constexpr (kOff == 0) {
      w = lo;
    } else if constexpr (kOff <= 16) {
      w = _mm512_srli_epi32(lo, kOff);
    } else if constexpr (kOff < 32) {
      w = _mm512_shrdi_epi32(lo, hi, kOff);
    } else if constexpr (kOff == 32) {
      w = hi;
    } else if constexpr (kOff <= 48) {
      w = _mm512_srli_epi32(hi, kOff - 32);
    } else {
      w = _mm512_shrdi_epi32(hi, top, kOff - 32);
    }
    if constexpr (kOff == 16 || kOff == 48) return w;  // the shift left zeros above
    return _mm512_and_si512(w, _mm512_set1_epi32(0xFFFF));
  }
};

// 8 bits: 64 dwords a tile, every lane two whole ones.
template <int kGroup>
struct Avx512Run<16, kGroup> {
  using R = Rate<16>;
  __m512i lo, hi, top;

  static Avx512Run read(const uint32_t* words) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512i a = _mm512_loadu_si512(words + 32 * kGroup);
    const __m512i b = _mm512_loadu_si512(words + 32 * kGroup + 16);
    // Only its last dword is used: the one before this group, around the end for the first.
    const __m512i before = _mm512_maskz_loadu_epi32(0x8000, words + (kGroup == 0 ? 48 : 16));
    Avx512Run run;
    run.lo = _mm512_permutex2var_epi32(a, odd, b);
    run.hi = _mm512_permutex2var_epi32(a, even, b);
    run.top = _mm512_alignr_epi32(run.lo, before, 15);
    return run;
  }

  template <int j>
  __m512i window() const {
    constexpr int kOff = R::window_offset(j);
    __m512i w;
    if constexpr (kOff == 0) w = lo;
    if constexpr (kOff == 8 || kOff == 16) w = _mm512_srli_epi32(lo, kOff);
    if constexpr (kOff == 24) w = _mm512_shrdi_epi32(lo, hi, 24);
    if constexpr (kOff == 32) w = hi;
    if constexpr (kOff == 40 || kOff == 48) w = _mm512_srli_epi32(hi, kOff - 32);
    if constexpr (kOff == 56) w = _mm512_shrdi_epi32(hi, top, 24);
    return _mm512_and_si512(w, _mm512_set1_epi32(0xFFFF));
  }
};

}  // namespace
}  // namespace exl3::cpu
