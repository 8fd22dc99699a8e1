// The trellis search on AVX-512.
#if defined(__AVX512F__)

// GCC takes the deliberately undefined pass-through operand in its own header for an oversight.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "cpu/encode_search.h"

namespace exl3::cpu {
namespace {

struct Avx512Costs {
  using F = __m512;
  static F load(const float* p) { return _mm512_load_ps(p); }
  static void store(float* p, F v) { _mm512_store_ps(p, v); }
  static F set1(float v) { return _mm512_set1_ps(v); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

  // Lane i gets node[i >> kBits]: the node that 2^kBits consecutive states share.
  template <int kBits>
  static F spread(const float* node) {
    if constexpr (kBits >= 4) return _mm512_set1_ps(*node);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(lane, kBits), _mm512_loadu_ps(node));
  }
};

}  // namespace

SearchEntry search_avx512(int tile_words) { return search_entry<Avx512Costs>(tile_words); }

}  // namespace exl3::cpu

#endif
