// What every block of the route for few tokens finds out by itself: tiles of rows, and its share.
#pragma once

#include <climits>
#include <cstdint>

#include "moe/moe_routing.cuh"
#include "moe/moe_stream.h"

namespace exl3 {

// Tiles in the order of their experts; rows of an expert in the order of their pairs.
struct alignas(16) MoeRoute {
  int expert_of_pair[kMoeStreamPairs];
  int key[kMoeStreamPairs];    // while it is made: the expert of a pair that begins a tile
  int place[kMoeStreamPairs];  // of a pair: tile * rows + row, or -1
  int expert[kMoeStreamPairs], rows[kMoeStreamPairs];  // of a tile
  uint8_t pair[kMoeStreamPairs * kMoeStreamRows];      // of a place
  int tiles, begin, end, first_segment;  // all tiles; units of this block, where they begin
};

// The routing of at most kMoeStreamPairs pairs, by all kThreads threads; returns how many tiles.
// Each pair is held against all others, by some lanes together: that needs no atomics and no
// sorting, and its code is short.
template <int kThreads>
__device__ __forceinline__ int find_route(const MoeIds& p, MoeRoute& route) {
  constexpr int kLanes = kThreads / kMoeStreamPairs;  // that look for one pair
  constexpr int kFours = kMoeStreamPairs / 4 / kLanes;
  static_assert(kThreads % kMoeStreamPairs == 0 && kLanes >= 2 && kLanes <= 16);
  const int thread = threadIdx.x, pair = thread / kLanes, lane = thread % kLanes;
  if (thread < kMoeStreamPairs) {
    route.expert_of_pair[thread] =
        thread < p.pairs ? local_expert(p.ids, p.wide, p.map, thread, p.global_experts, p.experts)
                         : -1;
  }
  __syncthreads();
  const int expert = route.expert_of_pair[pair];
  const auto add_lanes = [](int v) {
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, d);
    return v;
  };
  // Pairs of the same expert: those before this one in the low half, all in the high one.
  int same = 0;
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const int first = 4 * (i * kLanes + lane);
    const int4 e = *reinterpret_cast<const int4*>(route.expert_of_pair + first);
    const int four[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (four[j] == expert) same += first + j < pair ? 0x10001 : 0x10000;
    }
  }
  same = add_lanes(same);
  const int before = same & 0xFFFF, row = before & (p.rows - 1);
  const bool begins = expert >= 0 && row == 0;
  if (lane == 0) route.key[pair] = begins ? expert : INT_MAX;
  const int tiles = __syncthreads_count(begins && lane == 0);
  int tile = 0;  // tiles of smaller experts
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const int4 e = *reinterpret_cast<const int4*>(route.key + 4 * (i * kLanes + lane));
    tile += (e.x < expert) + (e.y < expert) + (e.z < expert) + (e.w < expert);
  }
  tile = add_lanes(tile) + (p.rows == 1 ? before : p.rows == 2 ? before >> 1 : before >> 2);
  if (lane == 0) {
    const int place = tile * p.rows + row;
    route.place[pair] = expert >= 0 ? place : -1;
    if (expert >= 0) route.pair[place] = static_cast<uint8_t>(pair);
    if (begins) {
      route.expert[tile] = expert;
      route.rows[tile] = min(p.rows, (same >> 16) - before);
    }
  }
  __syncthreads();
  return tiles;
}

// The routing and the range of this block of a product; false if it has none.
template <int kThreads>
__device__ __forceinline__ bool find_range(const MoeStreamParams& p, MoeRoute& route) {
  const int tiles = find_route<kThreads>(p.ids, route);
  const MoeShares shares = MoeShares::of(p.work, tiles);
  const int begin = shares.begin(blockIdx.x), end = shares.end(blockIdx.x);
  if (threadIdx.x == 0) {
    route.tiles = tiles, route.begin = begin, route.end = end;
    route.first_segment = p.work.by_strips.divide(p.work.by_steps.divide(begin));
  }
  __syncthreads();
  return begin < end;
}

}  // namespace exl3
