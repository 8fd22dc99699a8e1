// The search itself, written once over vectors of sixteen fp32 lanes; encode_<isa>.cpp supply them.
//
// Notation of the format: step i adds D(i) bits, so state(i) = (node before i) << D(i) | new bits,
// and the node after step i, which is the one before step i + 1, is its low 16 - D(i + 1) bits. A
// node's cost is that of the cheapest walk that ends there:
//
//   cost_out[e] = min over h of  cost_in[s >> D(i)] + (value[s] - x)^2,   s = h << (16 - D(i+1)) |
//   e
//
// No back pointers are written. Rows of node costs are kept every few steps instead; on the way
// back only the few hundred candidates that lead to the one known node are computed again, by the
// same operations, so the choice is the one the forward pass made.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cpu/encode.h"

namespace exl3::cpu {

inline constexpr int kSteps = 256;
inline constexpr int kStateBits = 16;
inline constexpr int kVector = 16;
inline constexpr size_t kAlignment = 64;

struct TableDeleter {
  void operator()(float* table) const;
};

// Codebook values ordered as one kind of step reads them: [out node / 16][branch][out node % 16],
// where a branch is a value of the D(i + 1) bits of the state that leave it next.
struct SearchTables {
  // Index 0: for steps that an even step follows; 1: for steps that an odd one follows.
  const float* by_next_parity[2];
  std::unique_ptr<float, TableDeleter> storage[2];

  // Value of a state of `step`, after which `leaving` bits leave it.
  float value(uint32_t state, int step, int leaving) const {
    const uint32_t branch = state >> (kStateBits - leaving);
    const uint32_t node = state & ((1u << (kStateBits - leaving)) - 1);
    return by_next_parity[(step + 1) % 2]
                         [((node / kVector << leaving) + branch) * kVector + node % kVector];
  }
};

// One entry point per instruction set.
SearchEntry search_portable(int tile_words);
SearchEntry search_avx2(int tile_words);
SearchEntry search_avx512(int tile_words);

// Every instruction set compiles its own copy of what follows.
namespace {

template <class V, int kEven, int kOdd>
class Search {
 public:
  // Steps between kept rows. Even, so that a row always precedes an even step, except where every
  // row is kept; the fan of states between two rows stays at 2^8 or so.
  static constexpr int kInterval = kEven + kOdd <= 2   ? 8
                                   : kEven + kOdd <= 4 ? 4
                                   : kEven + kOdd <= 8 ? 2
                                                       : 1;
  static_assert(kEven == kOdd || kInterval % 2 == 0);
  static_assert(kEven <= kOdd);

  static constexpr int bits(int step) { return step % 2 == 0 ? kEven : kOdd; }

  // Tiles searched at once, which share every load of a codebook value. With four of them, rows of
  // 16384 nodes and more no longer fit into a second-level cache of 1 MiB.
  static constexpr int kBlock = kEven <= 2 ? 2 : 4;
  static_assert(kEncodeBlock % kBlock == 0);

  // One vector of padding keeps the rows of a block's tiles off the same cache sets.
  static constexpr size_t kRowFloats = (size_t{1} << (kStateBits - kEven)) + kVector;
  static constexpr size_t kRows = kSteps / kInterval + 3;  // kept ones and two that alternate
  static constexpr size_t kScratchFloats = kRows * kRowFloats * kBlock;

  static void run(const SearchTables& tables, const float* tiles, int count, uint16_t* states,
                  float* scratch) {
    for (; count >= kBlock; count -= kBlock) {
      Search(tables, tiles, scratch).template search<kBlock>(states);
      tiles += kBlock * kSteps;
      states += kBlock * kSteps;
    }
    for (; count > 0; --count) {
      Search(tables, tiles, scratch).template search<1>(states);
      tiles += kSteps;
      states += kSteps;
    }
  }

 private:
  static constexpr int kHalf = kSteps / 2;
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  Search(const SearchTables& tables, const float* tiles, float* scratch)
      : tables_(tables), tiles_(tiles), scratch_(scratch) {}

  // Two passes close the ring: a free one that starts half way round finds the node to cross the
  // seam at, and one from that node to that node is the result.
  template <int kTiles>
  void search(uint16_t* states) {
    constexpr int kNodes = 1 << (kStateBits - kEven);  // before step 0 and before step 128
    uint16_t seam[kTiles];

    keep_from_ = kHalf;  // the way back ends at the seam
    for (int t = 0; t < kTiles; ++t) std::fill_n(row(0, t), kNodes, 0.0f);
    forward<kTiles>(kHalf);
    for (int t = 0; t < kTiles; ++t) {
      const float* last = row(kSteps, t);
      const int end = static_cast<int>(std::min_element(last, last + kNodes) - last);
      trace_back(kHalf, t, end, states + t * kSteps);
      seam[t] = static_cast<uint16_t>(states[t * kSteps] >> kEven);
    }

    keep_from_ = 0;
    for (int t = 0; t < kTiles; ++t) {
      std::fill_n(row(0, t), kNodes, kInfinity);
      row(0, t)[seam[t]] = 0.0f;
    }
    forward<kTiles>(0);
    for (int t = 0; t < kTiles; ++t) trace_back(0, t, seam[t], states + t * kSteps);
  }

  // The row of node costs before the `taken`-th step of a pass.
  float* row(int taken, int tile) const {
    const bool kept = taken >= keep_from_ && taken % kInterval == 0;
    const size_t slot = kept ? 2 + taken / kInterval : taken % 2;
    return scratch_ + (slot * kBlock + tile) * kRowFloats;
  }

  template <int kTiles>
  void forward(int start) const {
    for (int taken = 0; taken < kSteps; ++taken) {
      const int step = (start + taken) % kSteps;
      if (step % 2 == 0) {
        advance<kTiles, kEven, kOdd>(tables_.by_next_parity[1], taken, step);
      } else {
        advance<kTiles, kOdd, kEven>(tables_.by_next_parity[0], taken, step);
      }
    }
  }

  template <int kTiles, int kIn, int kOut>
  void advance(const float* table, int taken, int step) const {
    constexpr int kOutNodes = 1 << (kStateBits - kOut);
    const float* in[kTiles];
    float* out[kTiles];
    typename V::F x[kTiles];
    for (int t = 0; t < kTiles; ++t) {
      in[t] = row(taken, t);
      out[t] = row(taken + 1, t);
      x[t] = V::set1(tiles_[t * kSteps + step]);
    }
    for (int e = 0; e < kOutNodes; e += kVector) {
      typename V::F best[kTiles];
      for (int t = 0; t < kTiles; ++t) best[t] = V::set1(kInfinity);
#pragma GCC unroll 8
      for (int h = 0; h < 1 << kOut; ++h) {
        const typename V::F value = V::load(table + h * kVector);
        const int node = (h << (kStateBits - kOut) | e) >> kIn;
        for (int t = 0; t < kTiles; ++t) {
          const typename V::F error = V::sub(value, x[t]);
          best[t] = V::min(best[t], V::fma(error, error, V::template spread<kIn>(in[t] + node)));
        }
      }
      for (int t = 0; t < kTiles; ++t) V::store(out[t] + e, best[t]);
      table += kVector << kOut;
    }
  }

  // Writes the states of the walk that ends in node `end`, as far back as rows were kept.
  void trace_back(int start, int tile, int end, uint16_t* states) const {
    for (int from = kSteps - kInterval; from >= keep_from_; from -= kInterval) {
      end = trace_segment(start, from, tile, end, states);
    }
  }

  // Steps [from, from + kInterval) of a pass, whose row `from` is kept and whose end node is known.
  // Before step j of the segment the walk may be in nodes f << (16 - D - F) | (end >> bits taken
  // since), f any F = free[j] bits: everything below is indexed by f. Returns the node at `from`.
  int trace_segment(int start, int from, int tile, int end, uint16_t* states) const {
    int step[kInterval + 1], free[kInterval + 1], low[kInterval + 1];
    for (int j = 0; j <= kInterval; ++j) step[j] = (start + from + j) % kSteps;
    free[kInterval] = 0;
    low[kInterval] = end;
    for (int j = kInterval - 1; j >= 0; --j) {
      free[j] = free[j + 1] + bits(step[j + 1]);
      low[j] = low[j + 1] >> bits(step[j]);
    }

    float costs[2][kFan];
    uint8_t branch[kInterval][kFan];
    const float* kept = row(from, tile);
    const int shift = kStateBits - bits(step[0]) - free[0];
    for (int f = 0; f < 1 << free[0]; ++f) costs[0][f] = kept[f << shift | low[0]];

    for (int j = 0; j < kInterval; ++j) {
      const float* in = costs[j % 2];
      float* out = costs[(j + 1) % 2];
      const int leaving = bits(step[j + 1]);
      const float* table = tables_.by_next_parity[step[j + 1] % 2];
      const float x = tiles_[tile * kSteps + step[j]];
      for (int f = 0; f < 1 << free[j + 1]; ++f) {
        const int node = f << (kStateBits - free[j]) | low[j + 1];
        const float* values =
            table + (static_cast<size_t>(node / kVector) * kVector << leaving) + node % kVector;
        float best = kInfinity;
        int best_h = 0;
        for (int h = 0; h < 1 << leaving; ++h) {
          const float error = values[h * kVector] - x;
          const float cost = V::fma1(error, error, in[h << free[j + 1] | f]);
          best_h = cost < best ? h : best_h;
          best = cost < best ? cost : best;
        }
        out[f] = best;
        branch[j][f] = static_cast<uint8_t>(best_h);
      }
    }

    int f = 0;
    for (int j = kInterval - 1; j >= 0; --j) {
      f |= branch[j][f] << free[j + 1];
      states[step[j]] = static_cast<uint16_t>(f << (kStateBits - free[j]) | low[j + 1]);
    }
    return f << shift | low[0];
  }

  static constexpr int kFan = 1 << std::max(kInterval * std::max(kEven, kOdd), 8);

  const SearchTables& tables_;
  const float* tiles_;
  float* scratch_;
  int keep_from_ = 0;
};

template <class V, int kEven, int kOdd>
SearchEntry entry() {
  return {Search<V, kEven, kOdd>::run, Search<V, kEven, kOdd>::kScratchFloats};
}

template <class V>
SearchEntry search_entry(int tile_words) {
  switch (tile_words) {
    case 16:
      return entry<V, 1, 1>();
    case 24:
      return entry<V, 1, 2>();
    case 32:
      return entry<V, 2, 2>();
    case 40:
      return entry<V, 2, 3>();
    case 48:
      return entry<V, 3, 3>();
    case 56:
      return entry<V, 3, 4>();
    case 64:
      return entry<V, 4, 4>();
    case 80:
      return entry<V, 5, 5>();
    case 96:
      return entry<V, 6, 6>();
    case 112:
      return entry<V, 7, 7>();
    case 128:
      return entry<V, 8, 8>();
  }
  return {nullptr, 0};
}

}  // namespace
}  // namespace exl3::cpu
