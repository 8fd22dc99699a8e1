// Rows around the grouped products of rebuilt weights. All move memory: one warp a row, 16 bytes a
// lane.
#include <cuda_bf16.h>

#include "linear/launch.cuh"
#include "moe/moe_dense.h"
#include "moe/moe_routing.cuh"

namespace exl3 {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

// Calls f(row of the group, its pair or -1) for each row of the group.
template <class F>
__device__ __forceinline__ void for_rows(const MoeGroup& group, F&& f) {
  const int first = *group.first, count = *group.count;
  for (int row = blockIdx.x * kWarps + threadIdx.x / 32; row < count; row += gridDim.x * kWarps) {
    f(row, group.row_pair[first + row]);
  }
}

// Eight bfloat16 numbers from column `from` of a row on; those past `end` are zeros.
__device__ __forceinline__ uint4 load_eight(const uint16_t* row, int from, int end) {
  const uint16_t* at = row + from;
  if (from + 8 <= end && (reinterpret_cast<uintptr_t>(at) & 15) == 0) {
    return __ldg(reinterpret_cast<const uint4*>(at));
  }
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = from + 2 * i < end ? at[2 * i] : 0;
    const uint32_t high = from + 2 * i + 1 < end ? at[2 * i + 1] : 0;
    pairs[i] = low | high << 16;
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

__global__ void __launch_bounds__(kThreads)
    moe_dense_rows_kernel(const __grid_constant__ MoeDenseRowsParams p) {
  const int lane = threadIdx.x % 32;
  for_rows(p.group, [&](int row, int pair) {
    const uint16_t* from = p.x + (pair < 0 ? 0 : pair / p.top_k) * p.x_stride;
    for (int column = 8 * lane; column < p.k; column += 256) {
      *reinterpret_cast<uint4*>(p.out + int64_t{row} * p.k + column) =
          load_eight(from, column, pair < 0 ? 0 : p.k_in);
    }
  });
}

__global__ void __launch_bounds__(kThreads)
    moe_dense_activate_kernel(const __grid_constant__ MoeDenseActivateParams p) {
  const int lane = threadIdx.x % 32;
  for_rows(p.group, [&](int row, int pair) {
    const uint16_t* gate_row = p.gate_up + int64_t{row} * 2 * p.inner;
    const int end = pair < 0 ? 0 : p.inner;
    for (int column = 8 * lane; column < p.inner; column += 256) {
      const uint4 gates = load_eight(gate_row, column, end);
      const uint4 ups = load_eight(gate_row + p.inner, column, end);
      const auto* gate = reinterpret_cast<const __nv_bfloat162*>(&gates);
      const auto* up = reinterpret_cast<const __nv_bfloat162*>(&ups);
      uint4 out;
      auto* to = reinterpret_cast<__nv_bfloat162*>(&out);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 g = __bfloat1622float2(gate[i]), u = __bfloat1622float2(up[i]);
        const int first = column + 2 * i;
        const auto one = [&](int channel, float a, float b) {
          const bool counts = pair >= 0 && channel >= p.inner_begin && channel < p.inner_end;
          return counts ? activate_fast(p.activation, a, b) : 0.0f;
        };
        to[i] = __floats2bfloat162_rn(one(first, g.x, u.x), one(first + 1, g.y, u.y));
      }
      *reinterpret_cast<uint4*>(p.out + int64_t{row} * p.inner + column) = out;
    }
  });
}

__global__ void __launch_bounds__(kThreads)
    moe_dense_scatter_kernel(const __grid_constant__ MoeDenseScatterParams p) {
  const int lane = threadIdx.x % 32;
  for_rows(p.group, [&](int row, int pair) {
    if (pair < 0) return;
    const auto* from = reinterpret_cast<const uint4*>(p.rows + int64_t{row} * p.n);
    auto* to = reinterpret_cast<uint4*>(p.out + int64_t{pair} * p.n);
    for (int i = lane; i < p.n / 8; i += 32) to[i] = __ldg(from + i);
  });
}

}  // namespace

cudaError_t launch_moe_dense_rows(const MoeDenseRowsParams& params, cudaStream_t stream) {
  return launch_kernel(moe_dense_rows_kernel, dim3(params.blocks), kThreads, 0, false, stream,
                       params);
}

cudaError_t launch_moe_dense_activate(const MoeDenseActivateParams& params, cudaStream_t stream) {
  return launch_kernel(moe_dense_activate_kernel, dim3(params.blocks), kThreads, 0, false, stream,
                       params);
}

cudaError_t launch_moe_dense_scatter(const MoeDenseScatterParams& params, cudaStream_t stream) {
  return launch_kernel(moe_dense_scatter_kernel, dim3(params.blocks), kThreads, 0, false, stream,
                       params);
}

}  // namespace exl3
