// Arguments of the CUDA operators, checked: what is asked for, in numbers and pointers.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "linear/gemm.h"
#include "linear/plan.h"
#include "moe/choice.h"

namespace exl3::ops {

using torch::stable::Tensor;

inline constexpr int64_t kShardFields = 5;  // codebook, tile_words, n, n_begin, n_out

struct Shard {
  int codebook, half_bits;
  int64_t n, n_begin, n_out, out_begin;
  const uint8_t* weights;
  const uint16_t *suh, *svh;
  Family family() const {
    return codebook == CodebookMul1::kIndex ? Family::kByteSum : Family::kHalves;
  }
  DecodeConstants constants() const {
    if (codebook == CodebookMcg::kIndex) return decode_constants(CodebookMcg::kMultiplier, 0);
    if (codebook == CodebookMul1::kIndex) return decode_constants(CodebookMul1::kMultiplier, 0);
    return decode_constants(Codebook3inst::kMultiplier, Codebook3inst::kAddend);
  }
};

struct Weights {
  std::vector<Shard> shards;
  int64_t k, n, n_out;  // inputs, stored columns and wanted columns of all shards
  const uint16_t* suh;  // fp16 [shards, k]
};

// Throws with what was found and what was expected. `op` begins each message.
Weights read_weights(const char* op, const Tensor& trellis, const Tensor& suh, const Tensor& svh,
                     const std::vector<int64_t>& shards);

Dtype activation_dtype(const char* op, const Tensor& x);

// x where it lies if it is rows of a 2-D slice; anything else is made contiguous.
Tensor readable_rows(const Tensor& x);

// Facts of the current device, read once; throws where the kernels have no code for it.
const DeviceFacts& device_facts(int device);

struct Options {
  bool exact = false, batch_invariant = false, dependent_launch = true;
  std::vector<PlanOverride> overrides;
  std::vector<MoeOverride> moe_overrides;
};
Options& options();

void check_launch(const char* what, cudaError_t error);

}  // namespace exl3::ops
