#include "linear/plan.h"

#include <algorithm>

#include "linear/gemm_limits.h"
#include "linear/stream_limits.h"

namespace exl3 {
namespace {

// Weights of a layer with few strips to share out.
constexpr int64_t kSmallLayer = 16 << 20;

// Row counts from which rebuilding the weight and a dense product is faster than decoding it in the
// product, by architecture and size of the layer: small layers have too few strips to share out.
// Measured on sm_90 (H200); elsewhere the tensor cores are slower against the decoder, so decoding
// in the product pays longer.
struct Crossover {
  int architecture;    // from this one on
  int64_t weights;     // up to so many
  int64_t dense_from;  // rows
};
constexpr int64_t kAnySize = int64_t{1} << 62;
constexpr Crossover kCrossovers[] = {
    {100, kAnySize, 512}, {90, kSmallLayer, 193}, {90, kAnySize, 385},
    {86, kAnySize, 512},  {80, kAnySize, 384},
};

int64_t dense_from(int architecture, const Problem& problem) {
  for (const auto& entry : kCrossovers) {
    if (architecture >= entry.architecture && problem.k * problem.n <= entry.weights) {
      return entry.dense_from;
    }
  }
  return kAnySize;
}

// Where the integer pipe and not memory limits few rows, skipping a rounding of the weights pays.
bool fast_forms_pay(int architecture) { return architecture == 90; }

// On sm_90 more tiles of fewer rows share the strips of a small layer out better.
int rows_of_tile(int architecture, const Problem& problem) {
  for (const int rows : {8, 16, 32, 64}) {
    if (problem.m <= rows) return rows;
  }
  return tall_runs(architecture, 64) && problem.k * problem.n <= kSmallLayer ? 64 : 128;
}

bool matches(const PlanOverride& entry, const Problem& problem) {
  return (entry.k == 0 || entry.k == problem.k) && (entry.n == 0 || entry.n == problem.n) &&
         (entry.half_bits == 0 || entry.half_bits == problem.half_bits) &&
         (entry.family < 0 || entry.family == problem.family) && problem.m <= entry.m_upto;
}

int64_t row_tiles_of_launch(int64_t m, int rows) {
  return (std::clamp<int64_t>(m, 1, kLaunchRows) + rows - 1) / rows;
}

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

bool stream_runs(const DeviceFacts& device, const Problem& problem, int blocks) {
  return device.architecture == 90 && problem.m == 1 &&
         stream_fits(problem.k, problem.n / 128, blocks, device.shared_bytes);
}

int default_blocks(const DeviceFacts& device, const Problem& problem, int rows) {
  if (rows == 1) {
    // One block a multiprocessor; a step for each warp, and not too many parts of a strip. Where
    // blocks have whole strips anyway, all multiprocessors count for more than even ranges.
    const int64_t strips = problem.n / 128;
    const int64_t most = std::min(work_units(problem.k, problem.n) / kStreamWarps, strips * 12);
    const int full = strips < device.multiprocessors
                         ? stream_positions(device.multiprocessors, strips)
                         : device.multiprocessors;
    return static_cast<int>(std::clamp<int64_t>(full, 1, std::max<int64_t>(1, most)));
  }
  // All multiprocessors full, unless the layer is so small that the warps of a block would not find
  // a k16 step each, or that a strip falls into so many parts that adding them up takes longer.
  int64_t full = int64_t{device.multiprocessors} * gemm_blocks_of_sm(rows, device.shared_bytes);
  int64_t most_parts = rows <= 16 ? 12 : 6;
  if (tall_runs(device.architecture, rows)) {
    // Blocks are equally long, so those of all row tiles run at once. Where equal parts of strips
    // leave few multiprocessors idle, no block has parts of two strips. Blocks share the rows of a
    // strip out among them, so more parts are no burden.
    most_parts = 8;
    full = std::max<int64_t>(1, full / row_tiles_of_launch(problem.m, rows));
    const int64_t strips = problem.n / 128, parts = full / strips;
    const bool equal = parts > 0 && problem.k / kUnitInputs % parts == 0;
    if (equal && parts * strips * 100 >= full * 95) full = parts * strips;
  }
  const int64_t most = std::min(work_units(problem.k, problem.n) / 8, problem.n / 128 * most_parts);
  return static_cast<int>(std::clamp<int64_t>(full, 1, std::max<int64_t>(1, most)));
}

Plan make_plan(const DeviceFacts& device, const Problem& problem, const PlanOptions& options,
               std::span<const PlanOverride> overrides) {
  if (options.batch_invariant) {
    // Tiles of 32 and 64 rows have the same groups of warps, hence the same order of additions; the
    // number of blocks is the split of k and must not depend on the rows either.
    const int rows = problem.m <= 32 ? 32 : 64;
    Problem any_rows = problem;
    any_rows.m = 0;
    return {Kernel::kGemm, rows, 0, default_blocks(device, any_rows, 64)};
  }
  for (const auto& entry : overrides) {
    if (!matches(entry, problem)) continue;
    Plan plan = entry.plan;
    if (options.exact || (plan.kernel == Kernel::kGemm && plan.rows != kFastRows)) plan.form = 0;
    if (plan.kernel != Kernel::kDense) {
      if (plan.blocks == 0) plan.blocks = default_blocks(device, problem, plan.rows);
      plan.blocks = static_cast<int>(
          std::min<int64_t>(plan.blocks, std::max<int64_t>(1, work_units(problem.k, problem.n))));
    }
    if (plan.kernel == Kernel::kStream && !stream_runs(device, problem, plan.blocks)) continue;
    return plan;
  }
  const bool fast = fast_forms_pay(device.architecture) && !options.exact;
  if (const int blocks = default_blocks(device, problem, 1); stream_runs(device, problem, blocks)) {
    return {Kernel::kStream, 1, fast ? 1 : 0, blocks};
  }
  if (problem.m >= dense_from(device.architecture, problem)) return {Kernel::kDense, 0, 0, 0};
  const int rows = rows_of_tile(device.architecture, problem);
  return {Kernel::kGemm, rows, fast && rows == kFastRows ? 1 : 0,
          default_blocks(device, problem, rows)};
}

GemmWorkspace gemm_workspace(int64_t m, int64_t k, int64_t n, int64_t shards, const Plan& plan) {
  const int64_t row_tiles = row_tiles_of_launch(m, plan.rows);
  const int64_t positions = std::min<int64_t>(plan.blocks, work_units(k, n));
  GemmWorkspace workspace{};
  workspace.image = 0;
  workspace.block_sums = aligned(shards * row_tiles * image_bytes(k, plan.rows));
  const int64_t sums = plan.form == 0 ? 0 : shards * row_tiles * plan.rows * (k / 128) * 4;
  workspace.partials = workspace.block_sums + aligned(sums);
  workspace.flags =
      workspace.partials +
      aligned(row_tiles * positions * parts_of_position(plan.rows) * partial_bytes(plan.rows));
  // Shards of different rates are launches of their own, and each has its own flags.
  workspace.total =
      workspace.flags + aligned(shards * row_tiles * positions * parts_of_position(plan.rows) * 4);
  return workspace;
}

StreamWorkspace stream_workspace(int64_t k, int64_t n, const Plan& plan) {
  const int64_t positions = std::min<int64_t>(plan.blocks, work_units(k, n));
  StreamWorkspace workspace{};
  workspace.ends = aligned((positions + n / 128) * partial_bytes(1));
  workspace.total = workspace.ends + aligned(n / 128 * partial_bytes(1));
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
  if (plan.kernel == Kernel::kStream) return stream_workspace(k, n, plan).total;
  return gemm_workspace(m, k, n, shards, plan).total;
}

}  // namespace exl3
