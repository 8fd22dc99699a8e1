// torch registration of the CPU kernels: argument checks here, numbers in csrc/cpu.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "cpu/half.h"
#include "cpu/linear.h"

namespace {

using exl3::cpu::Dtype;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kDenseRows = 128;      // from here on rebuilding a weight pays on a Zen 5 core
constexpr int64_t kDenseColumns = 1024;  // of one rebuilt slice
constexpr int64_t kShardFields = 5;      // codebook, tile_words, n, n_begin, n_out

Dtype activation_dtype(ScalarType type, const char* what) {
  switch (type) {
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::BFloat16:
      return Dtype::kBfloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    default:
      break;
  }
  STD_TORCH_CHECK(false, "exl3::linear: ", what,
                  " must be float32, bfloat16 or float16, found scalar type ",
                  static_cast<int>(type));
}

void check_vector(const Tensor& t, ScalarType type, const char* what, int64_t dim) {
  STD_TORCH_CHECK(t.is_cpu(), "exl3::linear: ", what, " must be on the CPU");
  STD_TORCH_CHECK(t.scalar_type() == type, "exl3::linear: ", what, " has scalar type ",
                  static_cast<int>(t.scalar_type()), ", expected ", static_cast<int>(type));
  STD_TORCH_CHECK(t.dim() == dim && t.is_contiguous(), "exl3::linear: ", what,
                  " must be contiguous with ", dim, " dimension(s), found ", t.dim());
}

exl3::cpu::ForRange torch_pool() {
  return [](int64_t begin, int64_t end, int64_t grain,
            const std::function<void(int64_t, int64_t)>& f) {
    torch::stable::parallel_for(begin, end, grain, f);
  };
}

// Fills p.shards and p.n_total from the flat description; returns the trellis words used.
int64_t read_shards(const std::vector<int64_t>& fields, const uint16_t* trellis,
                    const uint16_t* suh, const uint16_t* svh, exl3::cpu::LinearProblem& p) {
  int64_t word = 0, column = 0;
  for (size_t at = 0; at < fields.size(); at += kShardFields) {
    const int64_t index = static_cast<int64_t>(at) / kShardFields;
    const int64_t codebook = fields[at], tile_words = fields[at + 1], n = fields[at + 2],
                  n_begin = fields[at + 3], n_out = fields[at + 4];
    STD_TORCH_CHECK(tile_words <= 128 && exl3::cpu::rate_supported(static_cast<int>(tile_words),
                                                                   static_cast<int>(codebook)),
                    "exl3::linear: shard ", index, " has codebook ", codebook, " with ", tile_words,
                    " words a tile; legal are 16 times 1..8 bits, and 24, 40, 56 with codebook 2");
    STD_TORCH_CHECK(n > 0 && n % 128 == 0, "exl3::linear: shard ", index, " stores ", n,
                    " columns, expected a positive multiple of 128");
    STD_TORCH_CHECK(n_begin >= 0 && n_out >= 0 && n_begin + n_out <= n, "exl3::linear: shard ",
                    index, " wants columns [", n_begin, ", ", n_begin + n_out, ") of ", n);
    p.shards.push_back({trellis + word, suh + index * p.k, svh + column, static_cast<int>(codebook),
                        static_cast<int>(tile_words), n, n_begin, n_out, p.n_total});
    word += p.k / 16 * (n / 16) * tile_words;
    column += n;
    p.n_total += n_out;
  }
  return word;
}

// VLLM_BATCH_INVARIANT=1 asks for one arithmetic whatever the number of rows.
bool batch_invariant() {
  const char* value = std::getenv("VLLM_BATCH_INVARIANT");
  return value != nullptr && *value != '\0' && std::string(value) != "0";
}

// Many rows: slices of the weight in the original basis, rounded to bfloat16, and torch's own
// product. One slice exists at a time.
Tensor dense(const exl3::cpu::LinearProblem& p, const Tensor& x, const Tensor& y) {
  Tensor flat = torch::stable::view(y, {p.m, p.n_total});
  for (const auto& shard : p.shards) {
    for (int64_t begin = 0; begin < shard.n_out; begin += kDenseColumns) {
      const int64_t end = std::min(begin + kDenseColumns, shard.n_out);
      Tensor weight = torch::stable::new_empty(x, {p.k_in, end - begin});
      exl3::cpu::rebuild(p, shard, begin, end, static_cast<uint16_t*>(weight.mutable_data_ptr()),
                         torch_pool());
      Tensor part = torch::stable::narrow(flat, 1, shard.out_begin + begin, end - begin);
      torch::stable::copy_(part, torch::stable::matmul(x, weight));
    }
  }
  return y;
}

Tensor linear(const Tensor x, const Tensor trellis, const Tensor suh, const Tensor svh,
              std::optional<Tensor> bias, std::vector<int64_t> shards, int64_t k_begin) {
  STD_TORCH_CHECK(!shards.empty() && shards.size() % kShardFields == 0,
                  "exl3::linear: shards holds ", shards.size(), " numbers, expected ", kShardFields,
                  " for each shard");
  const int64_t count = static_cast<int64_t>(shards.size()) / kShardFields;
  check_vector(trellis, ScalarType::Short, "trellis", 1);
  check_vector(suh, ScalarType::Half, "suh", 2);
  check_vector(svh, ScalarType::Half, "svh", 1);
  STD_TORCH_CHECK(suh.size(0) == count && suh.size(1) % 128 == 0, "exl3::linear: suh is [",
                  suh.size(0), ", ", suh.size(1), "], expected [", count,
                  " shards, a multiple of 128]");
  STD_TORCH_CHECK(x.is_cpu() && x.dim() >= 1,
                  "exl3::linear: x must be on the CPU and have at least one dimension");

  exl3::cpu::LinearProblem p{};
  p.dtype = activation_dtype(x.scalar_type(), "x");
  p.k = suh.size(1);
  p.k_begin = k_begin;
  p.k_in = x.size(x.dim() - 1);
  STD_TORCH_CHECK(k_begin >= 0 && k_begin + p.k_in <= p.k, "exl3::linear: x covers rows [", k_begin,
                  ", ", k_begin + p.k_in, ") but the weights have ", p.k);
  const int64_t words = read_shards(shards, static_cast<const uint16_t*>(trellis.const_data_ptr()),
                                    static_cast<const uint16_t*>(suh.const_data_ptr()),
                                    static_cast<const uint16_t*>(svh.const_data_ptr()), p);
  int64_t stored_columns = 0;
  for (const auto& shard : p.shards) stored_columns += shard.n;
  STD_TORCH_CHECK(trellis.size(0) == words, "exl3::linear: trellis holds ", trellis.size(0),
                  " words, the shards need ", words);
  STD_TORCH_CHECK(svh.size(0) == stored_columns, "exl3::linear: svh holds ", svh.size(0),
                  " columns, the shards have ", stored_columns);
  if (bias.has_value()) {
    p.bias_dtype = activation_dtype(bias->scalar_type(), "bias");
    STD_TORCH_CHECK(
        bias->is_cpu() && bias->dim() == 1 && bias->is_contiguous() && bias->size(0) == p.n_total,
        "exl3::linear: bias must be contiguous with ", p.n_total, " elements");
    p.bias = bias->const_data_ptr();
  }

  std::vector<int64_t> y_sizes(x.sizes().begin(), x.sizes().end());
  y_sizes.back() = p.n_total;
  Tensor y = torch::stable::new_empty(x, y_sizes);
  p.m = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) p.m *= x.size(d);
  if (p.m == 0 || p.n_total == 0) return y;
  // Rows of a 2-D slice are read where they lie; anything else is made contiguous first.
  const bool rows_in_place = x.dim() == 2 && x.stride(1) == 1 && x.stride(0) >= p.k_in;
  const Tensor rows = rows_in_place ? x : torch::stable::contiguous(x);
  p.x = rows.const_data_ptr();
  p.x_stride = rows_in_place ? x.stride(0) : p.k_in;
  if (p.m >= kDenseRows && p.dtype == Dtype::kBfloat16 && !bias.has_value() && !batch_invariant()) {
    return dense(p, torch::stable::view(rows, {p.m, p.k_in}), y);
  }
  p.y = y.mutable_data_ptr();
  exl3::cpu::linear(p, torch_pool());
  return y;
}

// The rotated weight A of one matrix: int16 [k/16, n/16, words] to float16 [k, n], bit-exact.
Tensor reconstruct(const Tensor trellis, int64_t codebook) {
  check_vector(trellis, ScalarType::Short, "trellis", 3);
  const int64_t k_tiles = trellis.size(0), n_tiles = trellis.size(1);
  const int tile_words = static_cast<int>(trellis.size(2));
  STD_TORCH_CHECK(exl3::cpu::rate_supported(tile_words, static_cast<int>(codebook)),
                  "exl3::reconstruct: codebook ", codebook, " has no rate with ", tile_words,
                  " words a tile");
  Tensor out = torch::stable::new_empty(trellis, {k_tiles * 16, n_tiles * 16}, ScalarType::Half);
  const auto* words = static_cast<const uint16_t*>(trellis.const_data_ptr());
  auto* values = static_cast<exl3::cpu::Half*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, k_tiles * n_tiles, 256, [&](int64_t begin, int64_t end) {
    alignas(64) float tile[256];
    for (int64_t i = begin; i < end; ++i) {
      exl3::cpu::decode_tile(words + i * tile_words, tile_words, static_cast<int>(codebook), tile);
      exl3::cpu::Half* corner = values + i / n_tiles * 16 * n_tiles * 16 + i % n_tiles * 16;
      for (int r = 0; r < 16; ++r) {
        for (int c = 0; c < 16; ++c) {
          corner[r * n_tiles * 16 + c] = static_cast<exl3::cpu::Half>(tile[16 * r + c]);
        }
      }
    }
  });
  return out;
}

std::string cpu_isa() { return exl3::cpu::isa_name(exl3::cpu::selected_isa()); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def(
      "linear(Tensor x, Tensor trellis, Tensor suh, Tensor svh, Tensor? bias, int[] shards, "
      "int k_begin=0) -> Tensor");
  // What stands before a layer, computed inside it: docs/kernels.md says how each is rounded. On a
  // CPU both are exl3_plugin/fused.py, in terms of torch's own operators and `linear`.
  m.def(
      "norm_linear(Tensor x, Tensor residual, Tensor norm_weight, float epsilon, Tensor trellis, "
      "Tensor suh, Tensor svh, Tensor? bias, int[] shards, int k_begin) -> (Tensor, Tensor)");
  m.def(
      "gated_linear(Tensor x, Tensor trellis, Tensor suh, Tensor svh, Tensor? bias, int[] shards, "
      "int k_begin) -> Tensor");
  m.def("reconstruct(Tensor trellis, int codebook) -> Tensor");
  m.def("cpu_isa() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("reconstruct", TORCH_BOX(&reconstruct));
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
}
