// torch registration of layers with what stands before them: a residual and an RMS norm, or a gated
// activation. The stream kernel does it itself, other calls have a kernel for it.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <tuple>

#include "ops/cuda_linear.h"

namespace exl3::ops {
namespace {

using torch::headeronly::ScalarType;

// Rows of x's shape, readable.
Tensor rows_like(const char* op, const char* name, const Tensor& rows, const Tensor& x) {
  bool same = rows.dim() == x.dim();
  for (int64_t d = 0; same && d < x.dim(); ++d) same = rows.size(d) == x.size(d);
  STD_TORCH_CHECK(same && rows.scalar_type() == x.scalar_type() && rows.is_cuda() &&
                      rows.get_device_index() == x.get_device_index(),
                  op, ": ", name, " must have the shape, type and device of x; found ", rows.dim(),
                  " dimension(s), ", rows.numel(), " elements, scalar type ",
                  static_cast<int>(rows.scalar_type()), ", where x has ", x.dim(), ", ", x.numel(),
                  " and ", static_cast<int>(x.scalar_type()));
  return readable_rows(rows);
}

std::tuple<Tensor, Tensor> norm_linear(const Tensor x, const Tensor residual,
                                       const Tensor norm_weight, double epsilon,
                                       const Tensor trellis, const Tensor suh, const Tensor svh,
                                       std::optional<Tensor> bias, std::vector<int64_t> shards,
                                       int64_t k_begin) {
  const char* op = "exl3::norm_linear";
  STD_TORCH_CHECK(x.is_cuda() && x.dim() >= 1, op,
                  ": x must be on a CUDA device and have at least one dimension");
  const Dtype dtype = activation_dtype(op, x);
  const int64_t width = x.size(x.dim() - 1);
  const bool fp32_weight = norm_weight.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(
      (fp32_weight || norm_weight.scalar_type() == x.scalar_type()) && norm_weight.dim() == 1 &&
          norm_weight.size(0) == width && norm_weight.is_contiguous() && norm_weight.is_cuda() &&
          norm_weight.get_device_index() == x.get_device_index(),
      op, ": norm_weight must be contiguous [", width,
      "] on x's device, float32 or of x's type; found ", norm_weight.dim(), " dimension(s), ",
      norm_weight.numel(), " elements, scalar type ", static_cast<int>(norm_weight.scalar_type()));
  const Tensor rows = rows_like(op, "residual", residual, x);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor sum =
      torch::stable::new_empty(x, std::vector<int64_t>(x.sizes().begin(), x.sizes().end()));
  Prologue prologue;
  prologue.kind = PrologueKind::kNorm;
  prologue.residual = rows.const_data_ptr();
  prologue.residual_stride = rows.dim() == 2 ? rows.stride(0) : width;
  prologue.weight = norm_weight.const_data_ptr();
  prologue.weight_dtype = fp32_weight ? Dtype::kFloat32 : dtype;
  prologue.epsilon = static_cast<float>(epsilon);
  prologue.sum = sum.mutable_data_ptr();
  Tensor y = run_linear(op, x, trellis, suh, svh, bias, shards, k_begin, nullptr, prologue);
  return {y, sum};
}

Tensor gated_linear(const Tensor x, const Tensor trellis, const Tensor suh, const Tensor svh,
                    std::optional<Tensor> bias, std::vector<int64_t> shards, int64_t k_begin) {
  STD_TORCH_CHECK(x.dim() >= 1, "exl3::gated_linear: x must have at least one dimension");
  Prologue prologue;
  prologue.kind = PrologueKind::kGate;
  prologue.up = x.size(x.dim() - 1) / 2;
  return run_linear("exl3::gated_linear", x, trellis, suh, svh, bias, shards, k_begin, nullptr,
                    prologue);
}

}  // namespace
}  // namespace exl3::ops

STABLE_TORCH_LIBRARY_IMPL(exl3, CUDA, m) {
  m.impl("norm_linear", TORCH_BOX(&exl3::ops::norm_linear));
  m.impl("gated_linear", TORCH_BOX(&exl3::ops::gated_linear));
}
