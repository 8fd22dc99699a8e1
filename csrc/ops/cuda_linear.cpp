// torch registration of the CUDA kernels for linear layers: which kernel, workspaces, launches.
//
// Workspaces come from torch's own allocator for each call. It reuses them stream by stream, gives
// them from a graph's pool under capture, and counts them where vLLM measures its peak; so nothing
// has to be reserved and nothing outlives a call.
#include "ops/cuda_linear.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <string>

#include "linear/had_in.h"
#include "linear/prepare.h"
#include "linear/rates.h"
#include "linear/rebuild.h"
#include "linear/stream.h"
#include "ops/plan_table.h"
#include "ops/stream.h"

namespace exl3::ops {
namespace {

using torch::headeronly::ScalarType;

struct Activations {
  Tensor rows;  // [m, k_in]
  int64_t m, k_in, stride, k_begin;
  Dtype dtype;
};

// A row of x holds `parts` rows of inputs, one behind the other.
Activations read_activations(const char* op, const Tensor& x, int64_t parts, const Weights& weights,
                             int64_t k_begin, int device) {
  STD_TORCH_CHECK(x.is_cuda() && x.get_device_index() == device, op,
                  ": x must be on the device of the weights, cuda:", device);
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x must have at least one dimension");
  const int64_t width = x.size(x.dim() - 1), k_in = width / parts;
  STD_TORCH_CHECK(width % parts == 0, op, ": the last dimension of x is ", width,
                  ", expected an even number: gate, then up");
  STD_TORCH_CHECK(k_begin >= 0 && k_begin + k_in <= weights.k, op, ": x covers rows [", k_begin,
                  ", ", k_begin + k_in, ") but the weights have ", weights.k);
  int64_t m = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) m *= x.size(d);
  STD_TORCH_CHECK(m < (int64_t{1} << 31), op, ": x has ", m,
                  " rows, at most 2^31 - 1 are possible");
  const Dtype dtype = activation_dtype(op, x);
  Tensor rows = readable_rows(x);
  const int64_t stride = x.dim() == 2 ? rows.stride(0) : width;
  if (x.dim() != 2 && m > 0) rows = torch::stable::view(rows, {m, width});
  return {rows, m, k_in, stride, k_begin, dtype};
}

// The activations as the layer wants them, by a kernel of its own.
Activations prepare(const Activations& x, const Prologue& prologue, bool dependent,
                    cudaStream_t stream) {
  Tensor rows = torch::stable::new_empty(x.rows, {x.m, x.k_in});
  PrepareParams params{};
  params.input = {x.rows.const_data_ptr(), x.stride, x.dtype, 0, static_cast<int>(x.k_in)};
  params.prologue = prologue;
  params.m = static_cast<int>(x.m);
  params.out = rows.mutable_data_ptr();
  check_launch("the norm or activation before the layer",
               launch_prepare(params, dependent, stream));
  return {rows, x.m, x.k_in, x.k_in, x.k_begin, x.dtype};
}

struct Bias {
  const void* data = nullptr;
  Dtype dtype = Dtype::kFloat32;
};

Bias read_bias(const char* op, const std::optional<Tensor>& bias, int64_t n_out, int device) {
  if (!bias.has_value()) return {};
  STD_TORCH_CHECK(bias->is_cuda() && bias->get_device_index() == device && bias->dim() == 1 &&
                      bias->is_contiguous() && bias->size(0) == n_out,
                  op, ": bias must be contiguous on cuda:", device, " with ", n_out,
                  " elements, found ", bias->dim(), " dimension(s) and ", bias->numel());
  switch (bias->scalar_type()) {
    case ScalarType::BFloat16:
      return {bias->const_data_ptr(), Dtype::kBfloat16};
    case ScalarType::Half:
      return {bias->const_data_ptr(), Dtype::kFloat16};
    case ScalarType::Float:
      return {bias->const_data_ptr(), Dtype::kFloat32};
    default:
      break;
  }
  STD_TORCH_CHECK(false, op, ": bias has scalar type ", static_cast<int>(bias->scalar_type()),
                  ", expected float32, bfloat16 or float16");
}

Columns columns_of(const Shard& shard, int strip_begin) {
  return {shard.svh, strip_begin, static_cast<int>(shard.n_begin), static_cast<int>(shard.n_out),
          static_cast<int>(shard.out_begin)};
}

// Rows [first, first + m) of y through the image and the product, one launch for each rate.
void run_gemm(const Weights& weights, const Activations& x, int64_t first, int64_t m,
              const Bias& bias, const Plan& plan, const DeviceFacts& facts, uint8_t* workspace,
              const GemmWorkspace& parts, uint16_t* y, cudaStream_t stream) {
  const int row_tiles = static_cast<int>((m + plan.rows - 1) / plan.rows);
  const int shard_count = static_cast<int>(weights.shards.size());
  const bool dependent = options().dependent_launch && facts.architecture >= 90;
  auto* flags = reinterpret_cast<uint32_t*>(workspace + parts.flags);
  const int64_t launch_flags = row_tiles *
                               std::min<int64_t>(plan.blocks, work_units(weights.k, weights.n)) *
                               parts_of_position(plan.rows);
  auto* sums = plan.form == 1 ? reinterpret_cast<float*>(workspace + parts.block_sums) : nullptr;

  TransformParams transform{};
  transform.x = static_cast<const uint16_t*>(x.rows.const_data_ptr()) + first * x.stride;
  transform.x_stride = x.stride;
  transform.x_dtype = x.dtype;
  transform.suh = weights.suh;
  transform.image = workspace + parts.image;
  transform.block_sums = sums;
  transform.flags = flags;
  transform.flag_count = static_cast<int>(launch_flags * shard_count);
  transform.m = static_cast<int>(m);
  transform.k = static_cast<int>(weights.k);
  transform.k_begin = static_cast<int>(x.k_begin);
  transform.k_in = static_cast<int>(x.k_in);
  transform.shards = shard_count;
  transform.rows = plan.rows;
  transform.row_tiles = row_tiles;
  transform.core_matrices = tall_runs(facts.architecture, plan.rows);
  check_launch("the input transform", launch_transform(transform, dependent, stream));

  std::array<bool, kMaxShards> done{};
  int launches = 0;
  for (int begin = 0; begin < shard_count; ++begin) {
    if (done[begin]) continue;
    const Shard& kind = weights.shards[begin];
    GemmParams params{};
    for (int s = begin; s < shard_count; ++s) {
      const Shard& shard = weights.shards[s];
      if (shard.codebook != kind.codebook || shard.half_bits != kind.half_bits) continue;
      done[s] = true;
      GemmShard& target = params.shards[params.shard_count++];
      target.weights = shard.weights;
      target.image = transform.image + int64_t{s} * row_tiles * image_bytes(weights.k, plan.rows);
      target.block_sums =
          sums == nullptr ? nullptr : sums + int64_t{s} * row_tiles * plan.rows * (weights.k / 128);
      target.columns = columns_of(shard, params.strips);
      params.strips += static_cast<int>(shard.n / 128);
    }
    params.m = static_cast<int>(m);
    params.k = static_cast<int>(weights.k);
    params.positions = static_cast<int>(
        std::min<int64_t>(plan.blocks, work_units(weights.k, int64_t{params.strips} * 128)));
    params.out = {y + first * weights.n_out, weights.n_out, bias.data, x.dtype, bias.dtype};
    params.partials = reinterpret_cast<float*>(workspace + parts.partials);
    params.flags = flags + launches++ * launch_flags;
    params.constants = kind.constants();
    const GemmLaunch launch{plan.rows,     plan.form == 1 ? Form::kFast : Form::kExact,
                            kind.family(), dependent,
                            stream,        gemm_room(facts.architecture)};
    check_launch("the product", with_rate(kind.half_bits, [&](auto rate) {
                   return launch_gemm<decltype(rate)::half_bits>(params, launch);
                 }));
  }
}

// The one row of y, a product and its finish for each rate.
void run_stream(const Weights& weights, const Activations& x, Prologue prologue, const Bias& bias,
                const Plan& plan, uint8_t* workspace, const StreamWorkspace& parts, uint16_t* y,
                cudaStream_t stream) {
  const int shard_count = static_cast<int>(weights.shards.size());
  const bool dependent = options().dependent_launch;
  std::array<bool, kMaxShards> done{};
  for (int begin = 0; begin < shard_count; ++begin) {
    if (done[begin]) continue;
    const Shard& kind = weights.shards[begin];
    StreamParams params{};
    FinishParams finish{};
    for (int s = begin; s < shard_count; ++s) {
      const Shard& shard = weights.shards[s];
      if (shard.codebook != kind.codebook || shard.half_bits != kind.half_bits) continue;
      done[s] = true;
      const Columns columns = columns_of(shard, params.strips);
      finish.shards[params.shard_count].columns = columns;
      params.shards[params.shard_count++] = {shard.weights, shard.suh, columns};
      params.strips += static_cast<int>(shard.n / 128);
    }
    const int64_t units = work_units(weights.k, int64_t{params.strips} * 128);
    params.input = {x.rows.const_data_ptr(), x.stride, x.dtype, static_cast<int>(x.k_begin),
                    static_cast<int>(x.k_in)};
    params.prologue = prologue;
    prologue.sum = nullptr;  // the first launch has stored it
    params.k = static_cast<int>(weights.k);
    params.positions = static_cast<int>(std::min<int64_t>(plan.blocks, units));
    params.split = EvenSplit::of(static_cast<int>(units), params.positions);
    params.input_blocks =
        static_cast<int>(stream_input_blocks(weights.k, params.strips, params.positions));
    params.partials = reinterpret_cast<float*>(workspace);
    params.ends = reinterpret_cast<float*>(workspace + parts.ends);
    params.constants = kind.constants();
    const StreamLaunch launch{plan.form == 1 ? Form::kFast : Form::kExact, kind.family(), dependent,
                              stream};
    check_launch("the product of one row", with_rate(kind.half_bits, [&](auto rate) {
                   return launch_stream<decltype(rate)::half_bits>(params, launch);
                 }));
    finish.shard_count = params.shard_count;
    finish.k = params.k;
    finish.strips = params.strips;
    finish.split = params.split;
    finish.partials = params.partials;
    finish.ends = params.ends;
    finish.out = {y, weights.n_out, bias.data, x.dtype, bias.dtype};
    check_launch("finishing the product of one row", launch_finish(finish, dependent, stream));
  }
}

// Columns [begin, end) of the weight in the original basis, out[column - begin][input].
void rebuild_columns(const Weights& weights, int64_t k_begin, int64_t k_in, int64_t begin,
                     int64_t end, Dtype dtype, uint16_t* out, int64_t stride, cudaStream_t stream) {
  for (const Shard& shard : weights.shards) {
    const int64_t from = std::max(begin, shard.out_begin),
                  to = std::min(end, shard.out_begin + shard.n_out);
    if (from >= to || k_in == 0) continue;
    RebuildParams params{};
    params.weights = shard.weights;
    params.suh = shard.suh;
    params.svh = shard.svh;
    params.out = out + (from - begin) * stride;
    params.out_stride = stride;
    params.dtype = dtype;
    params.k = static_cast<int>(weights.k);
    params.k_first = static_cast<int>(k_begin);
    params.k_count = static_cast<int>(k_in);
    params.n_first = static_cast<int>(shard.n_begin + from - shard.out_begin);
    params.n_count = static_cast<int>(to - from);
    params.constants = shard.constants();
    check_launch("rebuilding the weight", with_rate(shard.half_bits, [&](auto rate) {
                   return launch_rebuild<decltype(rate)::half_bits>(params, shard.family(), stream);
                 }));
  }
}

// out[:, begin:end] = x W^T for one slice, by torch's own product.
void multiply_into(const Tensor& x, const Tensor& weight, const Tensor& out) {
  std::array<StableIValue, 3> stack{
      torch::stable::detail::from(x),
      torch::stable::detail::from(torch::stable::transpose(weight, 0, 1)),
      torch::stable::detail::from(out)};
  STD_TORCH_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION) == 0,
                  "exl3::linear: torch's dense product failed");
  torch::stable::detail::to<Tensor>(stack[0]);
}

void run_dense(const Weights& weights, const Activations& x, const Bias& bias, Tensor& y,
               cudaStream_t stream) {
  const int64_t stride = (x.k_in + 7) / 8 * 8;
  const int64_t columns = dense_slice_columns(x.k_in, weights.n_out);
  const Tensor scratch = torch::stable::new_empty(x.rows, {columns, stride});
  auto* data = static_cast<uint16_t*>(scratch.mutable_data_ptr());
  for (int64_t begin = 0; begin < weights.n_out; begin += columns) {
    const int64_t end = std::min(begin + columns, weights.n_out);
    rebuild_columns(weights, x.k_begin, x.k_in, begin, end, x.dtype, data, stride, stream);
    Tensor slice = torch::stable::narrow(const_cast<Tensor&>(scratch), 0, 0, end - begin);
    slice = torch::stable::narrow(slice, 1, 0, x.k_in);
    Tensor part = torch::stable::narrow(y, 1, begin, end - begin);
    multiply_into(x.rows, slice, part);
  }
  if (bias.data != nullptr) {
    check_launch("adding the bias",
                 launch_add_bias(static_cast<uint16_t*>(y.mutable_data_ptr()), x.dtype, bias.data,
                                 bias.dtype, x.m, weights.n_out, stream));
  }
}

}  // namespace

Tensor run_linear(const char* op, const Tensor& x, const Tensor& trellis, const Tensor& suh,
                  const Tensor& svh, const std::optional<Tensor>& bias,
                  const std::vector<int64_t>& shards, int64_t k_begin,
                  const std::vector<int64_t>* forced, const Prologue& prologue) {
  const Weights weights = read_weights(op, trellis, suh, svh, shards);
  const int device = suh.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const bool prepares = prologue.kind != PrologueKind::kNone;
  Activations rows = read_activations(op, x, prologue.kind == PrologueKind::kGate ? 2 : 1, weights,
                                      k_begin, device);
  const Bias bias_facts = read_bias(op, bias, weights.n_out, device);
  const DeviceFacts& facts = device_facts(device);

  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = weights.n_out;
  Tensor y = torch::stable::new_empty(x, sizes);
  const cudaStream_t stream = stream_of(device);
  const bool dependent = options().dependent_launch && facts.architecture >= 90;
  if (rows.m == 0) return y;
  if (weights.n_out == 0) {
    if (prologue.sum != nullptr) prepare(rows, prologue, dependent, stream);
    return y;
  }

  const Shard& first = weights.shards[0];
  const Problem problem{rows.m, weights.k, weights.n, first.half_bits,
                        static_cast<int>(first.family())};
  const PlanOptions plan_options{options().exact, options().batch_invariant};
  Plan plan;
  if (forced == nullptr) {
    plan = make_plan(facts, problem, plan_options, options().overrides);
  } else {
    STD_TORCH_CHECK(forced->size() == 4, op, ": plan holds ", forced->size(),
                    " numbers, expected kernel, rows, form, blocks");
    plan = read_plan(op, forced->data());
    if (plan.blocks == 0) plan.blocks = default_blocks(facts, problem, plan.rows);
    STD_TORCH_CHECK(plan.kernel != Kernel::kStream || stream_runs(facts, problem, plan.blocks), op,
                    ": kernel 2 is for one row on compute capability 9.0 with room for ", weights.k,
                    " inputs in shared memory; found ", rows.m, " row(s), compute capability ",
                    facts.architecture / 10, ".", facts.architecture % 10, ", ", plan.blocks,
                    " block(s)");
  }

  if (prepares && plan.kernel != Kernel::kStream) {
    rows = prepare(rows, prologue, dependent, stream);
  }
  if (plan.kernel == Kernel::kDense) {
    Tensor flat = y.dim() == 2 ? y : torch::stable::view(y, {rows.m, weights.n_out});
    run_dense(weights, rows, bias_facts, flat, stream);
    return y;
  }
  if (plan.kernel == Kernel::kStream) {
    const StreamWorkspace parts = stream_workspace(weights.k, weights.n, plan);
    const Tensor workspace = torch::stable::new_empty(trellis, {(parts.total + 1) / 2});
    run_stream(weights, rows, prologue, bias_facts, plan,
               static_cast<uint8_t*>(workspace.mutable_data_ptr()), parts,
               static_cast<uint16_t*>(y.mutable_data_ptr()), stream);
    return y;
  }
  const GemmWorkspace parts = gemm_workspace(rows.m, weights.k, weights.n,
                                             static_cast<int64_t>(weights.shards.size()), plan);
  const Tensor workspace = torch::stable::new_empty(trellis, {(parts.total + 1) / 2});
  for (int64_t begin = 0; begin < rows.m; begin += kLaunchRows) {
    run_gemm(weights, rows, begin, std::min(kLaunchRows, rows.m - begin), bias_facts, plan, facts,
             static_cast<uint8_t*>(workspace.mutable_data_ptr()), parts,
             static_cast<uint16_t*>(y.mutable_data_ptr()), stream);
  }
  return y;
}

namespace {

Tensor linear(const Tensor x, const Tensor trellis, const Tensor suh, const Tensor svh,
              std::optional<Tensor> bias, std::vector<int64_t> shards, int64_t k_begin) {
  return run_linear("exl3::linear", x, trellis, suh, svh, bias, shards, k_begin, nullptr, {});
}

Tensor linear_with(const Tensor x, const Tensor trellis, const Tensor suh, const Tensor svh,
                   std::optional<Tensor> bias, std::vector<int64_t> shards, int64_t k_begin,
                   std::vector<int64_t> plan) {
  return run_linear("exl3::linear_with", x, trellis, suh, svh, bias, shards, k_begin, &plan, {});
}

Tensor dense_weight(const Tensor trellis, const Tensor suh, const Tensor svh,
                    std::vector<int64_t> shards, int64_t k_begin, int64_t k_in, bool bf16) {
  const Weights weights = read_weights("exl3::dense_weight", trellis, suh, svh, shards);
  STD_TORCH_CHECK(k_begin >= 0 && k_in >= 0 && k_begin + k_in <= weights.k,
                  "exl3::dense_weight: inputs [", k_begin, ", ", k_begin + k_in, ") of ",
                  weights.k);
  const int device = suh.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  device_facts(device);
  Tensor out = torch::stable::new_empty(suh, {weights.n_out, k_in},
                                        bf16 ? ScalarType::BFloat16 : ScalarType::Half);
  rebuild_columns(weights, k_begin, k_in, 0, weights.n_out,
                  bf16 ? Dtype::kBfloat16 : Dtype::kFloat16,
                  static_cast<uint16_t*>(out.mutable_data_ptr()), k_in, stream_of(device));
  return out;
}

void set_option(std::string name, int64_t value) {
  if (name == "exact") {
    options().exact = value != 0;
  } else if (name == "batch_invariant") {
    options().batch_invariant = value != 0;
  } else if (name == "dependent_launch") {
    options().dependent_launch = value != 0;
  } else {
    STD_TORCH_CHECK(false, "exl3::set_option: no option ", name,
                    "; there are exact, batch_invariant and dependent_launch");
  }
}

void set_plan_table(std::vector<int64_t> table) {
  options().overrides = read_plan_table("exl3::set_plan_table", table);
}

}  // namespace
}  // namespace exl3::ops

STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def(
      "linear_with(Tensor x, Tensor trellis, Tensor suh, Tensor svh, Tensor? bias, int[] shards, "
      "int k_begin, int[] plan) -> Tensor");
  m.def(
      "dense_weight(Tensor trellis, Tensor suh, Tensor svh, int[] shards, int k_begin, int k_in, "
      "bool bf16) -> Tensor");
  m.def("set_option(str name, int value) -> ()");
  m.def("set_plan_table(int[] table) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CUDA, m) {
  m.impl("linear", TORCH_BOX(&exl3::ops::linear));
  m.impl("linear_with", TORCH_BOX(&exl3::ops::linear_with));
  m.impl("dense_weight", TORCH_BOX(&exl3::ops::dense_weight));
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("set_option", TORCH_BOX(&exl3::ops::set_option));
  m.impl("set_plan_table", TORCH_BOX(&exl3::ops::set_plan_table));
}
