// The end of a piece of moe_tall_kernel: from sums in the rotated basis to outputs.
//
// A lane takes a quarter of a row's 128 channels: 16 j + 4 q + i for the q-th lane of four. Of the
// seven stages of the transform one is done among the accumulators, five among the lane's values
// and one between neighbours.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/hadamard.cuh"
#include "linear/gemm_multiply.cuh"
#include "moe/moe_routing.cuh"
#include "moe/moe_tall.h"
#include "moe/moe_tall_config.cuh"

namespace exl3 {

// The row of an octet, or of eight, that a lane takes: rows that are read at once lie four apart,
// so that they are in different banks.
__device__ __forceinline__ int tall_row_of_lane(int lane) { return lane / 4 % 2 * 4 + lane / 8; }

// Accumulators of the chunk-th 64 rows to sums[row][channel], the stage over channels 8 apart done.
template <class C, int kChunk>
__device__ __forceinline__ void spread_chunk(float* sums, const float (&acc)[C::kRowTiles][4],
                                             int warp, int lane) {
  const int channel = tile_of_lane<C>(warp, lane, 0) * 16 + lane / 4;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = acc[kChunk * 8 + r][i], high = acc[kChunk * 8 + r][i + 2];
      float* to = sums + (8 * r + 2 * (lane % 4) + i) * C::kRowStride + channel;
      to[0] = low + high, to[8] = low - high;
    }
  }
}

// A lane's values times fp16 scales of the strip.
__device__ __forceinline__ void scale_values(const uint16_t* scales, int lane, float (&v)[32]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint2 raw = *reinterpret_cast<const uint2*>(scales + 16 * j + 4 * (lane % 4));
    const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
    const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
    v[4 * j] *= low.x, v[4 * j + 1] *= low.y, v[4 * j + 2] *= high.x, v[4 * j + 3] *= high.y;
  }
}

// A lane's values of row `row` of octet `octet` of a part to its image.
__device__ __forceinline__ void store_part(uint8_t* image, int part_rows, int strip, int octet,
                                           int row, int lane, const float (&v)[32]) {
  // Eight neighbouring inputs are 16 bytes, of two lanes: the even one stores those of the first
  // half of the block, the odd one the others.
  const bool odd = lane % 2 != 0;
  uint8_t* to = image + (octet * 2 + lane % 4 / 2) * 128 + row * 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint2 both[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int from = 4 * (j + 4 * half);
      const __half2 low = __floats2half2_rn(v[from], v[from + 1]);
      const __half2 high = __floats2half2_rn(v[from + 2], v[from + 3]);
      both[half] = make_uint2(*reinterpret_cast<const uint32_t*>(&low),
                              *reinterpret_cast<const uint32_t*>(&high));
    }
    const uint2 mine = odd ? both[1] : both[0], others = odd ? both[0] : both[1];
    uint2 got;
    got.x = __shfl_xor_sync(0xFFFFFFFFu, others.x, 1);
    got.y = __shfl_xor_sync(0xFFFFFFFFu, others.y, 1);
    const int step = strip * 8 + j + (odd ? 4 : 0);
    *reinterpret_cast<uint4*>(to + int64_t{step} * part_rows * 32) =
        odd ? make_uint4(got.x, got.y, mine.x, mine.y) : make_uint4(mine.x, mine.y, got.x, got.y);
  }
}

// A lane's values of a row, rounded to bfloat16.
__device__ __forceinline__ void store_short(uint16_t* to, const float (&v)[32]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(v[4 * j], v[4 * j + 1]);
    const __nv_bfloat162 high = __floats2bfloat162_rn(v[4 * j + 2], v[4 * j + 3]);
    *reinterpret_cast<uint2*>(to + 16 * j) = make_uint2(*reinterpret_cast<const uint32_t*>(&low),
                                                        *reinterpret_cast<const uint32_t*>(&high));
  }
}

// What becomes of 64 rows whose sums are in shared memory; `octet` is that of the warp.
template <class C>
__device__ __forceinline__ void finish_rows(const MoeTallParams& p, const MoePiece& piece, int half,
                                            const float* sums, int octet, int warp, int lane) {
  const int row = tall_row_of_lane(lane), q = lane % 4;
  const int row_of_part = octet * 8 + row;
  // This thread's own values of gate wait in memory for those of up.
  auto* aside = reinterpret_cast<float4*>(p.aside) +
                (int64_t{blockIdx.x} * (C::kRows / 64) + octet / 8) * (8 * C::kThreads) +
                threadIdx.x;
  float v[32];
  const float* from = sums + (warp * 8 + row) * C::kRowStride + 4 * q;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 four = *reinterpret_cast<const float4*>(from + 16 * j);
    v[4 * j] = four.x, v[4 * j + 1] = four.y, v[4 * j + 2] = four.z, v[4 * j + 3] = four.w;
  }
  butterflies(v);
  lane_butterfly<1>(v, lane);
#pragma unroll
  for (int i = 0; i < 32; ++i) v[i] *= kHadamardScale;
  scale_values(piece.svh, lane, v);

  if (!p.pair) {
    if (row_of_part >= piece.rows) return;
    const int64_t pair = piece.row_pair[row_of_part];
    const int64_t at = pair * p.out_stride + piece.strip * 128 + 4 * q;
    if (p.short_rows) {
      store_short(static_cast<uint16_t*>(p.out) + at, v);
    } else {
      auto* to = reinterpret_cast<float4*>(static_cast<float*>(p.out) + at);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        to[4 * j] = make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
      }
    }
    return;
  }
  if (half == 0) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      aside[j * C::kThreads] = make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 four = aside[j * C::kThreads];
    const float gate[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[4 * j + i] = gated(p.slope, p.cubic, p.beta, p.limit, gate[i], v[4 * j + i]);
    }
  }
  // Rows that are not there come out as they may: nothing but such rows is made of them.
  const int channel = piece.strip * 128 + 4 * q;
  if (piece.strip * 128 < p.inner_begin || (piece.strip + 1) * 128 > p.inner_end) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int place = channel + i / 4 * 16 + i % 4;
      if (place < p.inner_begin || place >= p.inner_end) v[i] = 0.0f;
    }
  }
  scale_values(piece.next_suh, lane, v);
  butterflies(v);
  lane_butterfly<1>(v, lane);
  lane_butterfly<2>(v, lane);
#pragma unroll
  for (int i = 0; i < 32; ++i) v[i] *= kHadamardScale;
  const int part_rows = piece.tiles * kMoeTallTile;
  uint8_t* image = p.next_image + int64_t{piece.first} * kMoeTallTile * 2 * p.strips * 128;
  store_part(image, part_rows, piece.strip, octet, row, lane, v);
}

template <class C>
__device__ __forceinline__ void finish_piece(const MoeTallParams& p, const MoePiece& piece,
                                             int half, float* sums,
                                             const float (&acc)[C::kRowTiles][4], int warp,
                                             int lane) {
  // A loop, because code that does not fit the instruction cache costs more than what it does.
#pragma unroll 1
  for (int chunk = 0; chunk < piece.tiles; ++chunk) {
    C::barrier();
    for_constant<C::kRows / C::kChunkRows>([&](auto index) {
      if (chunk == decltype(index)::value) {
        spread_chunk<C, decltype(index)::value>(sums, acc, warp, lane);
      }
    });
    C::barrier();
    finish_rows<C>(p, piece, half, sums, chunk * 8 + warp, warp, lane);
  }
}

}  // namespace exl3
