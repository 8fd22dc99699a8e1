// The last kernel of the route for few tokens: the sums that down left, in the order of k, their
// output transform, and the slots of a token, weighted, in their order, rounded once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/hadamard.cuh"
#include "device/instructions.cuh"
#include "linear/launch.cuh"
#include "moe/moe_stream_inputs.cuh"

namespace exl3 {
namespace {

constexpr int kWarps = 8;  // of a thread block; a warp takes one slot, a block 128 outputs
constexpr int kThreads = 32 * kWarps;

// Registers that leave room for it beside a product, where it waits for its turn. Empty where the
// route for few tokens is not used.
template <class T>
__global__ void __launch_bounds__(kThreads, 65536 / (kThreads * kFinishRegisters))
    moe_finish_kernel(const __grid_constant__ MoeFinishParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
  __shared__ MoeRoute route;
  __shared__ __align__(16) float rows[kWarps][128];
  release_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, token = blockIdx.y;
  // As down, this kernel starts only once the routing is there.
  const int tiles = find_route<kThreads>(p.ids, route);
  const MoeShares shares = MoeShares::of(p.work, tiles);
  const auto scales_of = [&](int tile) {
    return p.svh + int64_t{route.expert[tile]} * p.work.strips * 128 + block * 128 + 4 * lane;
  };
  if (warp < p.top_k && route.place[token * p.top_k + warp] >= 0) {
    prefetch_l2(scales_of(route.place[token * p.top_k + warp] / p.ids.rows));
  }
  await_predecessors();

  float sum = 0.0f;  // of one column a thread
#pragma unroll 1
  for (int first = 0; first < p.top_k; first += kWarps) {
    const int slot = first + warp, pair = token * p.top_k + slot;
    const int place = slot < p.top_k ? route.place[pair] : -1;
    if (place >= 0) {
      const int rows_of_tile = p.ids.rows;
      const int tile = place / rows_of_tile, row = place - tile * rows_of_tile;
      const float4 scales = load_scales(scales_of(tile));
      const float weight = p.weights != nullptr ? __ldg(p.weights + pair) : 1.0f;
      float z[1][4];
      add_parts<1>(
          p.from, p.work, shares, rows_of_tile, row, lane,
          [&](int) { return tile * p.work.strips + block; }, z);
      hadamard_128(z, lane);
      *reinterpret_cast<float4*>(rows[warp] + 4 * lane) =
          make_float4(z[0][0] * kHadamardScale * scales.x * weight,
                      z[0][1] * kHadamardScale * scales.y * weight,
                      z[0][2] * kHadamardScale * scales.z * weight,
                      z[0][3] * kHadamardScale * scales.w * weight);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
#pragma unroll 1
      for (int w = 0; w < min(kWarps, p.top_k - first); ++w) {
        if (route.place[token * p.top_k + first + w] >= 0) sum += rows[w][threadIdx.x];
      }
    }
    __syncthreads();
  }
  const int column = block * 128 + static_cast<int>(threadIdx.x);
  if (threadIdx.x < 128 && column < p.n_out) {
    static_cast<T*>(p.out)[int64_t{token} * p.n_out + column] = static_cast<T>(sum);
  }
#endif
}

}  // namespace

cudaError_t launch_moe_finish(const MoeFinishParams& params, bool dependent, cudaStream_t stream) {
  auto* kernel = params.out_dtype == Dtype::kBfloat16 ? moe_finish_kernel<__nv_bfloat16>
                                                      : moe_finish_kernel<__half>;
  return launch_kernel(kernel, dim3((params.n_out + 127) / 128, params.tokens), kThreads, 0,
                       dependent, stream, params);
}

}  // namespace exl3
