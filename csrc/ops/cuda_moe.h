// One call of the routed experts on CUDA: what its two routes share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "moe/choice.h"
#include "moe/moe.h"
#include "ops/cuda_problem.h"
#include "ops/moe_problem.h"

namespace exl3::ops {

inline constexpr int kGate = 0, kUp = 1, kDown = 2;

// One product: the experts whose matrix of a projection is of one kind. Where gate and up are one
// product, the projection is that of gate.
struct Product {
  int projection, kind;
};

struct Call {
  const MoeArguments& a;
  const uint8_t *w13, *w2;
  const uint16_t *w13_suh, *w13_svh, *w2_suh, *w2_svh;
  Dtype dtype;
  bool weight_on_input;
  MoeShape shape;
  MoeChoice choice;
  std::vector<Product> products;
  int lists;
  bool dependent;
  int multiprocessors;
  Room room;
  cudaStream_t stream;
};

// Whether a layer is two products, as the route for few tokens knows them.
inline bool has_two_products(const MoeArguments& a) {
  int kinds[3] = {};
  for (const MoeKind& kind : a.kinds) {
    for (const int projection : {kGate, kUp, kDown}) kinds[projection] += kind.used[projection];
  }
  return a.paired && kinds[kGate] == 1 && kinds[kDown] == 1;
}

// The kind that stands for the layer where a measured choice is looked up.
inline const MoeKind& first_gate(const MoeArguments& a) {
  for (const MoeKind& kind : a.kinds) {
    if (kind.used[kGate]) return kind;
  }
  return a.kinds.front();
}

inline Family family_of(const MoeKind& kind) {
  return kind.codebook == CodebookMul1::kIndex ? Family::kByteSum : Family::kHalves;
}

// The activation as `gated` has it: SiLU is gate * sigmoid(alpha gate); GELU by tanh is gate *
// sigmoid(2 sqrt(2 / pi) (gate + 0.044715 gate^3)).
struct Gate {
  float slope, cubic;
};
inline Gate gate_of(const Activation& activation) {
  const bool tanh = activation.kind == ActivationKind::kGeluTanh;
  return {tanh ? kTwoRootTwoOverPi : activation.alpha, tanh ? kTwoRootTwoOverPi * 0.044715f : 0.0f};
}

inline DecodeConstants constants_of(int codebook) {
  Shard shard{};
  shard.codebook = codebook;
  return shard.constants();
}

// Tokens [first, first + tokens) through the three kernels for few tokens.
void run_stream(const Call& call, int64_t first, int64_t tokens, uint8_t* workspace, uint16_t* y);

// Many tokens through products by warpgroups.
void run_tall(const Call& call, int64_t first, int64_t tokens, uint8_t* workspace, uint16_t* y);

// What plan needs but the height of its tiles and how many there can be.
MoePlanParams plan_of(const Call& call, int64_t first, int64_t tokens, const MoeRouting& routing,
                      int* of_blocks);

// What combine needs but its rows.
MoeCombineParams combine_of(const Call& call, int64_t first, int64_t tokens, uint16_t* y);

}  // namespace exl3::ops
