// Rebuilding one 128 x 128 block of the weight in the original basis, for the dense route: many
// rows of bfloat16 pay for it, because the machine multiplies bfloat16 faster than fp32.
#pragma once

#include "cpu/linear_impl.h"

namespace exl3::cpu {
namespace {

// Butterflies among `kCount` vectors `stride` floats apart.
template <class V, int kCount>
EXL3_INLINE void butterflies(float* base, int64_t stride) {
  using F = typename V::F;
  F v[kCount];
  unroll<kCount>([&](auto i) { v[i] = V::load(base + i * stride); });
  vector_stages<V>(v);
  unroll<kCount>([&](auto i) { V::store(base + i * stride, v[i]); });
}

// The stages of both transforms that stay inside one decoded tile: 16 rows and 16 columns. Order of
// the 256 floats as Kernels::decode leaves them: 64 q + 4 c + s.
template <class V>
EXL3_INLINE void tile_stages(float* tile) {
  using F = typename V::F;
  constexpr int kLanes = V::kLanes;
  for (int at = 0; at < 64; at += kLanes) butterflies<V, 4>(tile + at, 64);  // q: rows 1 and 8
  for (int q = 0; q < 4; ++q) {
    float* part = tile + 64 * q;
    for (int at = 0; at < 64; at += kLanes) {
      F v = V::load(part + at);
      v = V::template butterfly<1>(v);  // s: rows 2 and 4
      v = V::template butterfly<2>(v);
      if constexpr (kLanes > 4) v = V::template butterfly<4>(v);  // columns 1, 2, ..
      if constexpr (kLanes > 8) v = V::template butterfly<8>(v);
      V::store(part + at, v);
    }
    constexpr int kCount = 64 / kLanes;  // the columns that lie in different vectors
    for (int stride = kLanes; stride < 64; stride *= 2) {
      for (int i = 0; i < kCount; ++i) {
        const int at = i * kLanes;
        if (at & stride) continue;
        const F a = V::load(part + at), b = V::load(part + at + stride);
        V::store(part + at, V::add(a, b));
        V::store(part + at + stride, V::sub(a, b));
      }
    }
  }
}

template <class V>
void rebuild_block(float* block, const uint16_t* suh, const uint16_t* svh, int row_begin,
                   int row_end, int column_begin, int column_end, uint16_t* out,
                   int64_t out_stride) {
  constexpr int kLanes = V::kLanes;
  constexpr int64_t kColumnFloats = 8 * 256;  // one tile column: 8 tiles along k
  for (int c = 0; c < 8; ++c) {
    float* column = block + c * kColumnFloats;
    for (int at = 0; at < 256; at += kLanes) butterflies<V, 8>(column + at, 256);
    for (int a = 0; a < 8; ++a) tile_stages<V>(column + 256 * a);
  }
  for (int64_t at = 0; at < kColumnFloats; at += kLanes) {
    butterflies<V, 8>(block + at, kColumnFloats);
  }
  alignas(64) float column_scale[128], rows[4][128];
  alignas(64) uint16_t rounded[128];
  for (int i = 0; i < 128; i += kLanes) {
    V::store(column_scale + i, V::mul(V::load_half(svh + i), V::set1(1.0f / 128.0f)));
  }
  alignas(64) float row_scale[128];
  for (int i = 0; i < 128; i += kLanes) V::store(row_scale + i, V::load_half(suh + i));
  for (int a = 0; a < 8; ++a) {
    for (int q = 0; q < 4; ++q) {
      for (int c = 0; c < 8; ++c) {
        V::transpose_quads(block + c * kColumnFloats + 256 * a + 64 * q, &rows[0][16 * c], 128);
      }
      for (int s = 0; s < 4; ++s) {
        const int row = 16 * a + 2 * s + (q & 1) + 8 * (q >> 1);
        if (row < row_begin || row >= row_end) continue;
        const typename V::F scale = V::set1(row_scale[row]);
        for (int i = 0; i < 128; i += kLanes) {
          const typename V::F w = V::mul(V::load(rows[s] + i), V::load(column_scale + i));
          V::store_bfloat(rounded + i, V::mul(w, scale));
        }
        std::memcpy(out + (row - row_begin) * out_stride, rounded + column_begin,
                    sizeof(uint16_t) * static_cast<size_t>(column_end - column_begin));
      }
    }
  }
}

}  // namespace
}  // namespace exl3::cpu
