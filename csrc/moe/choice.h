// Which tile serves a call of the routed experts, and what it needs beyond its operands. Pure.
#pragma once

#include <cstdint>
#include <span>

#include "linear/gemm_limits.h"
#include "linear/plan.h"
#include "moe/limits.h"

namespace exl3 {

struct MoeShape {
  int64_t tokens;
  int top_k;
  int64_t experts, global_experts;
  int64_t k, inner, n;
  // Gate and up of all experts are of one kind, down likewise: two products, as the route for few
  // tokens knows them.
  bool two_products = true;
  // Of the first kind of gates, which stands for the layer where a measured choice is looked up.
  int half_bits = 8;
  int family = 0;  // 0: 3inst and mcg, 1: mul1
  // Gate and up of each expert are of one kind, and the activation is short: one product.
  bool joined = true;
  bool bfloat16 = true;  // tokens and results
};

struct MoeChoice {
  // Of a tile: 1, 2, 4 (the route for few tokens), 8, 16, 32, 64 or 128; 256: the route by
  // warpgroups.
  int rows;
  int form;           // 0 exact, 1 fast; by warpgroups 1: a slot's row is kept as bfloat16
  int blocks;         // thread blocks of a product
  int64_t chunk;      // tokens that go through all kernels at once
  bool whole_strips;  // k is cut nowhere
};

// A measured choice that comes before the rule. What it is for: zeros match everything, in family
// -1 does; the first row that matches and fits wins.
struct MoeOverride {
  int64_t k, inner, experts, global_experts;
  int top_k, half_bits, family;
  int64_t tokens_upto;
  int rows, form, blocks;  // as in MoeChoice; blocks 0: the rule's
};

// What stands for the route by warpgroups among the rows of tiles.
inline constexpr int kMoeTall = 256;

// Whether there are tiles of so many rows in such a form.
constexpr bool is_moe_plan(int64_t rows, int64_t form) {
  for (const int legal : {1, 2, 4, 8, 16, 32, 64, 128, kMoeTall}) {
    if (rows == legal) return form == 0 || (form == 1 && (rows <= kFastRows || rows == kMoeTall));
  }
  return false;
}
inline constexpr const char* kMoePlans =
    "rows 1, 2, 4, 8, 16, 32, 64, 128 or 256, form 1 with 1 to 8 and 256 alone";
inline constexpr int64_t kMoeMostBlocks = (1 << 16) - 1;

constexpr bool is_moe_tall(int rows) { return rows == kMoeTall; }
constexpr bool is_moe_stream(int rows) { return rows > 0 && rows < 8; }

// Whether the route for few tokens can serve a layer with such tiles and so many thread blocks.
bool moe_stream_runs(const DeviceFacts& device, const MoeShape& shape, int rows, int blocks);

// The same for the route by warpgroups.
bool moe_tall_runs(const DeviceFacts& device, const MoeShape& shape);

MoeChoice choose_moe(const DeviceFacts& device, const MoeShape& shape, const PlanOptions& options,
                     std::span<const MoeOverride> overrides = {});

// Thread blocks of a product through tiles of 8 rows and more, where nothing else is asked for.
int moe_tile_blocks(const DeviceFacts& device, int rows);

// Thread blocks of plan: 2,048 pairs of token and slot are two rounds of each of its warps.
constexpr int moe_plan_blocks(int64_t pairs) {
  return pairs <= 2048 ? 1 : static_cast<int>((pairs + 2047) / 2048);
}

// Tiles that `tokens` tokens can fall into, however they are routed.
int64_t most_tiles(const MoeShape& shape, int64_t tokens, int rows);

// Where the parts of the workspace of one chunk lie, in bytes. `lists` work lists, `launches`
// products; `gate_up` is empty where gate and up are one product.
struct MoeWorkspace {
  int64_t tiles, counts, tile_expert, row_pair, lists, list_counts, of_blocks, flags;
  int64_t image, block_sums, next_image, next_sums, gate_up, partials, out, total;
};
MoeWorkspace moe_workspace(const MoeShape& shape, const MoeChoice& choice, int64_t tokens,
                           int lists, int launches, bool paired);

// The same for the route for few tokens, and the shared memory of the inputs of both products.
struct MoeStreamWorkspace {
  int64_t gate_up_sums, gate_up_ends, down_sums, down_ends, total;
  int gate_up_inputs, down_inputs;
};
MoeStreamWorkspace moe_stream_workspace(const MoeShape& shape, const MoeChoice& choice,
                                        int64_t tokens);

// The same for the route by warpgroups.
struct MoeTallWorkspace {
  int64_t tiles, counts, tile_expert, row_pair, tile_part, lists, list_counts, of_blocks, taken;
  int64_t image, next_image, aside, out, total;
};
MoeTallWorkspace moe_tall_workspace(const MoeShape& shape, const MoeChoice& choice, int64_t tokens,
                                    int lists, int launches);

}  // namespace exl3
