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
#include "moe/moe_stream_limits.h"

namespace exl3 {

// The routing as the caller has it.
struct MoeIds {
  const void* ids;  // [pairs]
  bool wide;        // int64, else int32
  const int* map;   // [global_experts] to a place here or -1; null where ids are places
  int pairs, experts, global_experts;
  int rows;  // of a tile: 1, 2 or 4
};

// How the work of a product is counted: unit = k16 step of a strip of a segment, in this order. A
// segment is one matrix of a tile: gate and then up, or down.
struct MoeStreamWork {
  int steps;   // k / 16
  int strips;  // blocks of 128 outputs of a matrix
  int halves;  // matrices of a tile: 2 or 1
  int least;   // units of a position, at least
  int positions;
  Divisor by_steps, by_strips, by_positions;

  EXL3_HOST_DEVICE int tile_of(int segment) const { return halves == 2 ? segment >> 1 : segment; }

  static MoeStreamWork of(int64_t k, int64_t n, int halves, int positions) {
    const auto steps = static_cast<int>(k / 16), strips = static_cast<int>(n / 128);
    return {steps,
            strips,
            halves,
            moe_stream_least(steps),
            positions,
            Divisor::of(static_cast<uint32_t>(steps)),
            Divisor::of(static_cast<uint32_t>(strips)),
            Divisor::of(static_cast<uint32_t>(positions))};
  }
};

// What positions and warps leave of strip s (counted over all segments), rows of 128 sums:
//   partials[(p + s) * rows + row]  the sum of the warps of position p whose share ends in s,
//   ends[s * rows + row]            what a warp found of s whose share goes on into the next strip.
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
