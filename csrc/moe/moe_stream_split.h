// How the route for few tokens deals out the work of a product, and where its sums are found again.
// Plain C++, host and device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moe/divisor.h"
#include "moe/moe_stream_limits.h"

namespace exl3 {

// How the work of a product is counted: unit = k16 step of a strip of a segment, in this order. A
// segment is one matrix of a tile: gate and then up, or down.
struct MoeStreamWork {
  int steps;   // k / 16
  int strips;  // blocks of 128 outputs of a matrix
  int halves;  // matrices of a tile: 2 or 1
  int least;   // units of a position, at least
  int positions;
  Divisor by_steps, by_strips, by_positions;

  EXL3_HOST_DEVICE int tile_of(int segment) const { return halves == 2 ? segment >> 1 : segment; }

  static MoeStreamWork of(int64_t k, int64_t n, int halves, int positions) {
    const auto steps = static_cast<int>(k / 16), strips = static_cast<int>(n / 128);
    return {steps,
            strips,
            halves,
            moe_stream_least(steps),
            positions,
            Divisor::of(static_cast<uint32_t>(steps)),
            Divisor::of(static_cast<uint32_t>(strips)),
            Divisor::of(static_cast<uint32_t>(positions))};
  }
};

// The units of a product and how they are dealt out: equal shares to positions, equal shares of
// those to warps, the last ones smaller.
struct MoeShares {
  int total, share;

  EXL3_HOST_DEVICE static MoeShares of(const MoeStreamWork& work, int tiles) {
    const int total = tiles * work.halves * work.strips * work.steps;
    return {total, std::max(work.by_positions.divide(total + work.positions - 1), work.least)};
  }
  EXL3_HOST_DEVICE int begin(int position) const { return std::min(total, position * share); }
  EXL3_HOST_DEVICE int end(int position) const { return std::min(total, (position + 1) * share); }
  EXL3_HOST_DEVICE static int of_warp(int units) {
    return (units + kStreamWarps - 1) / kStreamWarps;
  }
};

// Where the sums of strip s, counted over all segments, are to be found, rows of 128 each:
//   partials[(p + s) * rows + row]  of position p: the sum of its warps whose share ends in s,
//   ends[s * rows + row]            what a warp found of s whose share goes on into the next strip.
struct MoeParts {
  int first, count;  // positions
  bool goes_on;      // whether a warp has its end and more

  EXL3_HOST_DEVICE static MoeParts of(const MoeStreamWork& work, const MoeShares& shares,
                                      int strip) {
    const auto begin = static_cast<uint32_t>(strip * work.steps);
    const uint32_t last_unit = begin + work.steps - 1;
    const auto share = static_cast<uint32_t>(shares.share);
    const uint32_t first = begin / share, last = last_unit / share;
    const uint32_t from = last * share;
    const uint32_t units = shares.end(static_cast<int>(last)) - from;
    const uint32_t of_warp = MoeShares::of_warp(static_cast<int>(units));
    const uint32_t stop = std::min(((last_unit - from) / of_warp + 1) * of_warp, units);
    return {static_cast<int>(first), static_cast<int>(last - first) + 1,
            from + stop > last_unit + 1};
  }
};

}  // namespace exl3
