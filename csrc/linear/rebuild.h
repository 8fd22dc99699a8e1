// Weights back from their tiles: in the original basis for a dense product, or as stored.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "linear/gemm.h"

namespace exl3 {

// A window of W = diag(suh) H A H diag(svh) / 128, transposed: out[n - n_first][k - k_first].
struct RebuildParams {
  const uint8_t* weights;  // strips of the matrix
  const uint16_t* suh;     // fp16 [k]
  const uint16_t* svh;     // fp16 [n]
  uint16_t* out;           // [n_count, out_stride]
  int64_t out_stride;      // elements, a multiple of 8
  Dtype dtype;             // of out: bfloat16 or float16
  int k;                   // stored inputs
  int k_first, k_count, n_first, n_count;
  DecodeConstants constants;
};

// The rotated weight A itself, from tiles in stored order: out[k][n] fp16, bit-exact.
struct ReconstructParams {
  const uint32_t* tiles;  // [k / 16][n / 16][words]
  uint16_t* out;          // [k, n]
  int k_tiles, n_tiles;
  DecodeConstants constants;
};

// out[row][column] += bias[column], rounded once more; for the dense product, which has no
// epilogue.
cudaError_t launch_add_bias(uint16_t* out, Dtype dtype, const void* bias, Dtype bias_dtype,
                            int64_t rows, int64_t columns, cudaStream_t stream);

template <int kHalfBits>
cudaError_t launch_rebuild(const RebuildParams& params, Family family, cudaStream_t stream);
template <int kHalfBits>
cudaError_t launch_reconstruct(const ReconstructParams& params, Family family, cudaStream_t stream);

}  // namespace exl3
