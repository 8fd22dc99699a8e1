// Which matrix and tile of rows a unit of work belongs to, and how its k16 steps get into the ring.
#pragma once

#include <cstdint>

#include "device/instructions.cuh"
#include "device/partition.cuh"
#include "linear/gemm_fetch.cuh"
#include "moe/moe.h"

namespace exl3 {

// One block of 128 outputs of one expert for one tile of rows. The tiles of an expert take turns
// before the next block of outputs does, so that they find its weights in the L2.
struct MoeItem {
  int expert, tile, strip;
  int rows;  // of the tile that are there
};

template <class C>
__device__ __forceinline__ MoeItem moe_item(const MoeGemmParams& p, int item) {
  const int at = p.by_strips.divide(item);
  const int4 raw = __ldcg(reinterpret_cast<const int4*>(p.list) + at);
  const MoeTile entry{raw.x, raw.y, raw.z, raw.w};
  const int local = item - entry.first * p.strips;
  // Nearly always one tile: then there is nothing to divide.
  const int strip = entry.count == 1 ? local : local / entry.count;
  const int of_expert = local - strip * entry.count;
  const int rows = __ldcg(p.counts + entry.expert) - of_expert * C::kRows;
  return {entry.expert, entry.tile - (at - entry.first) + of_expert, strip,
          rows < C::kRows ? rows : C::kRows};
}

// The units of a launch, from what plan counted: an item's k16 steps, of gate and then of up where
// both are one product. Positions get equal shares, the last one what is left; the split depends on
// the routing, never on what a block finds out later.
struct MoeUnits {
  int item_steps;
  int total;  // the host has seen to it that 32 bits are enough
  int share;  // units of a position

  template <class C>
  static __device__ __forceinline__ MoeUnits of(const MoeGemmParams& p) {
    MoeUnits u;
    u.item_steps = p.k / 16 * (p.pair ? 2 : 1);
    const int items = __ldcg(p.list_count) * p.strips;
    u.total = items * u.item_steps;
    // Each group of warps shall find a step, and a block of outputs not fall into too many parts.
    constexpr int kParts = C::kRows <= 16 ? 12 : 6;
    u.share = max((u.total + p.positions - 1) / p.positions,
                  max(int{C::kGroups}, (u.item_steps + kParts - 1) / kParts));
    if (p.whole_strips) u.share = (items + p.positions - 1) / p.positions * u.item_steps;
    return u;
  }
  __device__ __forceinline__ int begin(int position) const { return position * share; }
  __device__ __forceinline__ int end(int position) const {
    return min(total, (position + 1) * share);
  }
  // The position that has a unit.
  __device__ __forceinline__ int owner_of(int unit) const { return unit / share; }
  __device__ __forceinline__ int positions() const {
    return total == 0 ? 0 : owner_of(total - 1) + 1;
  }
};

// As `Fetcher`, through the pieces of the items of the block's range.
template <class C>
struct MoeFetcher {
  const MoeGemmParams& p;
  int segment, end, left;
  const uint8_t *weights, *rows;

  __device__ __forceinline__ MoeFetcher(const MoeGemmParams& params, const UnitRange& range)
      : p(params), segment(range.begin), end(range.end), left(0), weights(nullptr), rows(nullptr) {}

  __device__ __forceinline__ void restart(int begin) { segment = begin, left = 0; }

  __device__ __forceinline__ void next_segment() {
    const int steps = p.k / 16, piece = p.by_steps.divide(segment);
    const int stop = min(end, (piece + 1) * steps);
    const UnitRange share = share_of_group<C>(segment, stop, C::fetching_group());
    const int half = p.pair ? piece & 1 : 0;
    const MoeItem item = moe_item<C>(p, p.pair ? piece >> 1 : piece);
    const int first_step = share.begin - piece * steps;
    const int64_t word = __ldg(reinterpret_cast<const long long*>(
        (half == 0 ? p.table[0] : p.table[1]) + int64_t{item.expert} * 2));
    left = share.end - share.begin;
    weights = p.weights + 2 * word + C::fetching_bytes() +
              (int64_t{item.strip} * steps + first_step) * C::kStepWeightBytes;
    rows = (half == 0 ? p.image[0] : p.image[1]) + item.tile * p.image_tile_bytes +
           C::fetching_bytes() + int64_t{first_step} * C::kStepRowBytes;
    segment = stop;
  }
  __device__ __forceinline__ bool ready() {
    while (left == 0 && segment < end) next_segment();
    return left > 0;
  }
  template <int kStepBytes_, int kStageBytes_, class Copy>
  __device__ __forceinline__ void copy(Copy&& copy_16) const {
    constexpr int kStride = C::kGroupThreads * 16;
    if (kStageBytes_ % kStride == 0 && left >= C::kStageSteps) {
#pragma unroll
      for (int i = 0; i < kStageBytes_; i += kStride) copy_16(i);
      return;
    }
    const int bytes =
        min(left, C::kStageSteps) * kStepBytes_ - static_cast<int>(C::fetching_bytes());
#pragma unroll
    for (int i = 0; i < kStageBytes_; i += kStride) {
      if (i < bytes) copy_16(i);
    }
  }
  // Few rows read each weight once; more tiles of an expert come back to it.
  __device__ __forceinline__ void fetch_weights(uint32_t stage) const {
    if constexpr (C::kRows <= 16) {
      const uint64_t policy = evict_first_policy();
      copy<C::kStepWeightBytes, C::kWeightBytes>(
          [&](int i) { copy_async_16(stage + i, weights + i, policy); });
    } else {
      copy<C::kStepWeightBytes, C::kWeightBytes>(
          [&](int i) { copy_async_16(stage + i, weights + i); });
    }
  }
  __device__ __forceinline__ void fetch_rows(uint32_t stage) const {
    copy<C::kStepRowBytes, C::kRowBytes>(
        [&](int i) { copy_async_16(stage + C::kWeightBytes + i, rows + i); });
  }
  __device__ __forceinline__ void advance() {
    weights += C::kWeightBytes;
    rows += C::kRowBytes;
    left = max(0, left - C::kStageSteps);
  }
};

}  // namespace exl3
