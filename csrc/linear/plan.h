// Which kernel serves a product: a pure function of device, shape and options. No torch, no CUDA.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace exl3 {

enum class Kernel : int { kGemm = 0, kDense = 1, kStream = 2 };

struct DeviceFacts {
  int architecture;  // 10 * major + minor of the compute capability
  int multiprocessors;
  int64_t shared_bytes;  // that a block may opt in to
};

struct Problem {
  int64_t m, k, n;  // n: stored columns of all shards
  int half_bits;    // twice the bits per weight
  int family;       // 0: 3inst and mcg, 1: mul1
};

struct PlanOptions {
  bool exact = false;            // the format's own fp16 weights everywhere
  bool batch_invariant = false;  // one order of additions for every row count
};

struct Plan {
  Kernel kernel;
  int rows;    // of a row tile (kGemm); 1 (kStream)
  int form;    // 0 exact, 1 fast
  int blocks;  // thread blocks a row tile (not kDense)
};

// A measured choice that comes before the defaults; zeros in k, n and half_bits and -1 in family
// match everything.
struct PlanOverride {
  int64_t k, n;
  int half_bits, family;
  int64_t m_upto;
  Plan plan;
};

inline constexpr int64_t kLaunchRows = 512;  // rows of one launch of kGemm
inline constexpr int64_t kDenseSliceBytes = 192
                                            << 20;  // of the weight that kDense rebuilds at once
inline constexpr int kUnitInputs = 16;              // inputs of one unit of work

// Thread blocks a row tile where a plan leaves them open; one row a tile is kStream.
int default_blocks(const DeviceFacts& device, const Problem& problem, int rows);

// Whether kStream can compute a problem with so many thread blocks.
bool stream_runs(const DeviceFacts& device, const Problem& problem, int blocks);

Plan make_plan(const DeviceFacts& device, const Problem& problem, const PlanOptions& options,
               std::span<const PlanOverride> overrides = {});

// Units of work of one row tile: what thread blocks can share out.
constexpr int64_t work_units(int64_t k, int64_t n) { return k / kUnitInputs * (n / 128); }

// Where the parts of the workspace of kGemm lie, in bytes.
struct GemmWorkspace {
  int64_t image, block_sums, partials, flags, total;
};
GemmWorkspace gemm_workspace(int64_t m, int64_t k, int64_t n, int64_t shards, const Plan& plan);

// Where the parts of the workspace of kStream lie, in bytes.
struct StreamWorkspace {
  int64_t ends, total;  // partial sums come first
};
StreamWorkspace stream_workspace(int64_t k, int64_t n, const Plan& plan);

// Columns of the slices that kDense rebuilds one after the other.
int64_t dense_slice_columns(int64_t k_in, int64_t columns);

// Bytes a product takes beyond its inputs and its output.
int64_t workspace_bytes(int64_t m, int64_t k, int64_t n, int64_t shards, const Plan& plan);

}  // namespace exl3
