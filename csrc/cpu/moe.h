// exl3::moe on the CPU: routed experts, each an EXL3 gate, up and down projection.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/linear.h"
#include "moe/activation.h"

namespace exl3::cpu {

// One stored matrix of one expert.
struct ExpertMatrix {
  const uint16_t* trellis;
  const uint16_t *suh, *svh;
  int codebook, tile_words;
};

struct MoeProblem {
  const void* x;  // [m, k_in], rows x_stride elements apart
  void* y;        // [m, n_out], contiguous
  Dtype dtype;    // of x and y
  int64_t m, k_in, x_stride, n_out;
  int64_t k, inner, n;              // stored: inputs, width between the products, outputs
  int64_t inner_begin, inner_size;  // the part of the width that is used
  int top_k;
  const float* weights;      // [m, top_k]
  std::vector<int> experts;  // [m, top_k], index into gate, up and down; -1 counts as absent
  std::vector<ExpertMatrix> gate, up, down;
  Activation activation;
  bool weight_on_input;  // multiply a row of x, not the result, by its weight
};

// Computes in float32 with one rounding at the end. A row's result is one fixed sequence of
// operations, slots added in their order, whatever the other rows are.
void moe(const MoeProblem& problem, const ForRange& for_range);

}  // namespace exl3::cpu
