// Rows into the experts' product by warpgroups.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/instructions.cuh"
#include "linear/launch.cuh"
#include "moe/moe_tall.h"
#include "moe/moe_tall_finish.cuh"

namespace exl3 {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

// Eight inputs of a row from `first` on; those past k_in are zeros.
template <class T>
__device__ __forceinline__ void load_eight(const T* row, int first, int k_in, float* v) {
  const T* from = row + first;
  if (first + 8 <= k_in && (reinterpret_cast<uintptr_t>(from) & 15) == 0) {
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from));
    const T* eight = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = static_cast<float>(eight[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = first + i < k_in ? static_cast<float>(from[i]) : 0.0f;
}

// A thread block makes 128 inputs of the 64 rows of a tile, for gate and for up; a warp takes eight
// rows, four lanes a row: the q-th has inputs 32 j + 8 q to 32 j + 8 q + 7, which are 16 bytes of
// the image. Rows past those of the expert are zeros.
template <class T>
__global__ void __launch_bounds__(kThreads, 3)
    moe_tall_gather_kernel(const __grid_constant__ MoeTallGatherParams p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = lane / 4, q = lane % 4;
  release_dependents();
  await_predecessors();
  const int blocks = p.k / 128, items = __ldcg(p.routing.tiles) * blocks;
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int tile = p.by_blocks.divide(item), block = item - tile * blocks;
    // Loads that do not wait for one another first: each takes the better part of a microsecond.
    const int64_t expert = __ldcg(p.routing.tile_expert + tile);
    const int pair = __ldcg(p.routing.row_pair + tile * kMoeTallTile + warp * 8 + row);
    const MoePart part = MoePart::unpack(__ldcg(p.routing.tile_part + tile));
    const int first = block * 128 + 8 * q;
    float x[32] = {};
    if (pair >= 0) {
      const T* from = static_cast<const T*>(p.x) + p.by_slots.divide(pair) * p.x_stride;
#pragma unroll
      for (int j = 0; j < 4; ++j) load_eight(from, first + 32 * j, p.k_in, x + 8 * j);
      if (p.weights != nullptr) {
        const float weight = __ldg(p.weights + pair);
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] *= weight;
      }
    }
    const int octet = (tile - part.first) * (kMoeTallTile / 8) + warp;
    const int part_rows = part.tiles * kMoeTallTile;
    uint8_t* image = p.image + int64_t{part.first} * kMoeTallTile * 2 * p.k +
                     int64_t{block} * 8 * part_rows * 32 + int64_t{q / 2} * part_rows * 32 +
                     (octet * 2 + q % 2) * 128 + row * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint16_t* suh = p.suh + (expert * 2 + half) * p.k + first;
      float v[32];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 low = load_scales(suh + 32 * j), high = load_scales(suh + 32 * j + 4);
        const float scales[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) v[8 * j + i] = x[8 * j + i] * scales[i];
      }
      butterflies(v);
      lane_butterfly<1>(v, lane);
      lane_butterfly<2>(v, lane);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 8 * j + 2 * i;
          const __half2 two =
              __floats2half2_rn(v[at] * kHadamardScale, v[at + 1] * kHadamardScale);
          words[i] = *reinterpret_cast<const uint32_t*>(&two);
        }
        *reinterpret_cast<uint4*>(image + half * p.image_bytes +
                                  int64_t{2 * j} * part_rows * 32) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

}  // namespace

cudaError_t launch_moe_tall_gather(const MoeTallGatherParams& params, bool dependent,
                                   cudaStream_t stream) {
  auto* kernel = params.x_dtype == Dtype::kBfloat16 ? moe_tall_gather_kernel<__nv_bfloat16>
                                                    : moe_tall_gather_kernel<__half>;
  return launch_kernel(kernel, dim3(params.blocks), kThreads, 0, dependent, stream, params);
}

}  // namespace exl3
