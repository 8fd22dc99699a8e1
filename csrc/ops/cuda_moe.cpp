// torch registration of the routed experts on CUDA: work lists, workspaces, launches.
#include "ops/cuda_moe.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <vector>

#include "linear/rates.h"
#include "moe/choice.h"
#include "moe/moe.h"
#include "moe/moe_stream_limits.h"
#include "ops/cuda_problem.h"
#include "ops/moe_problem.h"
#include "ops/moe_table.h"
#include "ops/stream.h"

namespace exl3::ops {
namespace {

using torch::headeronly::ScalarType;

std::vector<Product> products_of(const MoeArguments& a) {
  std::vector<Product> products;
  for (const int projection : {kGate, kUp, kDown}) {
    if (projection == kUp && a.paired) continue;
    for (size_t kind = 0; kind < a.kinds.size(); ++kind) {
      if (a.kinds[kind].used[projection]) products.push_back({projection, static_cast<int>(kind)});
    }
  }
  STD_TORCH_CHECK(products.size() <= kMaxLists, "exl3::moe: experts of ", products.size(),
                  " different kinds in one layer, at most ", kMaxLists, " are possible");
  return products;
}

}  // namespace

MoeCombineParams combine_of(const Call& call, int64_t first, int64_t tokens, uint16_t* y) {
  const MoeArguments& a = call.a;
  const bool wide = a.ids.scalar_type() == ScalarType::Long;
  MoeCombineParams combine{};
  combine.row_stride = a.n;
  combine.weights = call.weight_on_input
                        ? nullptr
                        : static_cast<const float*>(a.weights.const_data_ptr()) + first * a.top_k;
  combine.ids =
      static_cast<const uint8_t*>(a.ids.const_data_ptr()) + first * a.top_k * (wide ? 8 : 4);
  combine.wide_ids = wide;
  combine.map = a.map.has_value() ? static_cast<const int*>(a.map->const_data_ptr()) : nullptr;
  combine.out = y + first * a.n_out;
  combine.out_dtype = call.dtype;
  combine.tokens = static_cast<int>(tokens);
  combine.top_k = a.top_k;
  combine.n_out = static_cast<int>(a.n_out);
  combine.global_experts = static_cast<int>(a.global_experts);
  combine.experts = static_cast<int>(a.experts);
  return combine;
}

MoePlanParams plan_of(const Call& call, int64_t first, int64_t tokens, const MoeRouting& routing,
                      int* of_blocks) {
  const MoeArguments& a = call.a;
  const bool wide = a.ids.scalar_type() == ScalarType::Long;
  MoePlanParams plan{};
  plan.ids = static_cast<const uint8_t*>(a.ids.const_data_ptr()) + first * a.top_k * (wide ? 8 : 4);
  plan.wide_ids = wide;
  plan.map = a.map.has_value() ? static_cast<const int*>(a.map->const_data_ptr()) : nullptr;
  plan.table = static_cast<const int64_t*>(a.table.const_data_ptr());
  plan.routing = routing;
  plan.pairs = static_cast<int>(tokens * a.top_k);
  plan.blocks = moe_plan_blocks(tokens * a.top_k);
  plan.of_blocks = plan.blocks > 1 ? of_blocks : nullptr;
  plan.experts = static_cast<int>(a.experts);
  plan.global_experts = static_cast<int>(a.global_experts);
  plan.lists = call.lists;
  for (size_t list = 0; list < call.products.size(); ++list) {
    plan.list_projection[list] = static_cast<int8_t>(call.products[list].projection);
    plan.list_kind[list] = static_cast<int8_t>(call.products[list].kind);
  }
  return plan;
}

namespace {

// Tokens [first, first + tokens) through all kernels.
void run_chunk(const Call& call, int64_t first, int64_t tokens, uint8_t* workspace, uint16_t* y) {
  const MoeArguments& a = call.a;
  const auto launches = static_cast<int>(call.products.size());
  const MoeWorkspace w =
      moe_workspace(call.shape, call.choice, tokens, call.lists, launches, a.paired);
  const int rows = call.choice.rows;
  const auto tiles = static_cast<int>(most_tiles(call.shape, tokens, rows));
  const auto at = [&]<class T>(T*, int64_t offset) {
    return reinterpret_cast<T*>(workspace + offset);
  };
  int* const ints = nullptr;
  float* const floats = nullptr;
  const bool fast = call.choice.form == 1;
  const MoeRouting routing{at(ints, w.tiles),
                           at(ints, w.counts),
                           at(ints, w.tile_expert),
                           at(ints, w.row_pair),
                           nullptr,
                           reinterpret_cast<MoeTile*>(workspace + w.lists),
                           at(ints, w.list_counts)};
  const float* weights = static_cast<const float*>(a.weights.const_data_ptr()) + first * a.top_k;
  const auto* table = static_cast<const int64_t*>(a.table.const_data_ptr());
  auto* flags = reinterpret_cast<uint32_t*>(workspace + w.flags);

  MoePlanParams plan = plan_of(call, first, tokens, routing, at(ints, w.of_blocks));
  plan.flags = flags;
  plan.flag_count = launches * call.choice.blocks;
  plan.rows = rows;
  plan.most_tiles = tiles;
  check_launch("the plan of the experts", launch_moe_plan(plan, call.dependent, call.stream));

  MoeGatherParams gather{};
  gather.x = static_cast<const uint16_t*>(a.x.const_data_ptr()) + first * a.x_stride;
  gather.x_stride = a.x_stride;
  gather.x_dtype = call.dtype;
  gather.weights = call.weight_on_input ? weights : nullptr;
  gather.suh = call.w13_suh;
  gather.routing = routing;
  gather.image = workspace + w.image;
  gather.block_sums = fast ? at(floats, w.block_sums) : nullptr;
  gather.k = static_cast<int>(a.k);
  gather.k_in = static_cast<int>(a.k_in);
  gather.top_k = a.top_k;
  gather.rows = rows;
  gather.most_tiles = tiles;
  const int64_t most_items = int64_t{tiles} * std::max(1, rows / 16) * (a.k / 128);
  gather.blocks = static_cast<int>(std::min<int64_t>(most_items, 8 * call.multiprocessors));
  check_launch("gathering the experts' rows",
               launch_moe_gather(gather, call.dependent, call.stream));

  const int64_t image_tile = image_bytes(a.k, rows);
  bool activated = a.paired;
  for (int index = 0; index < launches; ++index) {
    const Product& product = call.products[index];
    const MoeKind& kind = a.kinds[product.kind];
    const bool down = product.projection == kDown;
    if (down && !activated) {
      MoeActivateParams activate{};
      activate.gate_up = at(floats, w.gate_up);
      activate.routing = routing;
      activate.next_image = workspace + w.next_image;
      activate.next_sums = fast ? at(floats, w.next_sums) : nullptr;
      activate.next_suh = call.w2_suh;
      activate.activation = a.activation;
      activate.inner = static_cast<int>(a.inner);
      activate.inner_begin = static_cast<int>(a.inner_begin);
      activate.inner_end = static_cast<int>(a.inner_begin + a.inner_size);
      activate.rows = rows;
      activate.blocks = static_cast<int>(std::min<int64_t>(
          int64_t{tiles} * (rows / 8) * (a.inner / 128), 8 * call.multiprocessors));
      check_launch("the experts' activation",
                   launch_moe_activate(activate, call.dependent, call.stream));
      activated = true;
    }
    MoeGemmParams gemm{};
    gemm.pair = !down && a.paired;
    gemm.weights = down ? call.w2 : call.w13;
    const int halves = gemm.pair ? 2 : 1;
    for (int half = 0; half < halves; ++half) {
      const int projection = product.projection + half;
      gemm.table[half] = table + projection * a.experts * 2;
      gemm.svh[half] = down ? call.w2_svh : call.w13_svh + projection * a.inner;
      gemm.image[half] = down ? workspace + w.next_image
                              : workspace + w.image + int64_t{projection} * tiles * image_tile;
      const int64_t sums = int64_t{projection} * tiles * rows * (a.k / 128);
      gemm.block_sums[half] = !fast  ? nullptr
                              : down ? at(floats, w.next_sums)
                                     : at(floats, w.block_sums) + sums;
    }
    gemm.svh_stride = down ? a.n : 2 * a.inner;
    const int list = call.lists == 1 ? 0 : index;
    gemm.list = routing.lists + int64_t{list} * tiles;
    gemm.list_count = routing.list_counts + list;
    gemm.counts = routing.counts;
    gemm.row_pair = routing.row_pair;
    gemm.k = static_cast<int>(down ? a.inner : a.k);
    gemm.strips = static_cast<int>((down ? a.n : a.inner) / 128);
    gemm.positions = call.choice.blocks;
    gemm.whole_strips = call.choice.whole_strips;
    gemm.next_image = workspace + w.next_image;
    gemm.next_sums = fast ? at(floats, w.next_sums) : nullptr;
    gemm.next_suh = call.w2_suh;
    const Gate gate = gate_of(a.activation);
    gemm.slope = gate.slope;
    gemm.cubic = gate.cubic;
    gemm.beta = a.activation.beta;
    gemm.limit = a.activation.limit;
    gemm.inner_begin = static_cast<int>(a.inner_begin);
    gemm.inner_end = static_cast<int>(a.inner_begin + a.inner_size);
    gemm.out = down ? at(floats, w.out) : at(floats, w.gate_up) + product.projection * a.inner;
    gemm.out_stride = down ? a.n : 2 * a.inner;
    gemm.out_by_pair = down;
    gemm.partials = at(floats, w.partials);
    gemm.flags = flags + index * call.choice.blocks;
    gemm.constants = constants_of(kind.codebook);
    const GemmLaunch launch{
        rows,     fast ? Form::kFast : Form::kExact, family_of(kind), call.dependent, call.stream,
        call.room};
    check_launch("a product of the experts", with_rate(kind.tile_words / 8, [&](auto rate) {
                   return launch_moe_gemm<decltype(rate)::half_bits>(gemm, launch);
                 }));
  }

  MoeCombineParams combine = combine_of(call, first, tokens, y);
  combine.rows = at(floats, w.out);
  check_launch("adding the experts' rows",
               launch_moe_combine(combine, call.dependent, call.stream));
}

// A choice from its numbers: rows, form, blocks (0: the rule's), chunk (0: the rule's).
void force(MoeChoice& choice, const std::vector<int64_t>& numbers, const DeviceFacts& facts,
           const MoeShape& shape) {
  STD_TORCH_CHECK(numbers.size() == 4, "exl3::moe_with: plan holds ", numbers.size(),
                  " numbers, expected rows, form, blocks, tokens");
  const int64_t rows = numbers[0], form = numbers[1], blocks = numbers[2], chunk = numbers[3];
  const bool stream = rows == 1 || rows == 2 || rows == 4;
  STD_TORCH_CHECK(is_moe_plan(rows, form) && blocks >= 0 && blocks <= kMoeMostBlocks &&
                      chunk >= 0 && chunk < (1 << 16),
                  "exl3::moe_with: plan (", rows, ", ", form, ", ", blocks, ", ", chunk,
                  ") is none: ", kMoePlans);
  choice.rows = static_cast<int>(rows);
  choice.form = static_cast<int>(form);
  if (stream) {
    int positions = blocks > 0 ? static_cast<int>(blocks) : facts.multiprocessors;
    // Fewer blocks meet more experts each, until their inputs do not fit.
    while (positions < (1 << 16) && !moe_stream_runs(facts, shape, choice.rows, positions)) {
      ++positions;
    }
    STD_TORCH_CHECK(positions < (1 << 16), "exl3::moe_with: ", rows,
                    " rows a tile need a card of compute capability 9.0, one kind of weights for "
                    "gate and up and one for down, and inputs that fit its shared memory");
    choice.blocks = positions;
    const int64_t most = kMoeStreamPairs / shape.top_k;
    choice.chunk = chunk > 0 ? std::min(chunk, most) : most;
    return;
  }
  if (is_moe_tall(choice.rows)) {
    STD_TORCH_CHECK(
        moe_tall_runs(facts, shape) && (form == 0 || shape.bfloat16), "exl3::moe_with: ", rows,
        " rows a tile need a card of compute capability 9.0, gate and up of each expert "
        "of one kind, another activation than GELU by erf, and bfloat16 for form 1");
    choice.blocks = static_cast<int>(blocks > 0 ? std::min<int64_t>(blocks, facts.multiprocessors)
                                                : facts.multiprocessors);
    choice.chunk = chunk > 0 ? chunk : std::max<int64_t>(1, shape.tokens);
    return;
  }
  choice.blocks = blocks > 0 ? static_cast<int>(blocks) : moe_tile_blocks(facts, choice.rows);
  if (chunk > 0) choice.chunk = chunk;
}

Tensor run(const Tensor& x, const Tensor& topk_weights, const Tensor& topk_ids,
           const std::optional<Tensor>& expert_map, const Tensor& w13_trellis,
           const Tensor& w13_suh, const Tensor& w13_svh, const Tensor& w2_trellis,
           const Tensor& w2_suh, const Tensor& w2_svh, const Tensor& table,
           const std::vector<int64_t>& kinds, const std::vector<int64_t>& sizes, int64_t activation,
           double alpha, double beta, double limit, bool weight_on_input,
           const std::vector<int64_t>* forced) {
  STD_TORCH_CHECK(w13_suh.is_cuda(), "exl3::moe: the weights must be on a CUDA device");
  const int device = w13_suh.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  MoeArguments a =
      read_moe(x, topk_weights, topk_ids, expert_map, w13_trellis, w13_suh, w13_svh, w2_trellis,
               w2_suh, w2_svh, table, kinds, sizes, activation, alpha, beta, limit);
  for (const Tensor* t : {&w13_trellis, &w2_trellis, &w13_suh, &w13_svh, &w2_suh, &w2_svh}) {
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t->const_data_ptr()) % 16 == 0,
                    "exl3::moe: weights and scales must begin at a multiple of 16 bytes; clone "
                    "the view that does not");
  }
  const DeviceFacts& facts = device_facts(device);
  const Dtype dtype = activation_dtype("exl3::moe", a.x);
  Tensor y = torch::stable::new_empty(a.x, {a.m, a.n_out});
  if (a.m == 0 || a.n_out == 0) return y;
  const auto bytes = [](const Tensor& t) {
    return static_cast<const uint8_t*>(t.const_data_ptr());
  };
  const auto halves = [](const Tensor& t) {
    return static_cast<const uint16_t*>(t.const_data_ptr());
  };
  const MoeKind& first = first_gate(a);
  const MoeShape shape{a.m,
                       a.top_k,
                       a.experts,
                       a.global_experts,
                       a.k,
                       a.inner,
                       a.n,
                       has_two_products(a),
                       first.tile_words / 8,
                       static_cast<int>(family_of(first)),
                       a.paired && a.activation.kind != ActivationKind::kGelu,
                       dtype == Dtype::kBfloat16};
  MoeChoice choice = choose_moe(facts, shape, {options().exact, options().batch_invariant},
                                options().moe_overrides);
  if (forced != nullptr) force(choice, *forced, facts, shape);
  // GELU by erf is long code that the epilogue of tall tiles shall not carry along.
  const bool stream = is_moe_stream(choice.rows), tall = is_moe_tall(choice.rows);
  a.paired = a.paired && (stream || a.activation.kind != ActivationKind::kGelu);
  Call call{a,
            bytes(w13_trellis),
            bytes(w2_trellis),
            halves(w13_suh),
            halves(w13_svh),
            halves(w2_suh),
            halves(w2_svh),
            dtype,
            weight_on_input,
            shape,
            choice,
            products_of(a),
            0,
            options().dependent_launch && facts.architecture >= 90,
            facts.multiprocessors,
            gemm_room(facts.architecture),
            stream_of(device)};
  call.lists = a.kinds.size() == 1 ? 1 : static_cast<int>(call.products.size());
  const int64_t most = std::min(a.m, choice.chunk);
  const auto launches = static_cast<int>(call.products.size());
  const int64_t bytes_needed =
      stream ? moe_stream_workspace(shape, choice, most).total
      : tall ? moe_tall_workspace(shape, choice, most, call.lists, launches).total
             : moe_workspace(shape, choice, most, call.lists, launches, a.paired).total;
  // Units of work are counted in 32 bits on the device.
  const int64_t units = most_tiles(shape, most, choice.rows) * (a.k / 16) * (a.inner / 64) +
                        most_tiles(shape, most, choice.rows) * (a.inner / 16) * (a.n / 128);
  STD_TORCH_CHECK(units < (int64_t{1} << 30), "exl3::moe: ", most, " tokens of ", a.top_k,
                  " experts of ", a.k, " x ", a.inner, " are too many at once");
  const Tensor workspace = torch::stable::new_empty(w13_trellis, {(bytes_needed + 1) / 2});
  auto* data = static_cast<uint8_t*>(workspace.mutable_data_ptr());
  for (int64_t first = 0; first < a.m; first += choice.chunk) {
    const int64_t tokens = std::min(choice.chunk, a.m - first);
    (stream ? run_stream
     : tall ? run_tall
            : run_chunk)(call, first, tokens, data, static_cast<uint16_t*>(y.mutable_data_ptr()));
  }
  return y;
}

Tensor moe(const Tensor x, const Tensor topk_weights, const Tensor topk_ids,
           std::optional<Tensor> expert_map, const Tensor w13_trellis, const Tensor w13_suh,
           const Tensor w13_svh, const Tensor w2_trellis, const Tensor w2_suh, const Tensor w2_svh,
           const Tensor table, std::vector<int64_t> kinds, std::vector<int64_t> sizes,
           int64_t activation, double alpha, double beta, double limit, bool weight_on_input) {
  return run(x, topk_weights, topk_ids, expert_map, w13_trellis, w13_suh, w13_svh, w2_trellis,
             w2_suh, w2_svh, table, kinds, sizes, activation, alpha, beta, limit, weight_on_input,
             nullptr);
}

Tensor moe_with(const Tensor x, const Tensor topk_weights, const Tensor topk_ids,
                std::optional<Tensor> expert_map, const Tensor w13_trellis, const Tensor w13_suh,
                const Tensor w13_svh, const Tensor w2_trellis, const Tensor w2_suh,
                const Tensor w2_svh, const Tensor table, std::vector<int64_t> kinds,
                std::vector<int64_t> sizes, int64_t activation, double alpha, double beta,
                double limit, bool weight_on_input, std::vector<int64_t> plan) {
  return run(x, topk_weights, topk_ids, expert_map, w13_trellis, w13_suh, w13_svh, w2_trellis,
             w2_suh, w2_svh, table, kinds, sizes, activation, alpha, beta, limit, weight_on_input,
             &plan);
}

void set_moe_table(std::vector<int64_t> table) {
  options().moe_overrides = read_moe_table("exl3::set_moe_table", table);
}

}  // namespace
}  // namespace exl3::ops

STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def(
      "moe_with(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, "
      "Tensor w13_trellis, Tensor w13_suh, Tensor w13_svh, Tensor w2_trellis, Tensor w2_suh, "
      "Tensor w2_svh, Tensor table, int[] kinds, int[] sizes, int activation, float alpha, "
      "float beta, float limit, bool weight_on_input, int[] plan) -> Tensor");
  m.def("set_moe_table(int[] table) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CUDA, m) {
  m.impl("moe", TORCH_BOX(&exl3::ops::moe));
  m.impl("moe_with", TORCH_BOX(&exl3::ops::moe_with));
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("set_moe_table", TORCH_BOX(&exl3::ops::set_moe_table));
}
