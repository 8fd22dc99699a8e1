#include "linear/plan.h"

#include <algorithm>

#include "linear/gemm_limits.h"

namespace exl3 {
namespace {

// Row counts from which rebuilding the weight and a dense product is faster than decoding it in the
// product, by architecture. Measured on sm_90 (H200); elsewhere the tensor cores are slower against
// the decoder, so decoding in the product pays longer.
struct ArchitectureDefaults {
  int architecture;       // from this one on
  int64_t dense_from;     // rows
  bool fast_forms;        // the integer pipe, not memory, limits few rows
};
constexpr ArchitectureDefaults kDefaults[] = {
    {80, 384, false},
    {86, 512, false},
    {90, 193, true},
    {100, 512, false},
};

const ArchitectureDefaults& defaults_of(int architecture) {
  const ArchitectureDefaults* best = &kDefaults[0];
  for (const auto& entry : kDefaults) {
    if (architecture >= entry.architecture) best = &entry;
  }
  return *best;
}

int rows_of_tile(int64_t m) {
  for (const int rows : {8, 16, 32, 64}) {
    if (m <= rows) return rows;
  }
  return 128;
}

// All multiprocessors full, unless the layer is so small that the warps of a block would not find a
// k16 step each.
int blocks_for(const DeviceFacts& device, const Problem& problem, int rows) {
  const int64_t wanted =
      int64_t{device.multiprocessors} * gemm_blocks_of_sm(rows, device.shared_bytes);
  return static_cast<int>(
      std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, work_units(problem.k, problem.n) / 8)));
}

bool matches(const PlanOverride& entry, const Problem& problem) {
  return (entry.k == 0 || entry.k == problem.k) && (entry.n == 0 || entry.n == problem.n) &&
         (entry.half_bits == 0 || entry.half_bits == problem.half_bits) &&
         (entry.family < 0 || entry.family == problem.family) && problem.m <= entry.m_upto;
}

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

Plan make_plan(const DeviceFacts& device, const Problem& problem, const PlanOptions& options,
               std::span<const PlanOverride> overrides) {
  if (options.batch_invariant) {
    // Tiles of 32 and 64 rows have the same groups of warps, hence the same order of additions; the
    // number of blocks is the split of k and must not depend on the rows either.
    const int rows = problem.m <= 32 ? 32 : 64;
    return {Kernel::kGemm, rows, 0, blocks_for(device, problem, 64)};
  }
  const ArchitectureDefaults& defaults = defaults_of(device.architecture);
  for (const auto& entry : overrides) {
    if (!matches(entry, problem)) continue;
    Plan plan = entry.plan;
    if (options.exact || plan.rows > 16) plan.form = 0;
    if (plan.kernel == Kernel::kGemm) {
      if (plan.blocks == 0) plan.blocks = blocks_for(device, problem, plan.rows);
      plan.blocks = static_cast<int>(std::min<int64_t>(
          plan.blocks, std::max<int64_t>(1, work_units(problem.k, problem.n))));
    }
    return plan;
  }
  if (problem.m >= defaults.dense_from) return {Kernel::kDense, 0, 0, 0};
  const int rows = rows_of_tile(problem.m);
  const int form = defaults.fast_forms && !options.exact && rows <= 16 ? 1 : 0;
  return {Kernel::kGemm, rows, form, blocks_for(device, problem, rows)};
}

GemmWorkspace gemm_workspace(int64_t m, int64_t k, int64_t n, int64_t shards, const Plan& plan) {
  const int64_t launch_rows = std::min(m, kLaunchRows);
  const int64_t row_tiles = (launch_rows + plan.rows - 1) / plan.rows;
  const int64_t positions = std::min<int64_t>(plan.blocks, work_units(k, n));
  GemmWorkspace workspace{};
  workspace.image = 0;
  workspace.block_sums = aligned(shards * row_tiles * plan.rows * k * 2);
  const int64_t sums = plan.form == 0 ? 0 : shards * row_tiles * plan.rows * (k / 128) * 4;
  workspace.partials = workspace.block_sums + aligned(sums);
  workspace.flags = workspace.partials + aligned(row_tiles * positions * plan.rows * 128 * 4);
  // Shards of different rates are launches of their own, and each has its own flags.
  workspace.total = workspace.flags + aligned(shards * row_tiles * positions * 4);
  return workspace;
}

int64_t dense_slice_columns(int64_t k_in, int64_t columns) {
  const int64_t row_bytes = std::max<int64_t>(1, (k_in + 7) / 8 * 8 * 2);
  const int64_t most = std::max<int64_t>(128, kDenseSliceBytes / row_bytes / 128 * 128);
  if (columns <= most) return columns;
  const int64_t slices = (columns + most - 1) / most;
  return ((columns + slices - 1) / slices + 127) / 128 * 128;
}

int64_t workspace_bytes(int64_t m, int64_t k, int64_t n, int64_t shards, const Plan& plan) {
  if (m == 0) return 0;
  if (plan.kernel == Kernel::kDense) {
    return dense_slice_columns(k, n) * ((k + 7) / 8 * 8) * 2;
  }
  return gemm_workspace(m, k, n, shards, plan).total;
}

}  // namespace exl3
