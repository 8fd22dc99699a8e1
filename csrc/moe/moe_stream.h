// Routed experts of few tokens: what the host hands to the three kernels of one call.
//
//   gate and up  product; each block finds the routing and transforms the inputs of its range
//   down         product; each block adds up what gate and up left for its range, applies the
//                activation and transforms the inputs of down
//   finish       adds up what down left, output transform, the slots of a token in their order
//
// No kernel only plans, gathers or combines, and no block waits for another: at one token a launch
// that depends on the one before costs as much as a fifth of the decoding.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/forms.h"
#include "linear/operands.h"
#include "moe/activation.h"
#include "moe/moe.h"
#include "moe/moe_stream_split.h"

namespace exl3 {

// The routing as the caller has it.
struct MoeIds {
  const void* ids;  // [pairs]
  bool wide;        // int64, else int32
  const int* map;   // [global_experts] to a place here or -1; null where ids are places
  int pairs, experts, global_experts;
  int rows;  // of a tile: 1, 2 or 4
};

// Rows of 128 sums, see MoeParts.
struct MoeStreamSums {
  float *partials, *ends;
};

struct MoeStreamParams {
  MoeIds ids;
  MoeStreamWork work;
  const uint8_t* weights;   // strips
  const int64_t* table[2];  // [experts][2] of each half: first 16-bit word, kind
  const uint16_t* suh;      // fp16 [experts][halves][k]
  MoeStreamSums to;
  DecodeConstants constants;
  bool down;
  // Gate and up: the tokens.
  Input input;
  const float* pair_weights;  // multiplied into the rows, or null
  Divisor by_slots;
  // Down: what gate and up left.
  MoeStreamWork before;
  MoeStreamSums from;
  const uint16_t* svh;  // fp16 [experts][2][k of down]
  Activation activation;
  int inner_begin, inner_end;  // columns that count; the others become zero
};

struct MoeStreamLaunch {
  Form form;
  Family family;
  int input_bytes;  // of shared memory
  bool dependent_launch;
  cudaStream_t stream;
};

// One function a rate, as launch_moe_gemm.
template <int kHalfBits>
cudaError_t launch_moe_stream(const MoeStreamParams& params, const MoeStreamLaunch& launch);

struct MoeFinishParams {
  MoeIds ids;
  MoeStreamWork work;
  MoeStreamSums from;
  const uint16_t* svh;   // fp16 [experts][n]
  const float* weights;  // [pairs], or null where rows were multiplied before
  void* out;             // [tokens, n_out]
  Dtype out_dtype;
  int tokens, top_k, n_out;
};
cudaError_t launch_moe_finish(const MoeFinishParams& params, bool dependent, cudaStream_t stream);

}  // namespace exl3
