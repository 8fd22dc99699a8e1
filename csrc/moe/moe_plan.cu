// Routing to work lists, in one thread block.
//
// Rows of an expert stand in the order of their pairs (token, slot), not in the order in which
// threads arrive: which tile a row is in decides where the sums of its product are cut, and equal
// inputs shall give equal bits. Each warp takes a contiguous share of the pairs and counts experts
// in a table of its own; the tables, summed up warp by warp, say where each warp's rows begin.
#include <cuda_runtime.h>

#include "device/instructions.cuh"
#include "linear/launch.cuh"
#include "moe/moe_routing.cuh"

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

__global__ void __launch_bounds__(kThreads)
    moe_plan_kernel(const __grid_constant__ MoePlanParams p) {
  extern __shared__ __align__(16) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  release_dependents();
  await_predecessors();
  const MoeRouting& to = p.routing;

  for (int i = thread; i < p.flag_count; i += kThreads) p.flags[i] = 0;
  // Whole groups of 32 pairs a warp, so that all lanes take part in the matching.
  const int groups = (p.pairs + 31) / 32;
  const int sharing = min(groups, kWarps);  // warps that get some: one for a single token
  const int first = warp < sharing ? groups * warp / sharing : 0;
  const int last = warp < sharing ? groups * (warp + 1) / sharing : 0;
  if (warp < sharing) {
    for (int i = lane; i < p.experts; i += 32) s.before[warp][i] = 0;
    __syncwarp();
  }
  const auto expert_of = [&](int pair) {
    return pair < p.pairs
               ? local_expert(p.ids, p.wide_ids, p.map, pair, p.global_experts, p.experts)
               : -1;
  };
  const uint32_t lower = (1u << lane) - 1;
  // The next pairs are under way while these are matched.
  int next = expert_of(first * 32 + lane);
  for (int group = first; group < last; ++group) {
    const int expert = next;
    next = expert_of((group + 1) * 32 + lane);
    const uint32_t same = __match_any_sync(0xFFFFFFFFu, expert);
    if (expert >= 0 && (same & lower) == 0) s.before[warp][expert] += __popc(same);
    __syncwarp();
  }
  __syncthreads();

  int count = 0;
  if (thread < p.experts) {
    for (int w = 0; w < sharing; ++w) {
      const int here = s.before[w][thread];
      s.before[w][thread] = count;
      count += here;
    }
    to.counts[thread] = count;
  }
  const int tiles = (count + p.rows - 1) / p.rows;
  int total = 0;
  const int begin = exclusive_scan(tiles, s.warp_totals, total);
  if (thread < p.experts) {
    s.tile_begin[thread] = begin;
    for (int t = 0; t < tiles; ++t) to.tile_expert[begin + t] = thread;
    for (int row = count; row < tiles * p.rows; ++row) to.row_pair[begin * p.rows + row] = -1;
  }
  if (thread == 0) *to.tiles = total;
  __syncthreads();

  if (p.group_ends != nullptr && thread < p.experts) {
    const int base = s.tile_begin[thread / p.group * p.group];
    p.group_ends[thread] = (begin + tiles - base) * p.rows;
    if (thread % p.group == 0) p.group_first[thread / p.group] = begin * p.rows;
  }

  next = expert_of(first * 32 + lane);
  for (int group = first; group < last; ++group) {
    const int pair = group * 32 + lane, expert = next;
    next = expert_of(pair + 32);
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

  for (int list = 0; list < p.lists; ++list) {
    int mine = tiles;
    if (p.lists > 1 && thread < p.experts) {
      const int64_t* entry = p.table + (int64_t{p.list_projection[list]} * p.experts + thread) * 2;
      if (entry[1] != p.list_kind[list]) mine = 0;
    }
    int all = total;
    const int place = p.lists > 1 ? exclusive_scan(mine, s.warp_totals, all) : begin;
    for (int t = 0; t < mine; ++t) {
      to.lists[int64_t{list} * p.most_tiles + place + t] = {thread, place, mine, begin + t};
    }
    if (thread == 0) to.list_counts[list] = all;
  }
}

}  // namespace

cudaError_t launch_moe_plan(const MoePlanParams& params, bool dependent, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      moe_plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  return launch_kernel(moe_plan_kernel, dim3(1), kThreads, sizeof(Shared), dependent, stream,
                       params);
}

}  // namespace exl3
