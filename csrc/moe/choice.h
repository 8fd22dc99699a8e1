// Which tile serves a call of the routed experts, and what it needs beyond its operands. Pure.
#pragma once

#include <cstdint>

#include "linear/plan.h"

namespace exl3 {

struct MoeShape {
  int64_t tokens;
  int top_k;
  int64_t experts, global_experts;
  int64_t k, inner, n;
};

struct MoeChoice {
  int rows;           // of a tile: 8, 16, 32, 64 or 128
  int form;           // 0 exact, 1 fast
  int blocks;         // thread blocks of a product
  int64_t chunk;      // tokens that go through all kernels at once
  bool whole_strips;  // k is cut nowhere
};

MoeChoice choose_moe(const DeviceFacts& device, const MoeShape& shape, const PlanOptions& options);

// Tiles that `tokens` tokens can fall into, however they are routed.
int64_t most_tiles(const MoeShape& shape, int64_t tokens, int rows);

// Where the parts of the workspace of one chunk lie, in bytes. `lists` work lists, `launches`
// products; `gate_up` is empty where gate and up are one product.
struct MoeWorkspace {
  int64_t tiles, counts, tile_expert, row_pair, lists, list_counts, flags;
  int64_t image, block_sums, next_image, next_sums, gate_up, partials, out, total;
};
MoeWorkspace moe_workspace(const MoeShape& shape, const MoeChoice& choice, int64_t tokens,
                           int lists, int launches, bool paired);

}  // namespace exl3
