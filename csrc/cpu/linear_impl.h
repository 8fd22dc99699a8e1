// The loops of exl3::linear, written once over a vector type V (vec_*.h) and instantiated in one
// source file per instruction set.
//
// Decoding follows the per-lane view of a tile: lane t holds the ring positions 8t..8t+7, position
// 8t + j is row 2 (t & 3) + (j & 1) + 8 ((j >> 1) & 1) and column (t >> 2) + 8 (j >> 2). A vector
// holds one j of neighbouring lanes: four rows times V::kLanes / 4 columns. It is multiplied with
// the four activations of those rows repeated over the lanes, so weights are never transposed; the
// four partial sums of a column meet only at the end.
#pragma once

#include <cstring>
#include <utility>

#include "cpu/half.h"
#include "cpu/kernels.h"
#include "format/windows.cuh"

#define EXL3_INLINE inline __attribute__((always_inline))

namespace exl3::cpu {
namespace {

template <class Fn, int... kIndex>
EXL3_INLINE void unroll_impl(Fn&& fn, std::integer_sequence<int, kIndex...>) {
  (fn(std::integral_constant<int, kIndex>{}), ...);
}
// fn(0), fn(1), .. with the index as a constant.
template <int kCount, class Fn>
EXL3_INLINE void unroll(Fn&& fn) {
  unroll_impl(fn, std::make_integer_sequence<int, kCount>{});
}

// RN to binary16 precision of a binary32 number in binary16's normal range (Veltkamp splitting at
// 11 bits); bit-identical to a conversion there and back for every codebook value.
template <class V>
EXL3_INLINE typename V::F round_to_half(typename V::F v) {
  const typename V::F scaled = V::mul(v, V::set1(8193.0f));
  return V::sub(scaled, V::sub(scaled, v));
}

template <class V, int kCodebook>
EXL3_INLINE typename V::F codebook_value(typename V::I window) {
  if constexpr (kCodebook == kMul1) {
    return round_to_half<V>(V::mul1_unrounded(V::products(window, CodebookMul1::kMultiplier, 0)));
  } else {
    const typename V::I p =
        kCodebook == kMcg ? V::products(window, CodebookMcg::kMultiplier, 0)
                          : V::products(window, Codebook3inst::kMultiplier, Codebook3inst::kAddend);
    return round_to_half<V>(V::add(V::high_half(p), V::low_half(p)));
  }
}

// The ring bits of all 32 lanes of a tile, right-aligned: bit 0 of bits[0][lane] is the lane's
// last.
struct LaneBits {
  alignas(64) uint32_t bits[3][exl3::kLanes];
};

// One function per rate, not inlined: it is most of the code of the narrower instruction sets.
template <int kHalfBits>
__attribute__((noinline)) void gather_lanes(const uint32_t* words, LaneBits& out) {
  using R = Rate<kHalfBits>;
  // Three words from the end of the tile in front, so that no index wraps around.
  uint32_t ring[3 + R::words32];
  std::memcpy(ring, words + R::words32 - 3, 3 * sizeof(uint32_t));
  std::memcpy(ring + 3, words, sizeof(uint32_t) * R::words32);
  for (int lane = 0; lane < exl3::kLanes; ++lane) {
    const uint32_t* last = ring + 3 + R::lane_word(lane);
    const int shift = R::lane_shift(lane);
    for (int part = 0; part < 3; ++part) {
      const uint64_t pair = static_cast<uint64_t>(last[-part - 1]) << 32 | last[-part];
      out.bits[part][lane] = static_cast<uint32_t>(pair >> shift);
    }
  }
}

// The general form of a group of lanes: windows are cut with vector shifts.
template <class V, int kHalfBits, int kGroup>
struct GatheredRun {
  using R = Rate<kHalfBits>;
  typename V::I lo, hi, top;

  static EXL3_INLINE GatheredRun read(const LaneBits& lanes) {
    constexpr int kFirst = V::kLanes * kGroup;
    return {V::load_bits(lanes.bits[0] + kFirst), V::load_bits(lanes.bits[1] + kFirst),
            V::load_bits(lanes.bits[2] + kFirst)};
  }

  template <int j>
  EXL3_INLINE typename V::I window() const {
    constexpr int kOff = R::window_offset(j), kUpper = kOff - 32;
    typename V::I w;
    if constexpr (kOff <= 16) {
      w = V::template shift_right<kOff>(lo);
    } else if constexpr (kOff < 32) {
      w = V::bit_or(V::template shift_right<kOff>(lo), V::template shift_left<32 - kOff>(hi));
    } else if constexpr (kOff <= 48) {
      w = V::template shift_right<kUpper>(hi);
    } else {
      w = V::bit_or(V::template shift_right<kUpper>(hi), V::template shift_left<32 - kUpper>(top));
    }
    return V::low16(w);
  }
};

// fn(group, j, values) for the 256 weights of one tile, `V::kLanes` at a time.
template <class V, int kHalfBits, int kCodebook, class Fn>
EXL3_INLINE void for_each_vector(const uint16_t* tile, Fn&& fn) {
  const auto* words = reinterpret_cast<const uint32_t*>(tile);
  const auto source = V::template open_tile<kHalfBits>(words);
  unroll<exl3::kLanes / V::kLanes>([&](auto group) {
    const auto run = V::template read_run<kHalfBits, decltype(group)::value>(source);
    unroll<8>([&](auto j) {
      fn(group, j, codebook_value<V, kCodebook>(run.template window<decltype(j)::value>()));
    });
  });
}

template <class V>
inline constexpr int kVectors = 64 / V::kLanes;  // accumulators of one row and one tile column

template <class V, int kHalfBits, int kCodebook>
void gemv(const float* x, const uint16_t* trellis, int64_t row_words, int64_t k_tiles, int tiles,
          float* rotated) {
  using F = typename V::F;
  constexpr int kGroups = 32 / V::kLanes, kTileWords = 8 * kHalfBits;
  constexpr int kMaxTiles = 16;
  // Tiles of one k-step are neighbours in memory, so the loop runs over k outside and keeps the
  // accumulators of up to 16 tile columns in L1.
  alignas(64) float acc[kMaxTiles][kAccFloats];
  while (tiles > 0) {
    const int width = tiles < kMaxTiles ? tiles : kMaxTiles;
    std::memset(acc, 0, sizeof(acc[0]) * static_cast<size_t>(width));
    for (int64_t a = 0; a < k_tiles; ++a) {
      const uint16_t* row = trellis + a * row_words;
      const F xq[4] = {V::quad(x + 16 * a), V::quad(x + 16 * a + 4), V::quad(x + 16 * a + 8),
                       V::quad(x + 16 * a + 12)};
      for (int c = 0; c < width; ++c) {
        const uint16_t* tile = row + c * kTileWords;
        // The next k-step starts a page or more away, where no hardware prefetcher follows.
        for (int line = 0; line < kTileWords; line += 32)
          __builtin_prefetch(tile + row_words + line);
        F sum[kVectors<V>];
        unroll<kVectors<V>>([&](auto i) { sum[i] = V::load(acc[c] + i * V::kLanes); });
        for_each_vector<V, kHalfBits, kCodebook>(tile, [&](auto group, auto j, F w) {
          constexpr int kJ = decltype(j)::value;
          constexpr int kIndex = (kJ >> 2) * kGroups + decltype(group)::value;
          sum[kIndex] = V::fma(xq[kJ & 3], w, sum[kIndex]);
        });
        unroll<kVectors<V>>([&](auto i) { V::store(acc[c] + i * V::kLanes, sum[i]); });
      }
    }
    for (int c = 0; c < width; ++c) {
      unroll<kVectors<V>>([&](auto i) {
        V::store_quad_sums(rotated + 16 * c + i * V::kLanes / 4, V::load(acc[c] + i * V::kLanes));
      });
    }
    rotated += 16 * width;
    trellis += width * kTileWords;
    tiles -= width;
  }
}

template <class V, int kHalfBits, int kCodebook>
void decode(const uint16_t* trellis, int64_t row_words, int64_t k_tiles, float* panel) {
  constexpr int kGroups = 32 / V::kLanes;
  for (int64_t a = 0; a < k_tiles; ++a, panel += 256) {
    for_each_vector<V, kHalfBits, kCodebook>(
        trellis + a * row_words, [&](auto group, auto j, typename V::F w) {
          constexpr int kJ = decltype(j)::value;
          constexpr int kIndex = (kJ >> 2) * kGroups + decltype(group)::value;
          V::store(panel + (kJ & 3) * kAccFloats + kIndex * V::kLanes, w);
        });
  }
}

template <class V, int kRows>
EXL3_INLINE void gemm_rows(const float* x, int64_t x_stride, const float* panel, int64_t k_tiles,
                           float* acc) {
  using F = typename V::F;
  constexpr int kWide = V::kGemmVectors;
  for (int first = 0; first < kVectors<V>; first += kWide) {
    F sum[kRows][kWide];
    unroll<kRows>([&](auto r) {
      unroll<kWide>(
          [&](auto i) { sum[r][i] = V::load(acc + r * kAccFloats + (first + i) * V::kLanes); });
    });
    for (int64_t step = 0; step < 4 * k_tiles; ++step) {
      const float* weights = panel + step * kAccFloats + first * V::kLanes;
      F w[kWide];
      unroll<kWide>([&](auto i) { w[i] = V::load(weights + i * V::kLanes); });
      unroll<kRows>([&](auto r) {
        const F xq = V::quad(x + r * x_stride + 4 * step);
        unroll<kWide>([&](auto i) { sum[r][i] = V::fma(xq, w[i], sum[r][i]); });
      });
    }
    unroll<kRows>([&](auto r) {
      unroll<kWide>(
          [&](auto i) { V::store(acc + r * kAccFloats + (first + i) * V::kLanes, sum[r][i]); });
    });
  }
}

template <class V>
void gemm(const float* x, int64_t x_stride, int64_t rows, const float* panel, int64_t k_tiles,
          float* acc) {
  constexpr int kRows = V::kGemmRows;
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    gemm_rows<V, kRows>(x + r * x_stride, x_stride, panel, k_tiles, acc + r * kAccFloats);
  }
  unroll<kRows>([&](auto left) {
    if constexpr (decltype(left)::value > 0) {
      if (rows - r == left) {
        gemm_rows<V, decltype(left)::value>(x + r * x_stride, x_stride, panel, k_tiles,
                                            acc + r * kAccFloats);
      }
    }
  });
}

template <class V>
void reduce(const float* acc, int64_t rows, float* rotated, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    unroll<kVectors<V>>([&](auto i) {
      V::store_quad_sums(rotated + r * stride + i * V::kLanes / 4,
                         V::load(acc + r * kAccFloats + i * V::kLanes));
    });
  }
}

// The butterfly stages between whole vectors.
template <class V, int kCount>
EXL3_INLINE void vector_stages(typename V::F (&v)[kCount]) {
  for (int stride = 1; stride < kCount; stride *= 2) {
    for (int i = 0; i < kCount; ++i) {
      if (i & stride) continue;
      const typename V::F a = v[i], b = v[i + stride];
      v[i] = V::add(a, b);
      v[i + stride] = V::sub(a, b);
    }
  }
}

// Unnormalised 128-point Walsh-Hadamard transform in natural order, strides 1, 2, 4, .. 64.
template <class V>
EXL3_INLINE void hadamard128(typename V::F (&v)[128 / V::kLanes]) {
  unroll<128 / V::kLanes>([&](auto i) {
    if constexpr (V::kLanes > 1) v[i] = V::template butterfly<1>(v[i]);
    if constexpr (V::kLanes > 2) v[i] = V::template butterfly<2>(v[i]);
    if constexpr (V::kLanes > 4) v[i] = V::template butterfly<4>(v[i]);
    if constexpr (V::kLanes > 8) v[i] = V::template butterfly<8>(v[i]);
  });
  vector_stages<V>(v);
}

template <class V>
void transform_in(const void* x, Dtype dtype, int begin, int end, const uint16_t* suh, float* out) {
  using F = typename V::F;
  constexpr int kLanes = V::kLanes;
  alignas(64) unsigned char padded[512];
  const size_t element = dtype == Dtype::kFloat32 ? 4 : 2;
  if (begin != 0 || end != 128) {
    std::memset(padded, 0, sizeof(padded));
    std::memcpy(padded + element * begin, x, element * static_cast<size_t>(end - begin));
    x = padded;
  }
  F v[128 / kLanes];
  for (int i = 0; i < 128 / kLanes; ++i) {
    const auto* half = static_cast<const uint16_t*>(x) + i * kLanes;
    const F value = dtype == Dtype::kFloat32   ? V::load(static_cast<const float*>(x) + i * kLanes)
                    : dtype == Dtype::kFloat16 ? V::load_half(half)
                                               : V::load_bfloat(half);
    v[i] = V::mul(value, V::load_half(suh + i * kLanes));
  }
  hadamard128<V>(v);
  alignas(64) float plain[128];
  for (int i = 0; i < 128 / kLanes; ++i) V::store(plain + i * kLanes, v[i]);
  for (int tile = 0; tile < 128; tile += 16) {
    for (int p = 0; p < 16; ++p) {
      out[tile + p] = plain[tile + 2 * (p & 3) + ((p >> 2) & 1) + 8 * (p >> 3)];
    }
  }
}

EXL3_INLINE float element_as_float(const void* data, Dtype dtype, int64_t i) {
  if (dtype == Dtype::kFloat32) return static_cast<const float*>(data)[i];
  if (dtype == Dtype::kFloat16) return static_cast<float>(static_cast<const Half*>(data)[i]);
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

EXL3_INLINE uint16_t bfloat_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

template <class V>
void transform_out(const float* rotated, const uint16_t* svh, const void* bias, Dtype bias_dtype,
                   int begin, int end, void* y, Dtype dtype) {
  using F = typename V::F;
  constexpr int kLanes = V::kLanes;
  F v[128 / kLanes];
  for (int i = 0; i < 128 / kLanes; ++i) v[i] = V::load(rotated + i * kLanes);
  hadamard128<V>(v);
  alignas(64) float out[128];
  for (int i = 0; i < 128 / kLanes; ++i) {
    const F scaled = V::mul(v[i], V::set1(1.0f / 128.0f));  // both transforms' 1 / sqrt(128)
    V::store(out + i * kLanes, V::mul(scaled, V::load_half(svh + i * kLanes)));
  }
  if (bias != nullptr) {
    for (int i = begin; i < end; ++i) out[i] += element_as_float(bias, bias_dtype, i - begin);
  }
  switch (dtype) {
    case Dtype::kFloat32:
      std::memcpy(y, out + begin, sizeof(float) * static_cast<size_t>(end - begin));
      break;
    case Dtype::kFloat16:
      for (int i = begin; i < end; ++i) {
        static_cast<Half*>(y)[i - begin] = static_cast<Half>(out[i]);
      }
      break;
    case Dtype::kBfloat16:
      for (int i = begin; i < end; ++i) {
        static_cast<uint16_t*>(y)[i - begin] = bfloat_from_float(out[i]);
      }
      break;
  }
}

template <class V, int kHalfBits, int kCodebook>
void add_rate(Kernels& table) {
  table.gemv[kCodebook][kHalfBits] = &gemv<V, kHalfBits, kCodebook>;
  table.decode[kCodebook][kHalfBits] = &decode<V, kHalfBits, kCodebook>;
}

template <class V>
Kernels make_kernels() {
  Kernels table{};
  table.transform_in = &transform_in<V>;
  table.transform_out = &transform_out<V>;
  table.gemm = &gemm<V>;
  table.reduce = &reduce<V>;
  unroll<8>([&](auto i) {
    constexpr int kHalfBits = 2 * decltype(i)::value + 2;
    add_rate<V, kHalfBits, k3inst>(table);
    add_rate<V, kHalfBits, kMcg>(table);
    add_rate<V, kHalfBits, kMul1>(table);
  });
  add_rate<V, 3, kMul1>(table);
  add_rate<V, 5, kMul1>(table);
  add_rate<V, 7, kMul1>(table);
  return table;
}

}  // namespace
}  // namespace exl3::cpu
