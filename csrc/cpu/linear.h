// exl3::linear on the CPU: y = x W straight from the trellis, without a dense copy of W.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/isa.h"

namespace exl3::cpu {

enum class Dtype { kFloat32, kBfloat16, kFloat16 };
enum Codebook : int { k3inst = 0, kMcg = 1, kMul1 = 2 };

// One EXL3 matrix of a fused layer. Columns [n_begin, n_begin + n_out) of its n columns are wanted
// and land in output columns [out_begin, out_begin + n_out).
struct Shard {
  const uint16_t* trellis;  // [k / 16, n / 16, tile_words] 16-bit words, as stored
  const uint16_t* suh;      // [k] binary16
  const uint16_t* svh;      // [n] binary16
  int codebook;
  int tile_words;  // 16 * bits
  int64_t n, n_begin, n_out, out_begin;
};

struct LinearProblem {
  const void* x;     // [m, k_in], rows x_stride elements apart
  void* y;           // [m, n_total], contiguous
  const void* bias;  // [n_total] or null
  Dtype dtype;       // of x and y
  Dtype bias_dtype;
  int64_t m, k_in, x_stride, n_total;
  int64_t k, k_begin;  // stored rows, and the first one that x covers; the others count as zero
  std::vector<Shard> shards;
};

// for_range(begin, end, grain, f): f(begin', end') over disjoint parts, possibly in parallel.
using ForRange =
    std::function<void(int64_t, int64_t, int64_t, const std::function<void(int64_t, int64_t)>&)>;

// True for the widths and codebooks that exist: 1 to 8 bits, and 1.5, 2.5, 3.5 bits with mul1.
bool rate_supported(int tile_words, int codebook);

// Runs the problem with the selected instruction set. Every output element is one fixed sequence of
// fp32 operations, whatever m, the other rows and the number of threads are.
void linear(const LinearProblem& problem, const ForRange& for_range);

// The weight in the original basis as bfloat16, for a dense product: rows that x covers, columns
// [begin, end) of the wanted ones of one shard, to out[k_in, end - begin].
void rebuild(const LinearProblem& problem, const Shard& shard, int64_t begin, int64_t end,
             uint16_t* out, const ForRange& for_range);

// Decodes one tile to 16 x 16 binary32 values, row-major (rows are inputs).
void decode_tile(const uint16_t* tile, int tile_words, int codebook, float* out);

}  // namespace exl3::cpu
