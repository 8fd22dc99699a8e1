// torch registration of the routed experts on the CPU; the schema is here for every device.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <vector>

#include "cpu/moe.h"
#include "ops/moe_problem.h"

namespace {

using exl3::ops::MoeArguments;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

exl3::cpu::Dtype dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return exl3::cpu::Dtype::kFloat32;
    case ScalarType::BFloat16:
      return exl3::cpu::Dtype::kBfloat16;
    case ScalarType::Half:
      return exl3::cpu::Dtype::kFloat16;
    default:
      break;
  }
  STD_TORCH_CHECK(false, "exl3::moe: x must be float32, bfloat16 or float16, found scalar type ",
                  static_cast<int>(x.scalar_type()));
}

template <class Id>
void map_experts(const MoeArguments& a, exl3::cpu::MoeProblem& p) {
  const auto* ids = static_cast<const Id*>(a.ids.const_data_ptr());
  const auto* map =
      a.map.has_value() ? static_cast<const int32_t*>(a.map->const_data_ptr()) : nullptr;
  for (size_t i = 0; i < p.experts.size(); ++i) {
    const auto id = static_cast<int64_t>(ids[i]);
    if (id < 0) {
      p.experts[i] = -1;
      continue;
    }
    STD_TORCH_CHECK(id < a.global_experts, "exl3::moe: topk_ids holds expert ", id, " of ",
                    a.global_experts);
    const int64_t local = map == nullptr ? id : map[id];
    STD_TORCH_CHECK(local < a.experts, "exl3::moe: expert_map sends expert ", id, " to place ",
                    local, " of ", a.experts);
    p.experts[i] = static_cast<int>(local < 0 ? -1 : local);
  }
}

std::vector<exl3::cpu::ExpertMatrix> matrices(const MoeArguments& a, int projection,
                                              const Tensor& trellis, const uint16_t* suh,
                                              int64_t suh_stride, const uint16_t* svh,
                                              int64_t svh_stride) {
  const auto* words = static_cast<const uint16_t*>(trellis.const_data_ptr());
  const auto* table = static_cast<const int64_t*>(a.table.const_data_ptr());
  std::vector<exl3::cpu::ExpertMatrix> found;
  for (int64_t expert = 0; expert < a.experts; ++expert) {
    const int64_t* entry = table + (projection * a.experts + expert) * 2;
    STD_TORCH_CHECK(entry[1] >= 0 && entry[1] < static_cast<int64_t>(a.kinds.size()),
                    "exl3::moe: table names kind ", entry[1], " of ", a.kinds.size());
    const exl3::ops::MoeKind& kind = a.kinds[static_cast<size_t>(entry[1])];
    const int64_t tiles = (projection == 2 ? a.inner * a.n : a.k * a.inner) / 256;
    STD_TORCH_CHECK(entry[0] >= 0 && entry[0] + tiles * kind.tile_words <= trellis.numel(),
                    "exl3::moe: the words of expert ", expert, " do not lie inside the trellis");
    found.push_back({words + entry[0], suh + expert * suh_stride, svh + expert * svh_stride,
                     kind.codebook, kind.tile_words});
  }
  return found;
}

Tensor moe(const Tensor x, const Tensor topk_weights, const Tensor topk_ids,
           std::optional<Tensor> expert_map, const Tensor w13_trellis, const Tensor w13_suh,
           const Tensor w13_svh, const Tensor w2_trellis, const Tensor w2_suh, const Tensor w2_svh,
           const Tensor table, std::vector<int64_t> kinds, std::vector<int64_t> sizes,
           int64_t activation, double alpha, double beta, double limit, bool weight_on_input) {
  STD_TORCH_CHECK(x.is_cpu() && w13_suh.is_cpu(),
                  "exl3::moe: x and the weights must be on one "
                  "device");
  const MoeArguments a = exl3::ops::read_moe(x, topk_weights, topk_ids, expert_map, w13_trellis,
                                             w13_suh, w13_svh, w2_trellis, w2_suh, w2_svh, table,
                                             kinds, sizes, activation, alpha, beta, limit);
  Tensor y = torch::stable::new_empty(x, {a.m, a.n_out});
  if (a.m == 0 || a.n_out == 0) return y;
  exl3::cpu::MoeProblem p{};
  p.dtype = dtype_of(x);
  p.x = a.x.const_data_ptr();
  p.y = y.mutable_data_ptr();
  p.m = a.m, p.k_in = a.k_in, p.x_stride = a.x_stride, p.n_out = a.n_out;
  p.k = a.k, p.inner = a.inner, p.n = a.n;
  p.inner_begin = a.inner_begin, p.inner_size = a.inner_size;
  p.top_k = a.top_k;
  p.weights = static_cast<const float*>(a.weights.const_data_ptr());
  p.experts.resize(static_cast<size_t>(a.m * a.top_k));
  if (a.ids.scalar_type() == ScalarType::Int) {
    map_experts<int32_t>(a, p);
  } else {
    map_experts<int64_t>(a, p);
  }
  const auto half = [](const Tensor& t) {
    return static_cast<const uint16_t*>(t.const_data_ptr());
  };
  p.gate = matrices(a, 0, w13_trellis, half(w13_suh), 2 * a.k, half(w13_svh), 2 * a.inner);
  p.up = matrices(a, 1, w13_trellis, half(w13_suh) + a.k, 2 * a.k, half(w13_svh) + a.inner,
                  2 * a.inner);
  p.down = matrices(a, 2, w2_trellis, half(w2_suh), a.inner, half(w2_svh), a.n);
  p.activation = a.activation;
  p.weight_on_input = weight_on_input;
  exl3::cpu::moe(p, [](int64_t begin, int64_t end, int64_t grain,
                       const std::function<void(int64_t, int64_t)>& f) {
    torch::stable::parallel_for(begin, end, grain, f);
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def(
      "moe(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, "
      "Tensor w13_trellis, Tensor w13_suh, Tensor w13_svh, Tensor w2_trellis, Tensor w2_suh, "
      "Tensor w2_svh, Tensor table, int[] kinds, int[] sizes, int activation, float alpha, "
      "float beta, float limit, bool weight_on_input) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) { m.impl("moe", TORCH_BOX(&moe)); }
