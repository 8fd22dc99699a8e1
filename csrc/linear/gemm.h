// The product of transformed activations with an EXL3 weight: what the host hands to the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/forms.h"
#include "format/codebook.cuh"
#include "linear/gemm_limits.h"

namespace exl3 {

inline constexpr int kMaxShards = 16;  // of one fused layer

enum class Dtype : int { kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

struct GemmShard {
  const uint8_t* weights;   // strips
  const uint8_t* image;     // of row tile 0
  const float* block_sums;  // [padded rows][k / 128] sums of the image, for Form::kFast of kByteSum
  const uint16_t* svh;      // fp16 [n]
  int strip_begin;          // index of its first strip among those of the launch
  int n_begin, n_out;       // columns wanted of it
  int out_begin;            // first column in the output
};

struct GemmParams {
  GemmShard shards[kMaxShards];
  int shard_count;
  int m;                     // rows of this launch
  int k;                     // multiple of 128
  int strips;                // of all shards
  int positions;             // thread blocks a row tile
  int64_t image_tile_bytes;  // from one row tile of a shard to the next
  void* out;                 // [m, out_stride]
  int64_t out_stride;
  const void* bias;  // [n], indexed like the columns of out; may be null
  Dtype out_dtype, bias_dtype;
  float* partials;  // [row tiles][positions][rows][128]
  uint32_t* flags;  // [row tiles][positions], zero at the start
  DecodeConstants constants;
};

struct GemmLaunch {
  int rows;  // of a row tile: 8, 16, 32, 64 or 128
  Form form;
  Family family;
  bool dependent_launch;
  cudaStream_t stream;
};

// One function a rate, each in a file of its own: kHalfBits is twice the bits per weight.
template <int kHalfBits>
cudaError_t launch_gemm(GemmParams& params, const GemmLaunch& launch);

}  // namespace exl3
