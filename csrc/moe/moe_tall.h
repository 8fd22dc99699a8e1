// Routed experts of many tokens on sm_90: what the host hands to the kernels of one call.
//
//   plan     which rows go to which expert, in tiles of 64 rows, up to four of them a part
//   gather   each routed row with its expert's input scales, transformed, as image of the product
//   product  gate and up by warpgroups; the activation and the transform for down at its end
//   product  down, to one row for each token and slot
//   combine  as for the other tiles
//
// A part is multiplied at once, by one thread block for each 128 outputs; k is cut nowhere.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moe/moe.h"
#include "moe/moe_tall_split.h"

namespace exl3 {

struct MoeTallGatherParams {
  const void* x;  // [tokens, k_in], rows x_stride apart
  int64_t x_stride;
  Dtype x_dtype;
  const float* weights;  // [pairs], multiplied into the rows; or null
  const uint16_t* suh;   // fp16 [experts][2][k]
  MoeRouting routing;
  uint8_t* image;       // of gate
  int64_t image_bytes;  // from there to that of up
  int k, k_in;
  Divisor by_slots;   // top_k
  Divisor by_shares;  // set by the launch
  int blocks;
};
cudaError_t launch_moe_tall_gather(MoeTallGatherParams& params, bool dependent,
                                   cudaStream_t stream);

struct MoeTallParams {
  // One or, where `pair`, two matrices of each expert: words, their places, scales, images.
  const uint8_t* weights;   // strips
  const int64_t* table[2];  // [experts][2]: first 16-bit word, kind
  const uint16_t* svh[2];   // fp16, of expert 0
  int64_t svh_stride;       // from one expert to the next
  const uint8_t* image[2];
  const MoeTile* list;  // parts; `tile` is the expert's first tile of rows
  const int* list_count;
  const int* counts;
  const int* row_pair;
  int k, strips;  // inputs and blocks of 128 outputs of a matrix
  Divisor by_strips;
  bool pair;
  // pair: the image that down reads.
  uint8_t* next_image;
  const uint16_t* next_suh;         // fp16 [experts][128 * strips]
  float slope, cubic, beta, limit;  // of the activation, see `gated`
  int inner_begin, inner_end;       // columns that count; the others become zero
  float* aside;                     // [blocks][kMoePartRows][128], for gate
  // else: rows by pair, fp32 or, where `short_rows`, bfloat16.
  void* out;
  bool short_rows;
  int64_t out_stride;
  uint32_t* taken;  // how many items were taken beyond the first of each block; zero at the start
  int blocks;
  DecodeConstants constants;
};

struct MoeTallLaunch {
  Family family;
  bool dependent;
  cudaStream_t stream;
};
// One function a rate, as launch_gemm.
template <int kHalfBits>
cudaError_t launch_moe_tall(MoeTallParams& params, const MoeTallLaunch& launch);

}  // namespace exl3
