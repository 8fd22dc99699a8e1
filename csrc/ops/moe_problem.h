// Arguments of exl3::moe, checked; the same for the CPU and for CUDA, so it is all in this header.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "format/windows.cuh"
#include "moe/activation.h"
#include "moe/limits.h"

namespace exl3::ops {

struct MoeKind {
  int codebook, tile_words;
  bool used[3];  // by a gate, an up, a down projection
};

struct MoeArguments {
  torch::stable::Tensor x, weights, ids, table;  // contiguous (x: rows)
  std::optional<torch::stable::Tensor> map;
  int64_t m, k_in, x_stride;
  int top_k;
  int64_t experts, global_experts;
  int64_t k, inner, n;
  int64_t inner_begin, inner_size, n_out;
  bool paired;  // gate and up of every expert are of one kind
  std::vector<MoeKind> kinds;
  Activation activation;
};

namespace moe_detail {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check(const Tensor& t, const char* what, ScalarType type,
                  std::initializer_list<int64_t> sizes, const Tensor& beside) {
  STD_TORCH_CHECK(t.is_cpu() == beside.is_cpu() &&
                      (t.is_cpu() || t.get_device_index() == beside.get_device_index()),
                  "exl3::moe: ", what, " must be on the device of the weights; move it there");
  STD_TORCH_CHECK(t.scalar_type() == type, "exl3::moe: ", what, " has scalar type ",
                  static_cast<int>(t.scalar_type()), ", expected ", static_cast<int>(type));
  STD_TORCH_CHECK(t.dim() == static_cast<int64_t>(sizes.size()) && t.is_contiguous(),
                  "exl3::moe: ", what, " must be contiguous with ", sizes.size(),
                  " dimension(s), found ", t.dim());
  int64_t d = 0;
  for (const int64_t size : sizes) {
    STD_TORCH_CHECK(size < 0 || t.size(d) == size, "exl3::moe: ", what, " has size ", t.size(d),
                    " in dimension ", d, ", expected ", size);
    ++d;
  }
}

}  // namespace moe_detail

inline MoeArguments read_moe(
    const torch::stable::Tensor& x, const torch::stable::Tensor& topk_weights,
    const torch::stable::Tensor& topk_ids, const std::optional<torch::stable::Tensor>& expert_map,
    const torch::stable::Tensor& w13_trellis, const torch::stable::Tensor& w13_suh,
    const torch::stable::Tensor& w13_svh, const torch::stable::Tensor& w2_trellis,
    const torch::stable::Tensor& w2_suh, const torch::stable::Tensor& w2_svh,
    const torch::stable::Tensor& table, const std::vector<int64_t>& kinds,
    const std::vector<int64_t>& sizes, int64_t activation, double alpha, double beta,
    double limit) {
  using moe_detail::check;
  using torch::headeronly::ScalarType;
  using torch::stable::Tensor;
  const Tensor& beside = w13_suh;
  check(w13_suh, "w13_suh", ScalarType::Half, {-1, 2, -1}, beside);
  MoeArguments a{};
  a.experts = w13_suh.size(0);
  a.k = w13_suh.size(2);
  check(w13_svh, "w13_svh", ScalarType::Half, {a.experts, 2, -1}, beside);
  a.inner = w13_svh.size(2);
  check(w2_suh, "w2_suh", ScalarType::Half, {a.experts, a.inner}, beside);
  check(w2_svh, "w2_svh", ScalarType::Half, {a.experts, -1}, beside);
  a.n = w2_svh.size(1);
  check(w13_trellis, "w13_trellis", ScalarType::Short, {-1}, beside);
  check(w2_trellis, "w2_trellis", ScalarType::Short, {-1}, beside);
  check(table, "table", ScalarType::Long, {3, a.experts, 2}, beside);
  a.table = table;
  STD_TORCH_CHECK(a.experts > 0 && a.experts <= kMaxExperts, "exl3::moe: ", a.experts,
                  " experts on one device, expected 1 to ", kMaxExperts);
  for (const int64_t size : {a.k, a.inner, a.n}) {
    STD_TORCH_CHECK(size > 0 && size % 128 == 0 && size < (int64_t{1} << 20),
                    "exl3::moe: the experts store ", a.k, " inputs, ", a.inner,
                    " columns between the products and ", a.n,
                    " outputs; expected positive multiples of 128");
  }

  STD_TORCH_CHECK(sizes.size() == 4, "exl3::moe: sizes holds ", sizes.size(),
                  " numbers, expected inner_begin, inner_size, n_out, paired");
  a.inner_begin = sizes[0], a.inner_size = sizes[1], a.n_out = sizes[2];
  a.paired = sizes[3] != 0;
  STD_TORCH_CHECK(a.inner_begin >= 0 && a.inner_size > 0 &&
                      a.inner_begin + a.inner_size <= a.inner && a.n_out >= 0 && a.n_out <= a.n,
                  "exl3::moe: columns [", a.inner_begin, ", ", a.inner_begin + a.inner_size,
                  ") of ", a.inner, " and ", a.n_out, " outputs of ", a.n, " do not exist");
  STD_TORCH_CHECK(!kinds.empty() && kinds.size() % 3 == 0, "exl3::moe: kinds holds ", kinds.size(),
                  " numbers, expected codebook, words a tile and uses for each kind");
  for (size_t i = 0; i < kinds.size(); i += 3) {
    const int64_t codebook = kinds[i], words = kinds[i + 1], uses = kinds[i + 2];
    STD_TORCH_CHECK(is_legal_tile(words, codebook), "exl3::moe: kind ", i / 3, " has codebook ",
                    codebook, " with ", words,
                    " words a tile; legal are 16 times 1..8 bits, and 24, 40, 56 with codebook 2");
    a.kinds.push_back({static_cast<int>(codebook),
                       static_cast<int>(words),
                       {(uses & 1) != 0, (uses & 2) != 0, (uses & 4) != 0}});
  }
  STD_TORCH_CHECK(activation >= 0 && activation <= 2, "exl3::moe: activation ", activation,
                  "; there are 0 (swiglu), 1 (gelu) and 2 (gelu by tanh)");
  a.activation = {static_cast<ActivationKind>(activation), static_cast<float>(alpha),
                  static_cast<float>(beta), static_cast<float>(limit)};

  STD_TORCH_CHECK(x.dim() == 2 && x.is_cpu() == beside.is_cpu() &&
                      (x.is_cpu() || x.get_device_index() == beside.get_device_index()),
                  "exl3::moe: x must be [rows, inputs] on the device of the weights, found ",
                  x.dim(), " dimension(s)");
  a.m = x.size(0), a.k_in = x.size(1);
  STD_TORCH_CHECK(a.k_in > 0 && a.k_in <= a.k, "exl3::moe: x has ", a.k_in,
                  " columns but the experts have ", a.k, " inputs");
  STD_TORCH_CHECK(topk_ids.dim() == 2 && topk_ids.size(0) == a.m, "exl3::moe: topk_ids must be [",
                  a.m, ", slots]");
  STD_TORCH_CHECK(topk_ids.size(1) >= 1 && topk_ids.size(1) <= kMaxSlots,
                  "exl3::moe: ", topk_ids.size(1), " experts a token, expected 1 to ", kMaxSlots);
  a.top_k = static_cast<int>(topk_ids.size(1));
  STD_TORCH_CHECK(a.m * a.top_k < (int64_t{1} << 31) && a.m < (int64_t{1} << 27),
                  "exl3::moe: x has ", a.m, " rows, too many");
  const ScalarType id_type =
      topk_ids.scalar_type() == ScalarType::Int ? ScalarType::Int : ScalarType::Long;
  a.ids = torch::stable::contiguous(topk_ids);
  check(a.ids, "topk_ids", id_type, {a.m, a.top_k}, beside);
  a.weights = torch::stable::contiguous(topk_weights);
  check(a.weights, "topk_weights", ScalarType::Float, {a.m, a.top_k}, beside);
  a.global_experts = a.experts;
  if (expert_map.has_value()) {
    check(*expert_map, "expert_map", ScalarType::Int, {-1}, beside);
    a.map = expert_map;
    a.global_experts = expert_map->size(0);
  }
  const bool in_place = x.stride(1) == 1 && x.stride(0) >= a.k_in;
  a.x = in_place ? x : torch::stable::contiguous(x);
  a.x_stride = in_place ? x.stride(0) : a.k_in;
  return a;
}

}  // namespace exl3::ops
