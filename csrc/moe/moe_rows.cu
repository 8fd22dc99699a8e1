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

// Words of a k16 step in the shared image of up to 16 rows, and how far apart two steps are: the
// lanes of a warp write to eight steps at once.
constexpr int kStepWords = 128, kStepStride = kStepWords + 4;

// A thread block makes 128 inputs of 8 rows, one a warp, or of 16, for gate and for up. Rows past
// those of the expert are zeros in the image. The image is put together in shared memory, because a
// row's part of it is single words far apart.
template <class T, int kTurns>
__global__ void __launch_bounds__(kThreads)
    moe_gather_kernel(const __grid_constant__ MoeGatherParams p) {
  __shared__ __align__(16) uint32_t images[2][8 * kStepStride];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  await_predecessors();
  // Only now: the products that follow read the plan before they wait for this kernel.
  release_dependents();
  constexpr int kGroupRows = 8 * kTurns;
  const int blocks = p.k / 128, groups = p.rows / kGroupRows;
  const int items = __ldcg(p.routing.tiles) * groups * blocks;
  const int64_t tile_bytes = image_bytes(p.k, p.rows);
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int part = item / blocks, block = item - part * blocks;
    const int tile = part / groups, group = part - tile * groups;
    // Loads that do not wait for one another first: each takes the better part of a microsecond.
    const int64_t expert = __ldcg(p.routing.tile_expert + tile);
    int pairs[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      pairs[i] = __ldcg(p.routing.row_pair + tile * p.rows + group * 16 + warp + 8 * i);
    }
    const int first = block * 128 + 4 * lane;
    const uint16_t* suh = p.suh + expert * 2 * p.k + first;
    const float4 both[2] = {load_scales(suh), load_scales(suh + p.k)};
    float x[kTurns][4] = {};
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (pairs[i] < 0) continue;
      load_row(static_cast<const T*>(p.x) + pairs[i] / p.top_k * p.x_stride, first, p.k_in, x[i]);
      if (p.weights != nullptr) {
        const float weight = __ldg(p.weights + pairs[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i][j] *= weight;
      }
    }
    float v[2 * kTurns][4];  // gate and up of the first row, gate and up of the second
#pragma unroll
    for (int i = 0; i < 2 * kTurns; ++i) {
      const float4 scales = both[i % 2];
      v[i][0] = x[i / 2][0] * scales.x, v[i][1] = x[i / 2][1] * scales.y;
      v[i][2] = x[i / 2][2] * scales.z, v[i][3] = x[i / 2][3] * scales.w;
    }
    hadamard_128(v, lane);
#pragma unroll
    for (int i = 0; i < 2 * kTurns; ++i) {
      const int row = warp + 8 * (i / 2), shard = i % 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) v[i][j] *= kHadamardScale;
      const float sum =
          store_words(images[shard] + lane / 4 * kStepStride, kGroupRows, row, lane, v[i]);
      if (p.block_sums != nullptr) {
        const float whole = warp_sum(sum);
        const int64_t place = int64_t{shard} * p.most_tiles + tile;
        if (lane == 0) p.block_sums[(place * p.rows + group * 16 + row) * blocks + block] = whole;
      }
    }
    __syncthreads();
    constexpr int kFours = kGroupRows * 2;  // pieces of 16 bytes of a step
    for (int i = threadIdx.x; i < 2 * 8 * kFours; i += kThreads) {
      const int step = i / kFours, piece = i - step * kFours, shard = step / 8;
      const int64_t place = int64_t{shard} * p.most_tiles + tile;
      auto* to = reinterpret_cast<uint4*>(p.image + place * tile_bytes) +
                 (block * 8 + step % 8) * p.rows * 2 + group * (kStepWords / 4) + piece;
      *to = *reinterpret_cast<const uint4*>(images[shard] + step % 8 * kStepStride + 4 * piece);
    }
    __syncthreads();
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

// What a thread reads of a row at once: 16 bytes.
template <bool kShortRows>
inline constexpr int kCombineColumns = kShortRows ? 8 : 4;

__device__ __forceinline__ void add_weighted(float (&sum)[4], float weight, uint4 raw) {
  const float v[4] = {__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z),
                      __uint_as_float(raw.w)};
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = fmaf(weight, v[i], sum[i]);
}
__device__ __forceinline__ void add_weighted(float (&sum)[8], float weight, uint4 raw) {
  const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = fmaf(weight, __uint_as_float(pairs[i] << 16), sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, __uint_as_float(pairs[i] & 0xFFFF0000u), sum[2 * i + 1]);
  }
}

// Some columns of one token a thread.
template <class T, bool kShortRows>
__global__ void __launch_bounds__(kCombineThreads)
    moe_combine_kernel(const __grid_constant__ MoeCombineParams p) {
  constexpr int kColumns = kCombineColumns<kShortRows>;
  release_dependents();
  await_predecessors();
  const int token = blockIdx.y, column = (blockIdx.x * kCombineThreads + threadIdx.x) * kColumns;
  if (column >= p.n_out) return;
  float sum[kColumns] = {};
  // Eight slots at a time: all places, then all rows are under way at once. Rows are as wide as the
  // stored matrix, so all columns are there although fewer may count.
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
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (!live[j]) continue;
      const int64_t at = (int64_t{first + j} * p.row_stride + column) / kColumns;
      v[j] = __ldcg(static_cast<const uint4*>(p.rows) + at);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (live[j]) add_weighted(sum, weight[j], v[j]);
    }
  }
  T* to = static_cast<T*>(p.out) + int64_t{token} * p.n_out + column;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (column + i < p.n_out) to[i] = static_cast<T>(sum[i]);
  }
}

}  // namespace

cudaError_t launch_moe_gather(const MoeGatherParams& params, bool dependent, cudaStream_t stream) {
  const bool few = params.rows == 8;
  auto* kernel =
      params.x_dtype == Dtype::kBfloat16
          ? (few ? moe_gather_kernel<__nv_bfloat16, 1> : moe_gather_kernel<__nv_bfloat16, 2>)
          : (few ? moe_gather_kernel<__half, 1> : moe_gather_kernel<__half, 2>);
  return launch_kernel(kernel, dim3(params.blocks), kThreads, 0, dependent, stream, params);
}

cudaError_t launch_moe_activate(const MoeActivateParams& params, bool dependent,
                                cudaStream_t stream) {
  return launch_kernel(moe_activate_kernel, dim3(params.blocks), kThreads, 0, dependent, stream,
                       params);
}

cudaError_t launch_moe_combine(const MoeCombineParams& params, bool dependent,
                               cudaStream_t stream) {
  auto* kernel = params.short_rows                      ? moe_combine_kernel<__nv_bfloat16, true>
                 : params.out_dtype == Dtype::kBfloat16 ? moe_combine_kernel<__nv_bfloat16, false>
                                                        : moe_combine_kernel<__half, false>;
  const int columns =
      kCombineThreads * (params.short_rows ? kCombineColumns<true> : kCombineColumns<false>);
  const dim3 grid((params.n_out + columns - 1) / columns, params.tokens);
  return launch_kernel(kernel, grid, kCombineThreads, 0, dependent, stream, params);
}

}  // namespace exl3
