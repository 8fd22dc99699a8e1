// The plan as operators, so that Python and the tests see what the device would do. Pure.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <vector>

#include "linear/plan.h"
#include "moe/choice.h"
#include "ops/moe_table.h"

namespace {

std::vector<int64_t> plan(std::vector<int64_t> device, std::vector<int64_t> problem,
                          int64_t options) {
  STD_TORCH_CHECK(device.size() == 3, "exl3::plan: device holds ", device.size(),
                  " numbers, expected architecture, multiprocessors, shared bytes of a block");
  STD_TORCH_CHECK(problem.size() == 5, "exl3::plan: problem holds ", problem.size(),
                  " numbers, expected m, k, n, half bits, family");
  const exl3::DeviceFacts facts{static_cast<int>(device[0]), static_cast<int>(device[1]),
                                device[2]};
  const exl3::Problem shape{problem[0], problem[1], problem[2], static_cast<int>(problem[3]),
                            static_cast<int>(problem[4])};
  const exl3::Plan made = exl3::make_plan(facts, shape, {(options & 1) != 0, (options & 2) != 0});
  return {static_cast<int64_t>(made.kernel), made.rows, made.form, made.blocks};
}

int64_t workspace_bytes(int64_t m, int64_t k, int64_t n, int64_t shards,
                        std::vector<int64_t> plan) {
  STD_TORCH_CHECK(plan.size() == 4, "exl3::workspace_bytes: plan holds ", plan.size(),
                  " numbers, expected kernel, rows, form, blocks");
  return exl3::workspace_bytes(m, k, n, shards,
                               {static_cast<exl3::Kernel>(plan[0]), static_cast<int>(plan[1]),
                                static_cast<int>(plan[2]), static_cast<int>(plan[3])});
}

std::vector<int64_t> moe_plan(std::vector<int64_t> device, std::vector<int64_t> shape,
                              int64_t options, std::vector<int64_t> table) {
  STD_TORCH_CHECK(device.size() == 3, "exl3::moe_plan: device holds ", device.size(),
                  " numbers, expected architecture, multiprocessors, shared bytes of a block");
  STD_TORCH_CHECK(shape.size() == 12, "exl3::moe_plan: shape holds ", shape.size(),
                  " numbers, expected tokens, slots, experts, experts of all ranks, k, inner, n, "
                  "half bits, family, two products, one of gate and up, bfloat16");
  const exl3::DeviceFacts facts{static_cast<int>(device[0]), static_cast<int>(device[1]),
                                device[2]};
  const exl3::MoeShape moe{shape[0],
                           static_cast<int>(shape[1]),
                           shape[2],
                           shape[3],
                           shape[4],
                           shape[5],
                           shape[6],
                           shape[9] != 0,
                           static_cast<int>(shape[7]),
                           static_cast<int>(shape[8]),
                           shape[10] != 0,
                           shape[11] != 0};
  const auto overrides = exl3::ops::read_moe_table("exl3::moe_plan", table);
  const exl3::MoeChoice made =
      exl3::choose_moe(facts, moe, {(options & 1) != 0, (options & 2) != 0}, overrides);
  const int64_t tokens = moe.tokens < made.chunk ? moe.tokens : made.chunk;
  const int64_t bytes =
      exl3::is_moe_stream(made.rows) ? exl3::moe_stream_workspace(moe, made, tokens).total
      : exl3::is_moe_tall(made.rows) ? exl3::moe_tall_workspace(moe, made, tokens, 1, 2).total
                                     : exl3::moe_workspace(moe, made, tokens, 1, 2, true).total;
  return {made.rows, made.form, made.blocks, made.chunk, bytes};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def("plan(int[] device, int[] problem, int options) -> int[]");
  m.def("workspace_bytes(int m, int k, int n, int shards, int[] plan) -> int");
  m.def("moe_plan(int[] device, int[] shape, int options, int[] table=[]) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("plan", TORCH_BOX(&plan));
  m.impl("workspace_bytes", TORCH_BOX(&workspace_bytes));
  m.impl("moe_plan", TORCH_BOX(&moe_plan));
}
