// Activations and results of a product: where they lie, what they cover, what comes before it.
#pragma once

#include <cstdint>

namespace exl3 {

inline constexpr int kMaxShards = 16;  // of one fused layer

enum class Dtype : int { kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

struct Input {
  const void* x;  // [m, k_in], rows stride apart
  int64_t stride;
  Dtype dtype;        // bfloat16 or float16
  int k_begin, k_in;  // the inputs that x holds of the k of the weight; the others are zero
};

// What stands before a layer and is done where its activations are read.
enum class PrologueKind : int {
  kNone = 0,
  kNorm = 1,  // x + residual, RMS norm, weight
  kGate = 2,  // silu(gate) * up, where x points to gate
};

struct Prologue {
  PrologueKind kind = PrologueKind::kNone;
  // Of the norm:
  const void* residual = nullptr;  // [m, k_in] of x's type, rows residual_stride apart
  int64_t residual_stride = 0;
  const void* weight = nullptr;          // [k_in]
  Dtype weight_dtype = Dtype::kFloat32;  // or x's
  float epsilon = 0.0f;
  void* sum = nullptr;  // [m, k_in] of x's type: x + residual, or null
  // Of the gate: elements from gate to up.
  int64_t up = 0;
};

struct Output {
  void* data;  // [rows, stride]
  int64_t stride;
  const void* bias;  // [columns], indexed like the columns of data; may be null
  Dtype dtype, bias_dtype;
};

// Columns that are wanted of a shard, and where they go.
struct Columns {
  const uint16_t* svh;  // fp16 [n] of the shard
  int strip_begin;      // index of the shard's first strip among those of the launch
  int n_begin, n_out;   // columns wanted of it
  int out_begin;        // first column in the output
};

}  // namespace exl3
