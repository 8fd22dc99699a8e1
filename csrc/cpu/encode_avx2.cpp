// The trellis search on AVX2 with FMA: sixteen lanes are two registers.
#if defined(__AVX2__)

#include <immintrin.h>

#include "cpu/encode_search.h"

namespace exl3::cpu {
namespace {

struct Avx2Costs {
  struct F {
    __m256 lo, hi;
  };
  static F load(const float* p) { return {_mm256_load_ps(p), _mm256_load_ps(p + 8)}; }
  static void store(float* p, F v) {
    _mm256_store_ps(p, v.lo);
    _mm256_store_ps(p + 8, v.hi);
  }
  static F set1(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
  static F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
  static F fma(F a, F b, F c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  static F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
  static float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

  // Lane i gets node[i >> kBits]: the node that 2^kBits consecutive states share.
  template <int kBits>
  static F spread(const float* node) {
    if constexpr (kBits >= 4) {
      return set1(*node);
    } else if constexpr (kBits == 3) {
      return {_mm256_set1_ps(node[0]), _mm256_set1_ps(node[1])};
    } else if constexpr (kBits == 2) {
      const __m256 nodes = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(node));
      return {_mm256_permutevar_ps(nodes, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)),
              _mm256_permutevar_ps(nodes, _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3))};
    } else {
      const __m256 nodes = _mm256_load_ps(node);
      return {_mm256_permutevar8x32_ps(nodes, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
              _mm256_permutevar8x32_ps(nodes, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
    }
  }
};

}  // namespace

SearchEntry search_avx2(int tile_words) { return search_entry<Avx2Costs>(tile_words); }

}  // namespace exl3::cpu

#endif
