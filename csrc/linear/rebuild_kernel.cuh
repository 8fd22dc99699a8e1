// Rebuilding weights in the original basis at the speed at which they can be written.
//
// A thread block makes one block of 128 x 128: warp w decodes the eight tiles of tile column w. The
// transform over 128 is one over the 16 inside a tile and one over the 8 tiles. Inside a tile it is
// a product with the 16 x 16 matrix of signs, which the tensor cores do exactly; over tiles it is
// three stages of packed fp16 additions, in registers for the inputs, and behind an exchange
// through shared memory for the outputs. So a value is rounded to fp16 ten times on its way: after
// either product, after each of the six stages, and the product of the scales and that with it.
// That is a third of what rounding to bfloat16 then adds.
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

// Entries (row, column) and (row, column + 1) of the 16 x 16 Hadamard matrix times `one`, which is
// a power of two as fp16.
__device__ __forceinline__ uint32_t sign_pair(uint32_t one, int row, int column) {
  const uint32_t first = __popc(row & column) & 1, second = __popc(row & (column + 1)) & 1;
  return (one | one << 16) | first << 15 | second << 31;
}

// Three blocks a multiprocessor hide the latency of the first loads on sm_90. Where memory is
// slower two are enough, and nothing spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define EXL3_REBUILD_BLOCKS 3
#else
#define EXL3_REBUILD_BLOCKS 2
#endif

template <int kHalfBits, Family kFamily, Dtype kDtype>
__global__ void __launch_bounds__(256, EXL3_REBUILD_BLOCKS)
    rebuild_kernel(const __grid_constant__ RebuildParams p) {
  using R = Rate<kHalfBits>;
  // [128 channels][128 inputs + 8] fp16: the row stride makes scattered 4-byte stores of
  // accumulators conflict-free, and 16-byte loads along the inputs are so anyway.
  constexpr int kStride = 136;
  __shared__ __align__(16) uint16_t exchange[128 * kStride];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, c = lane % 4;
  const int k_block = p.k_first / 128 + blockIdx.x, strip = p.n_first / 128 + blockIdx.y;

  const LaneWords<kHalfBits> words(lane);
  const uint32_t* tile = reinterpret_cast<const uint32_t*>(p.weights) +
                         (int64_t{strip} * (p.k / 16) + int64_t{k_block} * 8) * 8 * R::words32 +
                         (warp / 4) * 4 * R::words32 + warp % 4;
  uint32_t last[8], previous[8], before[8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i, tile += 8 * R::words32) {
    last[i] = __ldg(tile + 4 * words.last);
    previous[i] = __ldg(tile + 4 * words.previous);
    if constexpr (R::lane_words == 3) before[i] = __ldg(tile + 4 * words.before);
  }
  // This thread's part of the output: eight inputs of one channel of each of the eight tiles.
  const int channel = 2 * warp + lane / 16, eight = 8 * (lane % 16);
  const int k = k_block * 128 + eight, n = strip * 128 + channel;

  // The normalisation, 1 / 128, hides in the entries: 1/8 for the inputs, 1/16 for the outputs.
  const auto matrix = [&](uint32_t one, uint32_t (&m)[4]) {
    m[0] = sign_pair(one, g, 2 * c), m[1] = sign_pair(one, g + 8, 2 * c);
    m[2] = sign_pair(one, g, 2 * c + 8), m[3] = sign_pair(one, g + 8, 2 * c + 8);
  };
  uint32_t in_signs[4], out_signs[4];
  matrix(0x3000u, in_signs);
  matrix(0x2C00u, out_signs);
  // half[j][i]: tile i, inputs g (j even: channels 2c, 2c+1; j odd: 2c+8, 2c+9), g + 8 for j > 1.
  __half2 half[4][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const AlignedRun run = align_run<kHalfBits>(last[i], previous[i], before[i], words.shift);
    uint32_t a[4];
    exact_fragment<kHalfBits, kFamily>(run, p.constants, a);
    // Read the other way round the same registers are two B operands: inputs are summed over now.
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
      float d[4] = {};
      mma_m16n8k16(d, in_signs, a[octet], a[octet + 2]);
      half[octet][i] = __floats2half2_rn(d[0], d[1]);
      half[octet + 2][i] = __floats2half2_rn(d[2], d[3]);
    }
  }
  uint16_t raw_out[8];
#pragma unroll
  for (int t = 0; t < 8; ++t) raw_out[t] = __ldg(p.svh + n + 16 * t);
  const uint4 raw_in = __ldg(reinterpret_cast<const uint4*>(p.suh + k));
#pragma unroll
  for (int j = 0; j < 4; ++j) butterflies(half[j]);

#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
      // Those accumulators are B operands again, of the product that sums over the channels.
      float d[4] = {};
      mma_m16n8k16(d, out_signs, *reinterpret_cast<const uint32_t*>(&half[2 * octet][i]),
                   *reinterpret_cast<const uint32_t*>(&half[2 * octet + 1][i]));
      const int at = (warp * 16 + g) * kStride + 16 * i + 8 * octet + 2 * c;
      *reinterpret_cast<__half2*>(exchange + at) = __floats2half2_rn(d[0], d[1]);
      *reinterpret_cast<__half2*>(exchange + at + 8 * kStride) = __floats2half2_rn(d[2], d[3]);
    }
  }
  __syncthreads();

  __half2 v[4][8];
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const uint4 row =
        *reinterpret_cast<const uint4*>(exchange + (t * 16 + channel) * kStride + eight);
    v[0][t] = *reinterpret_cast<const __half2*>(&row.x);
    v[1][t] = *reinterpret_cast<const __half2*>(&row.y);
    v[2][t] = *reinterpret_cast<const __half2*>(&row.z);
    v[3][t] = *reinterpret_cast<const __half2*>(&row.w);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) butterflies(v[j]);
  const __half2 in_scale[4] = {
      *reinterpret_cast<const __half2*>(&raw_in.x), *reinterpret_cast<const __half2*>(&raw_in.y),
      *reinterpret_cast<const __half2*>(&raw_in.z), *reinterpret_cast<const __half2*>(&raw_in.w)};
  const int at = k - p.k_first;
  const bool whole = at >= 0 && at + 8 <= p.k_count && (at | p.out_stride) % 8 == 0;
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const int row = n + 16 * t - p.n_first;
    const __half2 out_scale = __half2half2(__ushort_as_half(raw_out[t]));
    uint32_t bits[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const __half2 value = __hmul2(v[j][t], __hmul2(in_scale[j], out_scale));
      bits[j] = *reinterpret_cast<const uint32_t*>(&value);
      if constexpr (kDtype == Dtype::kBfloat16) {
        const float2 wide = __half22float2(value);
        const __nv_bfloat162 pair = __floats2bfloat162_rn(wide.x, wide.y);
        bits[j] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
    if (row < 0 || row >= p.n_count) continue;
    uint16_t* to = p.out + int64_t{row} * p.out_stride + at;
    if (whole) {
      *reinterpret_cast<uint4*>(to) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (at + i >= 0 && at + i < p.k_count) {
        to[i] = static_cast<uint16_t>(bits[i / 2] >> 16 * (i % 2));
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
  const AlignedRun run =
      align_run<kHalfBits>(from[words.last], from[words.previous], from[words.before], words.shift);
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
  auto* kernel = p.dtype == Dtype::kBfloat16 ? rebuild_kernel<kHalfBits, kFamily, Dtype::kBfloat16>
                                             : rebuild_kernel<kHalfBits, kFamily, Dtype::kFloat16>;
  return launch_kernel(kernel, dim3(k_blocks, strips), 256, 0, false, stream, p);
}

template <int kHalfBits, Family kFamily>
cudaError_t launch_reconstruct_family(const ReconstructParams& p, cudaStream_t stream) {
  const int64_t tiles = int64_t{p.k_tiles} * p.n_tiles;
  return launch_kernel(reconstruct_kernel<kHalfBits, kFamily>,
                       dim3(static_cast<unsigned>((tiles + 7) / 8)), 256, 0, false, stream, p);
}

template <int kHalfBits>
cudaError_t launch_rebuild(const RebuildParams& params, Family family, cudaStream_t stream) {
  return with_family<kHalfBits>(family, [&](auto constant) {
    return launch_rebuild_family<kHalfBits, decltype(constant)::value>(params, stream);
  });
}

template <int kHalfBits>
cudaError_t launch_reconstruct(const ReconstructParams& params, Family family,
                               cudaStream_t stream) {
  return with_family<kHalfBits>(family, [&](auto constant) {
    return launch_reconstruct_family<kHalfBits, decltype(constant)::value>(params, stream);
  });
}

}  // namespace exl3
