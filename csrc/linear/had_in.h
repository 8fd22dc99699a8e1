// The input transform: activations to the fp16 image that the product reads.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "linear/gemm.h"

namespace exl3 {

struct TransformParams {
  const void* x;  // [m, k_in], rows x_stride apart
  int64_t x_stride;
  Dtype x_dtype;        // bfloat16 or float16
  const uint16_t* suh;  // fp16 [shards, k]
  uint8_t* image;       // [shards][row tiles][image_bytes(k, rows)]
  float* block_sums;    // [shards][row tiles * rows][k / 128], or null
  uint32_t* flags;      // set to zero here for the products that follow
  int flag_count;
  int m, k, k_begin, k_in;
  int shards;
  int rows;  // of a row tile
  int row_tiles;
  bool
      core_matrices;  // the order for products of warpgroups instead of fragments; 16 rows and more
};

cudaError_t launch_transform(const TransformParams& params, bool dependent_launch,
                             cudaStream_t stream);

}  // namespace exl3
