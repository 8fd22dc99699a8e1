// Rows into the experts and out of them: gather and transform, the activation on its own, combine.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/instructions.cuh"
#include "linear/launch.cuh"
#include "moe/moe_routing.cuh"

namespace exl3 {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kCombineThreads = 64;

template <class T>
__device__ __forceinline__ void load_row(const T* row, int first, int k_in, float (&v)[4]) {
  const T* from = row + first;
  if (first + 4 <= k_in && (reinterpret_cast<uintptr_t>(from) & 7) == 0) {
    const uint2 raw = *reinterpret_cast<const uint2*>(from);
    const T* four = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = static_cast<float>(four[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = first + i < k_in ? static_cast<float>(from[i]) : 0.0f;
}

// One warp a row and block of 128 inputs, for gate and for up. Rows past those of the expert are
// zeros in the image.
template <class T>
__global__ void __launch_bounds__(kThreads)
    moe_gather_kernel(const __grid_constant__ MoeGatherParams p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  await_predecessors();
  // Only now: the products that follow read the plan before they wait for this kernel.
  release_dependents();
  const int blocks = p.k / 128, octets = p.rows / 8;
  const int items = __ldcg(p.routing.tiles) * octets * blocks;
  const int64_t tile_bytes = image_bytes(p.k, p.rows);
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int block = item % blocks, octet = item / blocks % octets, tile = item / blocks / octets;
    const int row = octet * 8 + warp;
    // Loads that do not wait for one another first: each takes the better part of a microsecond.
    const int pair = __ldcg(p.routing.row_pair + tile * p.rows + row);
    const int64_t expert = __ldcg(p.routing.tile_expert + tile);
    const int first = block * 128 + 4 * lane;
    const uint16_t* suh = p.suh + expert * 2 * p.k + first;
    const float4 both[2] = {load_scales(suh), load_scales(suh + p.k)};
    float x[4] = {};
    if (pair >= 0) {
      load_row(static_cast<const T*>(p.x) + pair / p.top_k * p.x_stride, first, p.k_in, x);
      if (p.weights != nullptr) {
        const float weight = __ldg(p.weights + pair);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] *= weight;
      }
    }
    float v[2][4];
#pragma unroll
    for (int shard = 0; shard < 2; ++shard) {
      v[shard][0] = x[0] * both[shard].x, v[shard][1] = x[1] * both[shard].y;
      v[shard][2] = x[2] * both[shard].z, v[shard][3] = x[3] * both[shard].w;
    }
    hadamard_128(v, lane);
#pragma unroll
    for (int shard = 0; shard < 2; ++shard) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[shard][i] *= kHadamardScale;
      const int64_t place = int64_t{shard} * p.most_tiles + tile;
      const float sum =
          store_image(p.image + place * tile_bytes, p.rows, block, row, lane, v[shard]);
      if (p.block_sums != nullptr) {
        const float whole = warp_sum(sum);
        if (lane == 0) p.block_sums[(place * p.rows + row) * blocks + block] = whole;
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    moe_activate_kernel(const __grid_constant__ MoeActivateParams p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  release_dependents();
  await_predecessors();
  const int blocks = p.inner / 128, octets = p.rows / 8;
  const int items = __ldcg(p.routing.tiles) * octets * blocks;
  const int64_t tile_bytes = image_bytes(p.inner, p.rows);
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int block = item % blocks, octet = item / blocks % octets, tile = item / blocks / octets;
    const int row = octet * 8 + warp, place = tile * p.rows + row;
    float v[4] = {};
    if (__ldcg(p.routing.row_pair + place) >= 0) {
      const float* from = p.gate_up + int64_t{place} * 2 * p.inner + block * 128 + 4 * lane;
      const float4 g = __ldcg(reinterpret_cast<const float4*>(from));
      const float4 u = __ldcg(reinterpret_cast<const float4*>(from + p.inner));
      const float gate[4] = {g.x, g.y, g.z, g.w}, up[4] = {u.x, u.y, u.z, u.w};
      const int64_t expert = __ldcg(p.routing.tile_expert + tile);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int channel = block * 128 + 4 * lane + i;
        const bool counts = channel >= p.inner_begin && channel < p.inner_end;
        v[i] = counts ? activate(p.activation, gate[i], up[i]) : 0.0f;
      }
      to_down_input(load_scales(p.next_suh + expert * p.inner + block * 128 + 4 * lane), lane, v);
    }
    const float sum = store_image(p.next_image + tile * tile_bytes, p.rows, block, row, lane, v);
    if (p.next_sums != nullptr) {
      const float whole = warp_sum(sum);
      if (lane == 0) p.next_sums[int64_t{place} * blocks + block] = whole;
    }
  }
}

// Four columns of one token a thread.
template <class T>
__global__ void __launch_bounds__(kCombineThreads)
    moe_combine_kernel(const __grid_constant__ MoeCombineParams p) {
  release_dependents();
  await_predecessors();
  const int token = blockIdx.y, column = (blockIdx.x * kCombineThreads + threadIdx.x) * 4;
  if (column >= p.n_out) return;
  float sum[4] = {};
  // Eight slots at a time: all places, then all rows are under way at once. Rows are as wide as the
  // stored matrix, so four columns are there although fewer may count.
  for (int slot = 0; slot < p.top_k; slot += 8) {
    const int first = token * p.top_k + slot, count = min(8, p.top_k - slot);
    bool live[8];
    float weight[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      live[j] = j < count &&
                local_expert(p.ids, p.wide_ids, p.map, first + j, p.global_experts, p.experts) >= 0;
      weight[j] = j < count && p.weights != nullptr ? __ldg(p.weights + first + j) : 1.0f;
    }
    float4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (!live[j]) continue;
      v[j] = __ldcg(
          reinterpret_cast<const float4*>(p.rows + int64_t{first + j} * p.row_stride + column));
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (!live[j]) continue;
      sum[0] = fmaf(weight[j], v[j].x, sum[0]), sum[1] = fmaf(weight[j], v[j].y, sum[1]);
      sum[2] = fmaf(weight[j], v[j].z, sum[2]), sum[3] = fmaf(weight[j], v[j].w, sum[3]);
    }
  }
  T* to = static_cast<T*>(p.out) + int64_t{token} * p.n_out + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i < p.n_out) to[i] = static_cast<T>(sum[i]);
  }
}

}  // namespace

cudaError_t launch_moe_gather(const MoeGatherParams& params, bool dependent, cudaStream_t stream) {
  auto* kernel = params.x_dtype == Dtype::kBfloat16 ? moe_gather_kernel<__nv_bfloat16>
                                                    : moe_gather_kernel<__half>;
  return launch_kernel(kernel, dim3(params.blocks), kThreads, 0, dependent, stream, params);
}

cudaError_t launch_moe_activate(const MoeActivateParams& params, bool dependent,
                                cudaStream_t stream) {
  return launch_kernel(moe_activate_kernel, dim3(params.blocks), kThreads, 0, dependent, stream,
                       params);
}

cudaError_t launch_moe_combine(const MoeCombineParams& params, bool dependent,
                               cudaStream_t stream) {
  auto* kernel = params.out_dtype == Dtype::kBfloat16 ? moe_combine_kernel<__nv_bfloat16>
                                                      : moe_combine_kernel<__half>;
  constexpr int kColumns = 4 * kCombineThreads;
  const dim3 grid((params.n_out + kColumns - 1) / kColumns, params.tokens);
  return launch_kernel(kernel, grid, kCombineThreads, 0, dependent, stream, params);
}

}  // namespace exl3
