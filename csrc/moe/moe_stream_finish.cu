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

constexpr int kWarps = 4;  // of a thread block, which makes 128 outputs of a token
constexpr int kThreads = 32 * kWarps;
constexpr int kSlots = 2;  // that a warp takes at a time
// What it needs to have most worked out before it waits, and what leaves it room beside a product.
constexpr int kRegisters = 64;

// Empty where the route for few tokens is not used.
template <class T>
__global__ void __maxnreg__(kRegisters)
    moe_finish_kernel(const __grid_constant__ MoeFinishParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
  __shared__ MoeRoute route;
  __shared__ __align__(16) float rows[kWarps * kSlots][128];
  release_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, token = blockIdx.y;
  // As down, this kernel starts only once the routing is there.
  const int tiles = find_route<kThreads>(p.ids, route);
  const MoeShares shares = MoeShares::of(p.work, tiles);
  const auto place_of = [&](int slot) {
    return slot < p.top_k ? route.place[token * p.top_k + slot] : -1;
  };
  const auto scales_of = [&](int tile) {
    return p.svh + int64_t{route.expert[tile]} * p.work.strips * 128 + block * 128 + 4 * lane;
  };
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int place = place_of(warp * kSlots + i);
    if (place >= 0) prefetch_l2(scales_of(place / p.ids.rows));
  }
  await_predecessors();

  float sum = 0.0f;  // of one column a thread
#pragma unroll 1
  for (int first = 0; first < p.top_k; first += kWarps * kSlots) {
    // What is found for a slot without an expert is not looked at.
    float4 scales[kSlots] = {};
    float weights[kSlots] = {};
    int tile[kSlots] = {}, row[kSlots] = {};
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int slot = first + warp * kSlots + i, place = place_of(slot);
      if (place < 0) continue;
      tile[i] = place / p.ids.rows;
      row[i] = place - tile[i] * p.ids.rows;
      scales[i] = load_scales(scales_of(tile[i]));
      weights[i] = p.weights != nullptr ? __ldg(p.weights + token * p.top_k + slot) : 1.0f;
    }
    float z[kSlots][4];
    static_assert(kSlots == 2, "the strip is chosen without an index into registers");
    add_parts<kSlots>(
        p.from, p.work, shares, p.ids.rows, row, lane,
        [&](int i) { return (i == 0 ? tile[0] : tile[1]) * p.work.strips + block; }, z);
    hadamard_128(z, lane);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      *reinterpret_cast<float4*>(rows[warp * kSlots + i] + 4 * lane) =
          make_float4(z[i][0] * kHadamardScale * scales[i].x * weights[i],
                      z[i][1] * kHadamardScale * scales[i].y * weights[i],
                      z[i][2] * kHadamardScale * scales[i].z * weights[i],
                      z[i][3] * kHadamardScale * scales[i].w * weights[i]);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < min(kWarps * kSlots, p.top_k - first); ++i) {
      if (place_of(first + i) >= 0) sum += rows[i][threadIdx.x];
    }
    __syncthreads();
  }
  const int column = block * 128 + static_cast<int>(threadIdx.x);
  if (column < p.n_out) {
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
