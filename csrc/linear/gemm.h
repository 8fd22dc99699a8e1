// The product of transformed activations with an EXL3 weight: what the host hands to the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/forms.h"
#include "format/codebook.cuh"
#include "linear/gemm_limits.h"
#include "linear/operands.h"

namespace exl3 {

struct GemmShard {
  const uint8_t* weights;   // strips
  const uint8_t* image;     // of row tile 0
  const float* block_sums;  // [padded rows][k / 128] sums of the image, for Form::kFast of kByteSum
  Columns columns;
};

struct GemmParams {
  GemmShard shards[kMaxShards];
  int shard_count;
  int m;                     // rows of this launch
  int k;                     // multiple of 128
  int strips;                // of all shards
  int positions;             // thread blocks a row tile
  int64_t image_tile_bytes;  // from one row tile of a shard to the next
  Output out;
  float* partials;  // [row tiles][positions][parts of a position][rows][128]
  uint32_t* flags;  // [row tiles][positions][parts], zero at the start
  DecodeConstants constants;
};

struct GemmLaunch {
  int rows;  // of a row tile: 8, 16, 32, 64 or 128
  Form form;
  Family family;
  bool dependent_launch;
  cudaStream_t stream;
  Room room = Room::kSmall;  // kLarge on sm_90, whose code has nothing else for some row counts
};

// One function a rate, each in a file of its own: kHalfBits is twice the bits per weight.
template <int kHalfBits>
cudaError_t launch_gemm(GemmParams& params, const GemmLaunch& launch);

}  // namespace exl3
