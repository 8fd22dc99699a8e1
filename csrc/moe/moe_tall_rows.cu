// Rows into the experts' product by warpgroups.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/instructions.cuh"
#include "linear/launch.cuh"
#include "moe/moe_routing.cuh"
#include "moe/moe_tall.h"

namespace exl3 {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

// Eight inputs of a row from `first` on, as they are; those past k_in are zeros.
template <class T>
__device__ __forceinline__ uint4 load_eight(const T* row, int first, int k_in) {
  const auto* from = reinterpret_cast<const uint16_t*>(row) + first;
  if (first + 8 <= k_in && (reinterpret_cast<uintptr_t>(from) & 15) == 0) {
    return __ldg(reinterpret_cast<const uint4*>(from));
  }
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = first + 2 * i < k_in ? from[2 * i] : 0;
    const uint32_t high = first + 2 * i + 1 < k_in ? from[2 * i + 1] : 0;
    pairs[i] = low | high << 16;
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// What a lane has of a row: inputs 32 j + 8 q to 32 j + 8 q + 7 of a block of 128, as they are.
using LaneInputs = uint4[4];

template <class T>
__device__ __forceinline__ void load_inputs(const T* row, int first, int k_in, LaneInputs& raw) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    raw[j] = row == nullptr ? make_uint4(0, 0, 0, 0) : load_eight(row, first + 32 * j, k_in);
  }
}

// Blocks of 128 inputs that a thread block makes of a tile.
constexpr int kBlocks = 4;

// A thread block makes inputs of the 64 rows of a tile, for gate and for up; a warp takes eight
// rows, four lanes a row: what the q-th has are four times 16 bytes of the image. Rows past those
// of the expert are zeros.
template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    moe_tall_gather_kernel(const __grid_constant__ MoeTallGatherParams p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = lane / 4, q = lane % 4;
  release_dependents();
  await_predecessors();
  const int blocks = p.k / 128, shares = (blocks + kBlocks - 1) / kBlocks;
  const int items = __ldcg(p.routing.tiles) * shares;
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int tile = p.by_shares.divide(item), share = item - tile * shares;
    // Loads that do not wait for one another first: each takes the better part of a microsecond.
    const int64_t expert = __ldcg(p.routing.tile_expert + tile);
    const int pair = __ldcg(p.routing.row_pair + tile * kMoeTallTile + warp * 8 + row);
    const MoePart part = MoePart::unpack(__ldcg(p.routing.tile_part + tile));
    const T* from = nullptr;
    float weight = 1.0f;
    if (pair >= 0) {
      from = static_cast<const T*>(p.x) + p.by_slots.divide(pair) * p.x_stride;
      if (p.weights != nullptr) weight = __ldg(p.weights + pair);
    }
    const int octet = (tile - part.first) * (kMoeTallTile / 8) + warp;
    const int64_t step_bytes = part.tiles * (kMoeTallTile * 32);
    uint8_t* image = p.image + int64_t{part.first} * kMoeTallTile * 2 * p.k + q / 2 * step_bytes +
                     (octet * 2 + q % 2) * 128 + row * 16;
    const int end = min(blocks, (share + 1) * kBlocks);
    LaneInputs raw;
    load_inputs(from, share * kBlocks * 128 + 8 * q, p.k_in, raw);
#pragma unroll 1
    for (int block = share * kBlocks; block < end; ++block) {
      const int first = block * 128 + 8 * q;
      float x[32];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const T* eight = reinterpret_cast<const T*>(raw + j);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[8 * j + i] = static_cast<float>(eight[i]) * weight;
      }
      if (block + 1 < end) load_inputs(from, first + 128, p.k_in, raw);
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
        uint8_t* to = image + half * p.image_bytes + 8 * block * step_bytes;
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
          *reinterpret_cast<uint4*>(to + 2 * j * step_bytes) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
}

}  // namespace

cudaError_t launch_moe_tall_gather(MoeTallGatherParams& params, bool dependent,
                                   cudaStream_t stream) {
  const int shares = (params.k / 128 + kBlocks - 1) / kBlocks;
  params.by_shares = Divisor::of(static_cast<uint32_t>(shares));
  auto* kernel = params.x_dtype == Dtype::kBfloat16 ? moe_tall_gather_kernel<__nv_bfloat16>
                                                    : moe_tall_gather_kernel<__half>;
  return launch_kernel(kernel, dim3(params.blocks), kThreads, 0, dependent, stream, params);
}

}  // namespace exl3
