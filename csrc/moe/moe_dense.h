// Routed experts of many tokens through rebuilt weights: what the host hands to the kernels between
// torch's grouped products. Experts go through them group by group, because their weights in the
// original basis are four times as large and more.
//
//   plan        where the rows of each expert lie, as for the products from the trellis
//   for each group of experts
//     rows      the tokens of each expert, one after the other
//     rebuild   gate and up; grouped product
//     activate
//     rebuild   down; grouped product
//     scatter   each result to its token and slot
//   combine     as for the products from the trellis
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moe/activation.h"
#include "moe/moe.h"

namespace exl3 {

// The rows of a group, counted from its first one.
struct MoeGroup {
  const int* row_pair;  // of all rows, see MoeRouting
  const int* first;     // [1] where the group's rows begin in row_pair
  const int* count;     // [1] how many there are
};

struct MoeDenseRowsParams {
  MoeGroup group;
  const uint16_t* x;  // bfloat16 [tokens, k_in], rows x_stride apart
  int64_t x_stride;
  int k, k_in, top_k;
  uint16_t* out;  // bfloat16 [rows, k], zeros past k_in and for padding
  int blocks;
};
cudaError_t launch_moe_dense_rows(const MoeDenseRowsParams& params, cudaStream_t stream);

struct MoeDenseActivateParams {
  MoeGroup group;
  const uint16_t* gate_up;  // bfloat16 [rows, 2, inner]
  uint16_t* out;            // bfloat16 [rows, inner], zeros for padding
  Activation activation;
  int inner, inner_begin, inner_end;
  int blocks;
};
cudaError_t launch_moe_dense_activate(const MoeDenseActivateParams& params, cudaStream_t stream);

struct MoeDenseScatterParams {
  MoeGroup group;
  const uint16_t* rows;  // bfloat16 [rows, n]
  uint16_t* out;         // bfloat16 [pairs, n]
  int n;
  int blocks;
};
cudaError_t launch_moe_dense_scatter(const MoeDenseScatterParams& params, cudaStream_t stream);

}  // namespace exl3
