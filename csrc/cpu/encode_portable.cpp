// The trellis search in the compiler's own vectors: SSE2 on x86-64, NEON on aarch64.
#include <cstring>

#include "cpu/encode_search.h"

namespace exl3::cpu {
namespace {

struct PortableCosts {
  struct F {
    float lane[kVector];
  };
  static F load(const float* p) {
    F v;
    std::memcpy(v.lane, p, sizeof v.lane);
    return v;
  }
  static void store(float* p, const F& v) { std::memcpy(p, v.lane, sizeof v.lane); }
  static F set1(float v) {
    F r;
    for (float& lane : r.lane) lane = v;
    return r;
  }
  static F sub(const F& a, const F& b) {
    F r;
    for (int i = 0; i < kVector; ++i) r.lane[i] = a.lane[i] - b.lane[i];
    return r;
  }
  static F fma(const F& a, const F& b, const F& c) {
    F r;
    for (int i = 0; i < kVector; ++i) r.lane[i] = fma1(a.lane[i], b.lane[i], c.lane[i]);
    return r;
  }
  static F min(const F& a, const F& b) {
    F r;
    for (int i = 0; i < kVector; ++i) r.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return r;
  }
  // Fused only where that is one instruction; elsewhere it would be a library call.
  static float fma1(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
  }

  // Lane i gets node[i >> kBits]: the node that 2^kBits consecutive states share.
  template <int kBits>
  static F spread(const float* node) {
    F r;
    for (int i = 0; i < kVector; ++i) r.lane[i] = node[i >> kBits];
    return r;
  }
};

}  // namespace

SearchEntry search_portable(int tile_words) { return search_entry<PortableCosts>(tile_words); }

}  // namespace exl3::cpu
