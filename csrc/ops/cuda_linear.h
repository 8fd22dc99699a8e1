// One linear layer on CUDA, for the operators that are made of it.
#pragma once

#include "linear/operands.h"
#include "ops/cuda_problem.h"

namespace exl3::ops {

// y of exl3::linear. `forced` is a plan or null; `prologue` is done to x first. Its pointers are
// rows of x's shape; the gate has rows of x that are twice as wide as the layer's inputs.
Tensor run_linear(const char* op, const Tensor& x, const Tensor& trellis, const Tensor& suh,
                  const Tensor& svh, const std::optional<Tensor>& bias,
                  const std::vector<int64_t>& shards, int64_t k_begin,
                  const std::vector<int64_t>* forced, const Prologue& prologue);

}  // namespace exl3::ops
