// What every product hands to its last step: where results go and what is added to them.
#pragma once

#include <cstdint>

namespace exl3 {

inline constexpr int kMaxShards = 16;  // of one fused layer

enum class Dtype : int { kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

struct Output {
  void* data;  // [rows, stride]
  int64_t stride;
  const void* bias;  // [columns], indexed like the columns of data; may be null
  Dtype dtype, bias_dtype;
};

// Columns that are wanted of a shard, and where they go.
struct Columns {
  const uint16_t* svh;   // fp16 [n] of the shard
  int strip_begin;       // index of the shard's first strip among those of the launch
  int n_begin, n_out;    // columns wanted of it
  int out_begin;         // first column in the output
};

}  // namespace exl3
