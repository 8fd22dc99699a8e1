// The routed experts of many tokens on CUDA: rebuilt weights and torch's grouped product.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <optional>

#include "linear/rates.h"
#include "linear/rebuild.h"
#include "moe/moe_dense.h"
#include "ops/cuda_moe.h"

namespace exl3::ops {
namespace {

using torch::headeronly::ScalarType;

// rows of each expert times its weight: [rows, k], [experts, n, k], where the rows of each expert
// end; to [rows, n]. Rows past the last end are not written.
Tensor grouped_product(const Tensor& rows, const Tensor& weights, const Tensor& ends) {
  std::array<StableIValue, 5> stack{
      torch::stable::detail::from(rows),
      torch::stable::detail::from(torch::stable::transpose(weights, 1, 2)),
      torch::stable::detail::from(std::optional<Tensor>(ends)),
      torch::stable::detail::from(std::optional<Tensor>()),
      torch::stable::detail::from(std::optional<ScalarType>())};
  STD_TORCH_CHECK(
      torch_call_dispatcher("aten::_grouped_mm", "", stack.data(), TORCH_ABI_VERSION) == 0,
      "exl3::moe: torch's grouped product failed");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// One projection of experts [first, first + count) in the original basis, at `out`.
void rebuild(const Call& call, int projection, int64_t first, int64_t count, uint16_t* out) {
  const MoeArguments& a = call.a;
  const bool down = projection == kDown;
  const int64_t k = down ? a.inner : a.k, n = down ? a.n : a.inner, halves = down ? 1 : 2;
  const int64_t half = projection == kUp ? 1 : 0;
  const Product& product = down ? call.products.back() : call.products.front();
  const MoeKind& kind = a.kinds[product.kind];
  RebuildParams params{};
  params.weights = down ? call.w2 : call.w13;
  params.suh = (down ? call.w2_suh : call.w13_suh) + (first * halves + half) * k;
  params.svh = (down ? call.w2_svh : call.w13_svh) + (first * halves + half) * n;
  params.out = out + half * n * k;
  params.out_stride = k;
  params.dtype = Dtype::kBfloat16;
  params.k = params.k_count = static_cast<int>(k);
  params.n_count = static_cast<int>(n);
  params.constants = constants_of(kind.codebook);
  params.table =
      static_cast<const int64_t*>(a.table.const_data_ptr()) + (projection * a.experts + first) * 2;
  params.matrices = static_cast<int>(count);
  params.suh_step = halves * k;
  params.svh_step = halves * n;
  params.out_step = halves * n * k;
  check_launch("rebuilding the experts' weights", with_rate(kind.tile_words / 8, [&](auto rate) {
                 return launch_rebuild<decltype(rate)::half_bits>(params, family_of(kind),
                                                                  call.stream);
               }));
}

}  // namespace

void run_dense(const Call& call, int64_t first, int64_t tokens, uint16_t* y) {
  const MoeArguments& a = call.a;
  const MoeDenseSizes sizes = moe_dense_sizes(call.shape, tokens);
  const auto tiles = static_cast<int>(sizes.rows / kMoeDenseRows);
  const auto ints = [&](int64_t count) {
    return torch::stable::new_empty(a.x, {std::max<int64_t>(1, count)}, ScalarType::Int);
  };
  const auto pointer = [](const Tensor& t) { return static_cast<int*>(t.mutable_data_ptr()); };
  const auto shorts = [](const Tensor& t) { return static_cast<uint16_t*>(t.mutable_data_ptr()); };
  const Tensor scalars = ints(1), counts = ints(a.experts), tile_expert = ints(tiles);
  const Tensor row_pair = ints(sizes.rows), ends = ints(a.experts), begins = ints(sizes.groups);
  const Tensor of_blocks = ints(moe_plan_blocks(tokens * a.top_k) * a.experts);
  const MoeRouting routing{pointer(scalars), pointer(counts), pointer(tile_expert),
                           pointer(row_pair), nullptr, nullptr, nullptr};
  MoePlanParams plan = plan_of(call, first, tokens, routing, pointer(of_blocks));
  plan.lists = 0;
  plan.group_first = pointer(begins);
  plan.group_ends = pointer(ends);
  plan.group = sizes.group;
  plan.rows = kMoeDenseRows;
  plan.most_tiles = tiles;
  check_launch("the plan of the experts", launch_moe_plan(plan, false, call.stream));

  const Tensor rows = torch::stable::new_empty(a.x, {sizes.rows, a.k});
  const Tensor activated = torch::stable::new_empty(a.x, {sizes.rows, a.inner});
  const Tensor gate_up = torch::stable::new_empty(a.x, {sizes.group, 2 * a.inner, a.k});
  const Tensor down = torch::stable::new_empty(a.x, {sizes.group, a.n, a.inner});
  const Tensor results = torch::stable::new_empty(a.x, {tokens * a.top_k, a.n});
  const int blocks =
      static_cast<int>(std::min<int64_t>((sizes.rows + 7) / 8, 16 * call.multiprocessors));
  for (int number = 0; number < sizes.groups; ++number) {
    const int64_t expert = int64_t{number} * sizes.group;
    const int64_t count = std::min<int64_t>(sizes.group, a.experts - expert);
    const auto part = [&](const Tensor& t, int64_t begin) {
      return torch::stable::narrow(const_cast<Tensor&>(t), 0, begin, count);
    };
    const Tensor group_ends = part(ends, expert);
    const MoeGroup group{pointer(row_pair), pointer(begins) + number,
                         pointer(ends) + expert + count - 1};

    const MoeDenseRowsParams gather{
        group,
        static_cast<const uint16_t*>(a.x.const_data_ptr()) + first * a.x_stride,
        a.x_stride,
        static_cast<int>(a.k),
        static_cast<int>(a.k_in),
        a.top_k,
        shorts(rows),
        blocks};
    check_launch("gathering the experts' rows", launch_moe_dense_rows(gather, call.stream));
    rebuild(call, kGate, expert, count, shorts(gate_up));
    rebuild(call, kUp, expert, count, shorts(gate_up));
    const Tensor both = grouped_product(rows, part(gate_up, 0), group_ends);
    const MoeDenseActivateParams activate{group,
                                          shorts(both),
                                          shorts(activated),
                                          a.activation,
                                          static_cast<int>(a.inner),
                                          static_cast<int>(a.inner_begin),
                                          static_cast<int>(a.inner_begin + a.inner_size),
                                          blocks};
    check_launch("the experts' activation", launch_moe_dense_activate(activate, call.stream));
    rebuild(call, kDown, expert, count, shorts(down));
    const Tensor out = grouped_product(activated, part(down, 0), group_ends);
    const MoeDenseScatterParams scatter{group, shorts(out), shorts(results), static_cast<int>(a.n),
                                        blocks};
    check_launch("returning the experts' rows", launch_moe_dense_scatter(scatter, call.stream));
  }

  MoeCombineParams combine = combine_of(call, first, tokens, y);
  combine.rows = shorts(results);
  combine.short_rows = true;
  check_launch("adding the experts' rows", launch_moe_combine(combine, false, call.stream));
}

}  // namespace exl3::ops
