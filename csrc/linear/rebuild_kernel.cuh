// Rebuilding weights in the original basis at the speed at which they can be written.
//
// A thread block makes one block of 128 x 128: warp w decodes the eight tiles of tile column w. The
// transform over 128 is one over the 16 inside a tile and one over the 8 tiles. Inside a tile it is a
// product with the 16 x 16 matrix of signs, which the tensor cores do exactly (fp16 weights, signs,
// fp32 sums); over the tiles of a warp it is three stages of additions in registers, and over the
// warps three more behind an exchange through shared memory. Between the two directions the values
// are rounded once to fp16, because they are operands again.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/decode.cuh"
#include "device/hadamard.cuh"
#include "device/instructions.cuh"
#include "linear/launch.cuh"
#include "linear/rebuild.h"

namespace exl3 {

// +1 or -1 as fp16: entry (row, column) of the 16 x 16 Hadamard matrix.
__device__ __forceinline__ uint32_t sign_pair(int row, int column) {
  const uint32_t first = __popc(row & column) & 1, second = __popc(row & (column + 1)) & 1;
  return 0x3C003C00u | first << 15 | second << 31;
}

// Three butterfly stages over an array of eight.
__device__ __forceinline__ void hadamard_8(float (&v)[8]) {
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & distance) != 0) continue;
      const float a = v[i], b = v[i + distance];
      v[i] = a + b, v[i + distance] = a - b;
    }
  }
}

template <int kHalfBits, Family kFamily>
__global__ void __launch_bounds__(256, 2) rebuild_kernel(const __grid_constant__ RebuildParams p) {
  using R = Rate<kHalfBits>;
  // Half a block of inputs at a time: [8 tiles][16 channels][64 inputs + 4], conflict-free for the
  // scattered stores of accumulators and for 16-byte loads along the inputs.
  constexpr int kStride = 68;
  __shared__ __align__(16) float exchange[8 * 16 * kStride];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, c = lane % 4;
  const int k_block = p.k_first / 128 + blockIdx.x, strip = p.n_first / 128 + blockIdx.y;

  const LaneWords<kHalfBits> words(lane);
  const uint32_t* tile_column = reinterpret_cast<const uint32_t*>(p.weights) +
                                (int64_t{strip} * (p.k / 16) + int64_t{k_block} * 8) * 8 *
                                    R::words32 +
                                (warp / 4) * 4 * R::words32 + warp % 4;
  uint32_t signs[4] = {sign_pair(g, 2 * c), sign_pair(g + 8, 2 * c), sign_pair(g, 2 * c + 8),
                       sign_pair(g + 8, 2 * c + 8)};

  float acc[8][2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t* tile = tile_column + i * 8 * R::words32;
    const uint32_t last = __ldg(tile + 4 * words.last);
    const uint32_t previous = __ldg(tile + 4 * words.previous);
    const uint32_t before = R::lane_words == 3 ? __ldg(tile + 4 * words.before) : 0;
    const AlignedRun run = align_run<kHalfBits>(last, previous, before, words.shift);
    uint32_t a[4];
    exact_fragment<kHalfBits, kFamily>(run, p.constants, a);
    // Read the other way round the same registers are two B operands: inputs are summed over now.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][half][j] = 0.0f;
      mma_m16n8k16(acc[i][half], signs, a[half], a[half + 2]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = acc[i][half][j];
      hadamard_8(v);
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[i][half][j] = v[i] * kHadamardScale;
    }
  }

  // This thread's part of the output: four inputs of one channel of each of the eight tiles.
  const int channel = 2 * warp + lane / 16, four = 4 * (lane % 16);
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    if (pass > 0) __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      auto& t = acc[4 * pass + i];
      uint32_t a[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const __half2 pair = __floats2half2_rn(t[j / 2][2 * (j % 2)], t[j / 2][2 * (j % 2) + 1]);
        a[j] = *reinterpret_cast<const uint32_t*>(&pair);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float d[4] = {};
        // The matrix is symmetric, so column g of it is row g.
        mma_m16n8k16(d, a, sign_pair(g + 8 * half, 2 * c), sign_pair(g + 8 * half, 2 * c + 8));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int n = warp * 16 + 8 * half + 2 * c + j % 2;
          exchange[n * kStride + 16 * i + g + 8 * (j / 2)] = d[j];
        }
      }
    }
    __syncthreads();
    const int k = k_block * 128 + 64 * pass + four;
    const uint2 raw = *reinterpret_cast<const uint2*>(p.suh + k);
    const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
    const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
    const float in_scale[4] = {low.x * kHadamardScale, low.y * kHadamardScale,
                               high.x * kHadamardScale, high.y * kHadamardScale};
    float v[4][8];
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      const float4 four_values =
          *reinterpret_cast<const float4*>(exchange + (t * 16 + channel) * kStride + four);
      v[0][t] = four_values.x, v[1][t] = four_values.y, v[2][t] = four_values.z;
      v[3][t] = four_values.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) hadamard_8(v[i]);
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      const int n = strip * 128 + t * 16 + channel;
      if (n < p.n_first || n >= p.n_first + p.n_count) continue;
      const float out_scale = __half2float(*reinterpret_cast<const __half*>(p.svh + n));
      uint16_t bits[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float value = v[i][t] * in_scale[i] * out_scale;
        bits[i] = p.dtype == Dtype::kBfloat16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                                              : __half_as_ushort(__float2half_rn(value));
      }
      const int at = k - p.k_first;
      uint16_t* to = p.out + int64_t{n - p.n_first} * p.out_stride + at;
      if (at >= 0 && at + 4 <= p.k_count && at % 4 == 0) {
        *reinterpret_cast<uint2*>(to) = make_uint2(bits[0] | static_cast<uint32_t>(bits[1]) << 16,
                                                   bits[2] | static_cast<uint32_t>(bits[3]) << 16);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (at + i >= 0 && at + i < p.k_count) to[i] = bits[i];
      }
    }
  }
}

// One warp a tile.
template <int kHalfBits, Family kFamily>
__global__ void reconstruct_kernel(const __grid_constant__ ReconstructParams p) {
  using R = Rate<kHalfBits>;
  const int lane = threadIdx.x % 32;
  const int64_t tile = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  if (tile >= int64_t{p.k_tiles} * p.n_tiles) return;
  const uint32_t* from = p.tiles + tile * R::words32;
  const LaneWords<kHalfBits> words(lane);
  const AlignedRun run = align_run<kHalfBits>(
      from[words.last], from[words.previous], from[words.before], words.shift);
  uint32_t a[4];
  exact_fragment<kHalfBits, kFamily>(run, p.constants, a);
  const int64_t row = tile / p.n_tiles * 16, column = tile % p.n_tiles * 16, n = p.n_tiles * 16;
  const int g = lane / 4, c = lane % 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint16_t* to = p.out + (row + 2 * c + 8 * (j / 2)) * n + column + g + 8 * (j % 2);
    to[0] = static_cast<uint16_t>(a[j]);
    to[n] = static_cast<uint16_t>(a[j] >> 16);
  }
}

template <int kHalfBits, Family kFamily>
cudaError_t launch_rebuild_family(const RebuildParams& p, cudaStream_t stream) {
  const int k_blocks = (p.k_first + p.k_count + 127) / 128 - p.k_first / 128;
  const int strips = (p.n_first + p.n_count + 127) / 128 - p.n_first / 128;
  return launch_kernel(rebuild_kernel<kHalfBits, kFamily>, dim3(k_blocks, strips), 256, 0, false,
                       stream, p);
}

template <int kHalfBits, Family kFamily>
cudaError_t launch_reconstruct_family(const ReconstructParams& p, cudaStream_t stream) {
  const int64_t tiles = int64_t{p.k_tiles} * p.n_tiles;
  return launch_kernel(reconstruct_kernel<kHalfBits, kFamily>,
                       dim3(static_cast<unsigned>((tiles + 7) / 8)), 256, 0, false, stream, p);
}

template <int kHalfBits>
cudaError_t launch_rebuild(const RebuildParams& params, Family family, cudaStream_t stream) {
  if (family == Family::kByteSum) {
    return launch_rebuild_family<kHalfBits, Family::kByteSum>(params, stream);
  }
  if constexpr (kHalfBits % 2 == 0) {
    return launch_rebuild_family<kHalfBits, Family::kHalves>(params, stream);
  }
  return cudaErrorInvalidValue;
}

template <int kHalfBits>
cudaError_t launch_reconstruct(const ReconstructParams& params, Family family,
                               cudaStream_t stream) {
  if (family == Family::kByteSum) {
    return launch_reconstruct_family<kHalfBits, Family::kByteSum>(params, stream);
  }
  if constexpr (kHalfBits % 2 == 0) {
    return launch_reconstruct_family<kHalfBits, Family::kHalves>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace exl3
