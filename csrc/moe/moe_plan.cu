// Routing to work lists, in one thread block, or in several where there are many pairs.
//
// Rows of an expert stand in the order of their pairs (token, slot), not in the order in which
// threads arrive: which tile a row is in decides where the sums of its product are cut, and equal
// inputs shall give equal bits. Each warp takes a contiguous share of the pairs and counts experts
// in a table of its own; the tables, summed up warp by warp, say where each warp's rows begin.
//
// Several blocks take contiguous shares likewise: a kernel before this one counts what each of them
// will find. What is said about whole experts is written by the first.
#include <cuda_runtime.h>

#include "device/instructions.cuh"
#include "device/partition.cuh"
#include "linear/launch.cuh"
#include "moe/moe_routing.cuh"
#include "moe/moe_tall_split.h"

namespace exl3 {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;

struct Shared {
  int before[kWarps][kMaxExperts];  // rows of an expert that earlier warps have
  int tile_begin[kMaxExperts];
  int warp_totals[kWarps];
};

// Sum of `value` over the threads before this one; `total` over all. Every thread must come.
__device__ __forceinline__ int exclusive_scan(int value, int (&warp_totals)[kWarps], int& total) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int sum = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, sum, d);
    if (lane >= d) sum += other;
  }
  __syncthreads();
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warp_totals[w];
    total += warp_totals[w];
  }
  return before + sum - value;
}

// Whole groups of 32 pairs, so that all lanes of a warp take part in the matching.
__device__ __forceinline__ UnitRange groups_of_block(const MoePlanParams& p) {
  const int groups = (p.pairs + 31) / 32;
  return unit_range(groups, blockIdx.x, p.blocks);
}

__device__ __forceinline__ int expert_of(const MoePlanParams& p, int pair) {
  return pair < p.pairs ? local_expert(p.ids, p.wide_ids, p.map, pair, p.global_experts, p.experts)
                        : -1;
}

__global__ void __launch_bounds__(kThreads)
    moe_count_kernel(const __grid_constant__ MoePlanParams p) {
  __shared__ int counts[kMaxExperts];
  release_dependents();
  await_predecessors();
  for (int i = threadIdx.x; i < p.experts; i += kThreads) counts[i] = 0;
  __syncthreads();
  const UnitRange groups = groups_of_block(p);
  for (int pair = groups.begin * 32 + threadIdx.x; pair < groups.end * 32; pair += kThreads) {
    const int expert = expert_of(p, pair);
    if (expert >= 0) atomicAdd(counts + expert, 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.experts; i += kThreads) {
    p.of_blocks[blockIdx.x * p.experts + i] = counts[i];
  }
}

__global__ void __launch_bounds__(kThreads)
    moe_plan_kernel(const __grid_constant__ MoePlanParams p) {
  extern __shared__ __align__(16) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  release_dependents();
  await_predecessors();
  const MoeRouting& to = p.routing;

  const bool writes = blockIdx.x == 0;  // what is said about whole experts
  if (writes) {
    for (int i = thread; i < p.flag_count; i += kThreads) p.flags[i] = 0;
  }
  const UnitRange share = groups_of_block(p);
  const int groups = share.end - share.begin;
  const int sharing = min(groups, kWarps);  // warps that get some: one for a single token
  const int first = share.begin + (warp < sharing ? groups * warp / sharing : 0);
  const int last = share.begin + (warp < sharing ? groups * (warp + 1) / sharing : 0);
  if (warp < sharing) {
    for (int i = lane; i < p.experts; i += 32) s.before[warp][i] = 0;
    __syncwarp();
  }
  const uint32_t lower = (1u << lane) - 1;
  // The next pairs are under way while these are matched.
  int next = expert_of(p, first * 32 + lane);
  for (int group = first; group < last; ++group) {
    const int expert = next;
    next = expert_of(p, (group + 1) * 32 + lane);
    const uint32_t same = __match_any_sync(0xFFFFFFFFu, expert);
    if (expert >= 0 && (same & lower) == 0) s.before[warp][expert] += __popc(same);
    __syncwarp();
  }
  __syncthreads();

  int count = 0;
  if (thread < p.experts) {
    int after = 0;  // rows that later blocks have
    if (p.of_blocks != nullptr) {
      const int* counts = p.of_blocks + thread;
#pragma unroll 8
      for (int b = 0; b < p.blocks; ++b) {
        const int theirs = __ldcg(counts + b * p.experts);
        count += b < blockIdx.x ? theirs : 0;
        after += b > blockIdx.x ? theirs : 0;
      }
    }
    for (int w = 0; w < sharing; ++w) {
      const int here = s.before[w][thread];
      s.before[w][thread] = count;
      count += here;
    }
    count += after;
    if (writes) to.counts[thread] = count;
  }
  const int tiles = (count + p.rows - 1) / p.rows;
  int total = 0;
  const int begin = exclusive_scan(tiles, s.warp_totals, total);
  if (thread < p.experts) s.tile_begin[thread] = begin;
  if (writes && thread < p.experts) {
    for (int t = 0; t < tiles; ++t) to.tile_expert[begin + t] = thread;
    if (to.tile_part != nullptr) {
      const int parts = parts_of_expert(tiles);
      for (int t = 0; t < tiles; ++t) {
        const int part = part_of_tile(tiles, parts, t);
        const int from = part_begin(tiles, parts, part);
        const MoePart place{begin + from, part_begin(tiles, parts, part + 1) - from};
        to.tile_part[begin + t] = place.pack();
      }
    }
    for (int row = count; row < tiles * p.rows; ++row) to.row_pair[begin * p.rows + row] = -1;
  }
  if (writes && thread == 0) *to.tiles = total;
  __syncthreads();

  next = expert_of(p, first * 32 + lane);
  for (int group = first; group < last; ++group) {
    const int pair = group * 32 + lane, expert = next;
    next = expert_of(p, pair + 32);
    const uint32_t same = __match_any_sync(0xFFFFFFFFu, expert);
    int at = 0;
    if (expert >= 0) at = s.before[warp][expert] + __popc(same & lower);
    __syncwarp();
    if (expert >= 0) {
      to.row_pair[s.tile_begin[expert] * p.rows + at] = pair;
      if ((same & lower) == 0) s.before[warp][expert] += __popc(same);
    }
    __syncwarp();
  }

  if (!writes) return;
  // An expert's tiles, or its parts, which then begin with its first tile.
  const bool in_parts = to.tile_part != nullptr;
  const int entries = in_parts ? parts_of_expert(tiles) : tiles;
  for (int list = 0; list < p.lists; ++list) {
    int mine = entries;
    if (p.lists > 1 && thread < p.experts) {
      const int64_t* entry = p.table + (int64_t{p.list_projection[list]} * p.experts + thread) * 2;
      if (entry[1] != p.list_kind[list]) mine = 0;
    }
    int all = total;
    const int place = p.lists > 1 || in_parts ? exclusive_scan(mine, s.warp_totals, all) : begin;
    for (int t = 0; t < mine; ++t) {
      to.lists[int64_t{list} * p.most_tiles + place + t] = {thread, place, mine,
                                                            begin + (in_parts ? 0 : t)};
    }
    if (thread == 0) to.list_counts[list] = all;
  }
}

}  // namespace

cudaError_t launch_moe_plan(const MoePlanParams& params, bool dependent, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      moe_plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  if (params.blocks > 1) {
    const cudaError_t counted = launch_kernel(moe_count_kernel, dim3(params.blocks), kThreads, 0,
                                              dependent, stream, params);
    if (counted != cudaSuccess) return counted;
  }
  return launch_kernel(moe_plan_kernel, dim3(params.blocks), kThreads, sizeof(Shared), dependent,
                       stream, params);
}

}  // namespace exl3
