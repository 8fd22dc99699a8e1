// Routed experts on the device: what the host hands to the kernels of one call, in their order.
//
//   plan     which rows go to which expert, as tiles of rows
//   gather   each routed row with its expert's input scales, transformed, as image of the product
//   product  gate and up; the activation and the transform for down in its epilogue
//   product  down, to one fp32 row for each token and slot
//   combine  the slots of a token, weighted, in their order, rounded once
//
// Nothing depends on the routing but what the kernels read from memory, so a call can be captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/forms.h"
#include "linear/gemm.h"
#include "moe/activation.h"
#include "moe/divisor.h"
#include "moe/limits.h"

namespace exl3 {

// A tile of rows in the work list of a product. The tiles of an expert follow one another.
struct alignas(16) MoeTile {
  int expert;
  int first, count;  // the expert's tiles in this list
  int tile;          // its number among all tiles, which is its place in images
};

// What plan writes. Read past L1: products look at it before the kernel before them has ended.
struct MoeRouting {
  int* tiles;        // [1] number of tiles of all experts
  int* counts;       // [experts] rows
  int* tile_expert;  // [tiles]
  int* row_pair;     // [tiles][rows] token * top_k + slot, -1 past the expert's rows
  int* tile_part;    // [tiles] MoePart, or null where tiles are multiplied one by one
  MoeTile* lists;    // [lists][most_tiles]
  int* list_counts;  // [lists]
};

struct MoePlanParams {
  const void* ids;       // [pairs]
  bool wide_ids;         // int64, else int32
  const int* map;        // [global_experts] to a place here or -1; null where ids are places
  const int64_t* table;  // [3][experts][2]
  MoeRouting routing;
  uint32_t* flags;  // set to zero for all products
  int flag_count;
  int pairs, experts, global_experts;
  int rows;        // of a tile
  int blocks;      // thread blocks that share the pairs
  int* of_blocks;  // [blocks][experts] rows that each finds; null for one block
  int most_tiles;
  int lists;  // 1: all tiles in one; else one for each product
  int8_t list_projection[kMaxLists];
  int8_t list_kind[kMaxLists];
};
cudaError_t launch_moe_plan(const MoePlanParams& params, bool dependent, cudaStream_t stream);

struct MoeGatherParams {
  const void* x;  // [tokens, k_in], rows x_stride apart
  int64_t x_stride;
  Dtype x_dtype;
  const float* weights;  // [pairs], multiplied into the rows; or null
  const uint16_t* suh;   // fp16 [experts][2][k]
  MoeRouting routing;
  uint8_t* image;     // [2][most_tiles][image_bytes(k, rows)]
  float* block_sums;  // [2][most_tiles][rows][k / 128], or null
  int k, k_in, top_k, rows, most_tiles;
  int blocks;
};
cudaError_t launch_moe_gather(const MoeGatherParams& params, bool dependent, cudaStream_t stream);

struct MoeGemmParams {
  // One or, where `pair`, two matrices of each expert: words, their places, scales, images.
  const uint8_t* weights;   // strips
  const int64_t* table[2];  // [experts][2]: first 16-bit word, kind
  const uint16_t* svh[2];   // fp16, of expert 0
  int64_t svh_stride;       // from one expert to the next
  const uint8_t* image[2];  // of tile 0
  const float* block_sums[2];
  int64_t image_tile_bytes;
  const MoeTile* list;
  const int* list_count;
  const int* counts;
  const int* row_pair;
  int k, strips;                // inputs and blocks of 128 outputs of a matrix
  Divisor by_steps, by_strips;  // k / 16 and strips
  int positions;                // thread blocks, at most
  bool pair;
  bool whole_strips;  // cut k nowhere, so that a row's sums do not depend on the batch
  // pair: the image that down reads.
  uint8_t* next_image;
  float* next_sums;
  const uint16_t* next_suh;         // fp16 [experts][128 * strips]
  float slope, cubic, beta, limit;  // of the activation, see `gated`
  int inner_begin, inner_end;       // columns that count; the others become zero
  int64_t next_tile_bytes;
  // else: fp32 rows, by pair or by place in the tiles.
  float* out;
  int64_t out_stride;
  bool out_by_pair;
  float* partials;  // [1, or 3 where pair][positions][rows][128]
  uint32_t* flags;  // [positions], zero at the start
  DecodeConstants constants;
};
// One function a rate, as launch_gemm.
template <int kHalfBits>
cudaError_t launch_moe_gemm(MoeGemmParams& params, const GemmLaunch& launch);

// Where gate and up of an expert are of different kinds, or the activation is GELU by erf: what the
// epilogue of their product does else. `gate_up` is fp32 [tiles * rows][2 * inner].
struct MoeActivateParams {
  const float* gate_up;
  MoeRouting routing;
  uint8_t* next_image;
  float* next_sums;
  const uint16_t* next_suh;
  Activation activation;
  int inner, inner_begin, inner_end, rows;
  int blocks;
};
cudaError_t launch_moe_activate(const MoeActivateParams& params, bool dependent,
                                cudaStream_t stream);

struct MoeCombineParams {
  const void* rows;  // fp32 or, where `short_rows`, bfloat16 [pairs][row_stride]
  bool short_rows;
  int64_t row_stride;
  const float* weights;  // [pairs], or null where rows were multiplied before
  const void* ids;
  bool wide_ids;
  const int* map;
  void* out;  // [tokens, n_out]
  Dtype out_dtype;
  int tokens, top_k, n_out, global_experts, experts;
};
cudaError_t launch_moe_combine(const MoeCombineParams& params, bool dependent, cudaStream_t stream);

}  // namespace exl3
