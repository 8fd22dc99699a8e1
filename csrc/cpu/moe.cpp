#include "cpu/moe.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/half.h"

namespace exl3::cpu {
namespace {

constexpr int64_t kChunkTokens = 512;  // tokens in flight: bounds the rows that await their sum
constexpr int64_t kElementGrain = 16384;

float as_float(const void* data, Dtype dtype, int64_t at) {
  if (dtype == Dtype::kFloat32) return static_cast<const float*>(data)[at];
  if (dtype == Dtype::kFloat16) return static_cast<float>(static_cast<const Half*>(data)[at]);
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[at]) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void store(void* data, Dtype dtype, int64_t at, float value) {
  if (dtype == Dtype::kFloat32) {
    static_cast<float*>(data)[at] = value;
  } else if (dtype == Dtype::kFloat16) {
    static_cast<Half*>(data)[at] = static_cast<Half>(value);
  } else {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    bits = nan ? bits | 0x400000 : bits + 0x7FFF + (bits >> 16 & 1);
    static_cast<uint16_t*>(data)[at] = static_cast<uint16_t>(bits >> 16);
  }
}

class MoeRun {
 public:
  MoeRun(const MoeProblem& problem, const ForRange& for_range) : p_(problem), for_(for_range) {}

  void run() {
    for (int64_t token = 0; token < p_.m; token += kChunkTokens) {
      tokens(token, std::min(kChunkTokens, p_.m - token));
    }
  }

 private:
  void tokens(int64_t first, int64_t count) {
    const int64_t pairs = count * p_.top_k;
    if (result_ == nullptr) {
      result_ = std::make_unique_for_overwrite<float[]>(
          static_cast<size_t>(std::min(kChunkTokens, p_.m) * p_.top_k * p_.n_out));
    }
    std::vector<std::vector<int64_t>> rows(p_.gate.size());
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int expert = p_.experts[static_cast<size_t>(first * p_.top_k + pair)];
      if (expert >= 0) rows[static_cast<size_t>(expert)].push_back(pair);
    }
    for (size_t expert = 0; expert < rows.size(); ++expert) {
      if (!rows[expert].empty()) run_expert(expert, first, rows[expert]);
    }
    for_(0, count, std::max<int64_t>(1, kElementGrain / (p_.n_out * p_.top_k)),
         [&](int64_t begin, int64_t end) {
           for (int64_t token = begin; token < end; ++token) combine(first, token);
         });
  }

  void run_expert(size_t expert, int64_t first, const std::vector<int64_t>& pairs) {
    const auto count = static_cast<int64_t>(pairs.size());
    const int64_t width = p_.inner_size;
    x_.resize(static_cast<size_t>(count * p_.k_in));
    both_.resize(static_cast<size_t>(count * 2 * width));
    h_.resize(static_cast<size_t>(count * width));
    out_.resize(static_cast<size_t>(count * p_.n_out));
    for (int64_t row = 0; row < count; ++row) {
      const int64_t pair = pairs[static_cast<size_t>(row)];
      const int64_t token = first + pair / p_.top_k;
      const float weight = p_.weight_on_input ? p_.weights[first * p_.top_k + pair] : 1.0f;
      for (int64_t i = 0; i < p_.k_in; ++i) {
        x_[static_cast<size_t>(row * p_.k_in + i)] =
            weight * as_float(p_.x, p_.dtype, token * p_.x_stride + i);
      }
    }
    LinearProblem first_product{};
    first_product.x = x_.data();
    first_product.y = both_.data();
    first_product.dtype = first_product.bias_dtype = Dtype::kFloat32;
    first_product.m = count;
    first_product.k_in = first_product.x_stride = p_.k_in;
    first_product.n_total = 2 * width;
    first_product.k = p_.k;
    first_product.shards = {shard(p_.gate[expert], p_.inner, p_.inner_begin, width, 0),
                            shard(p_.up[expert], p_.inner, p_.inner_begin, width, width)};
    linear(first_product, for_);
    for_(0, count, std::max<int64_t>(1, kElementGrain / width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float* gate = both_.data() + row * 2 * width;
        for (int64_t i = 0; i < width; ++i) {
          h_[static_cast<size_t>(row * width + i)] =
              activate(p_.activation, gate[i], gate[width + i]);
        }
      }
    });
    LinearProblem second = first_product;
    second.x = h_.data();
    second.y = out_.data();
    second.k_in = second.x_stride = width;
    second.k = p_.inner;
    second.k_begin = p_.inner_begin;
    second.n_total = p_.n_out;
    second.shards = {shard(p_.down[expert], p_.n, 0, p_.n_out, 0)};
    linear(second, for_);
    for (int64_t row = 0; row < count; ++row) {
      std::copy_n(out_.data() + row * p_.n_out, p_.n_out,
                  result_.get() + pairs[static_cast<size_t>(row)] * p_.n_out);
    }
  }

  static Shard shard(const ExpertMatrix& m, int64_t n, int64_t begin, int64_t count, int64_t out) {
    return {m.trellis, m.suh, m.svh, m.codebook, m.tile_words, n, begin, count, out};
  }

  // The slots of a token in their order; the weights of absent experts are not even looked at.
  void combine(int64_t first, int64_t token) const {
    const int64_t pair = token * p_.top_k, routed = (first + token) * p_.top_k;
    for (int64_t column = 0; column < p_.n_out; ++column) {
      float sum = 0.0f;
      for (int slot = 0; slot < p_.top_k; ++slot) {
        if (p_.experts[static_cast<size_t>(routed + slot)] < 0) continue;
        const float value = result_[static_cast<size_t>((pair + slot) * p_.n_out + column)];
        sum += p_.weight_on_input ? value : p_.weights[routed + slot] * value;
      }
      store(p_.y, p_.dtype, (first + token) * p_.n_out + column, sum);
    }
  }

  const MoeProblem& p_;
  const ForRange& for_;
  std::unique_ptr<float[]> result_;  // [pairs of a chunk, n_out]
  std::vector<float> x_, both_, h_, out_;
};

}  // namespace

void moe(const MoeProblem& problem, const ForRange& for_range) { MoeRun(problem, for_range).run(); }

}  // namespace exl3::cpu
