// t = H(x * suh) / sqrt(128) in blocks of 128, rounded once to fp16, in the order of B fragments.
//
// One warp transforms one block of one row for one shard; the rows of a block of threads meet in
// shared memory, so that the image is written in runs of 16 bytes a lane. Rows past m are zeros,
// and so are inputs outside [k_begin, k_begin + k_in).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/hadamard.cuh"
#include "device/instructions.cuh"
#include "linear/had_in.h"
#include "linear/launch.cuh"

namespace exl3 {
namespace {

// Activations 4 * lane to 4 * lane + 3 of a block as fp32.
template <class T>
__device__ __forceinline__ void load_block(const TransformParams& p, int64_t row, int first,
                                           float (&v)[4]) {
  const T* from = static_cast<const T*>(p.x) + row * p.x_stride + (first - p.k_begin);
  const bool inside = first >= p.k_begin && first + 4 <= p.k_begin + p.k_in;
  if (inside && (reinterpret_cast<uintptr_t>(from) & 7) == 0) {
    const uint2 raw = *reinterpret_cast<const uint2*>(from);
    const T* four = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = static_cast<float>(four[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool in_range = first + i >= p.k_begin && first + i < p.k_begin + p.k_in;
    v[i] = in_range ? static_cast<float>(from[i]) : 0.0f;
  }
}

// kRows rows of one tile, or 16 of a taller one, and one block of 128 inputs.
template <class T, int kRows>
__global__ void __launch_bounds__(kRows * 32) transform_kernel(const TransformParams p) {
  __shared__ __align__(16) uint32_t image[kRows * 64];  // [8 k16][row pair or row octet][lane][...]
  release_dependents();
  await_predecessors();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, shard = blockIdx.z;
  const int padded_row = blockIdx.y * kRows + warp;
  if (block == 0 && blockIdx.y == 0 && shard == 0) {
    for (int i = threadIdx.x; i < p.flag_count; i += kRows * 32) p.flags[i] = 0;
  }

  float v[4] = {};
  if (padded_row < p.m) {
    const int first = block * 128 + 4 * lane;
    load_block<T>(p, padded_row, first, v);
    const uint2 scales = *reinterpret_cast<const uint2*>(p.suh + int64_t{shard} * p.k + first);
    const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&scales.x));
    const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&scales.y));
    v[0] *= low.x, v[1] *= low.y, v[2] *= high.x, v[3] *= high.y;
    hadamard_128(v, lane);
  }
  __half2 pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pair[i] = __floats2half2_rn(v[2 * i] * kHadamardScale, v[2 * i + 1] * kHadamardScale);
  }
  if (p.block_sums != nullptr) {
    const float2 a = __half22float2(pair[0]), b = __half22float2(pair[1]);
    float sum = (a.x + a.y) + (b.x + b.y);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, d);
    if (lane == 0) {
      const int64_t row = int64_t{shard} * p.row_tiles * p.rows + padded_row;
      p.block_sums[row * (p.k / 128) + block] = sum;
    }
  }

  // Inputs 4l to 4l+3 are two k pairs of step l / 4; pair q of a step is register q / 4 of the quad
  // lane q % 4. Tiles of 16 rows and more interleave two octets of rows.
  const int step = lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int q = 2 * (lane % 4) + i;
    const int fragment_lane = (warp % 8) * 4 + q % 4, reg = q / 4;
    const int at = p.core_matrices
                       ? step * 128 + (warp / 8) * 64 + reg * 32 + (warp % 8) * 4 + q % 4
                   : kRows == 8 ? step * 64 + fragment_lane * 2 + reg
                                : step * 128 + fragment_lane * 4 + (warp / 8) * 2 + reg;
    image[at] = *reinterpret_cast<const uint32_t*>(&pair[i]);
  }
  __syncthreads();
  // A step of the tile is rows * 32 bytes; this block holds kRows of those rows.
  const int tile = blockIdx.y * kRows / p.rows, row_in_tile = blockIdx.y * kRows % p.rows;
  uint8_t* to = p.image + (int64_t{shard} * p.row_tiles + tile) * image_bytes(p.k, p.rows) +
                int64_t{block} * 8 * p.rows * 32 + row_in_tile * 32;
  for (int i = threadIdx.x; i < kRows * 16; i += kRows * 32) {
    const int chunk = i * 16, of_step = kRows * 32;
    *reinterpret_cast<uint4*>(to + (chunk / of_step) * (p.rows * 32) + chunk % of_step) =
        reinterpret_cast<const uint4*>(image)[i];
  }
}

template <int kRows>
cudaError_t launch_rows(const TransformParams& p, bool dependent_launch, cudaStream_t stream) {
  const dim3 grid(p.k / 128, p.row_tiles * (p.rows / kRows), p.shards);
  auto* kernel = p.x_dtype == Dtype::kBfloat16 ? transform_kernel<__nv_bfloat16, kRows>
                                               : transform_kernel<__half, kRows>;
  return launch_kernel(kernel, grid, kRows * 32, 0, dependent_launch, stream, p);
}

}  // namespace

cudaError_t launch_transform(const TransformParams& params, bool dependent_launch,
                             cudaStream_t stream) {
  return params.rows == 8 ? launch_rows<8>(params, dependent_launch, stream)
                          : launch_rows<16>(params, dependent_launch, stream);
}

}  // namespace exl3
