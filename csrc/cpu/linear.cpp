#include "cpu/linear.h"

#include <algorithm>
#include <memory>
#include <new>

#include "cpu/kernels.h"
#include "format/windows.cuh"

namespace exl3::cpu {

namespace {

constexpr int64_t kBlock = 128;          // Hadamard block
constexpr int64_t kRowChunk = 192;       // rows in flight: activations and accumulators stay in L2
constexpr int64_t kTilesOfK = 32;        // tiles decoded at a time for gemm: a 32 KiB panel
constexpr int64_t kItemTiles = 4;        // tile columns of one piece of parallel work in gemm
constexpr int64_t kTransformGrain = 64;  // 128-blocks worth starting another thread for
constexpr int64_t kGemvGrainTiles = 512;

// Grow-only, 64-byte aligned, one per thread and use.
class Scratch {
 public:
  float* get(size_t count) {
    if (count > capacity_) {
      data_.reset(static_cast<float*>(::operator new(count * sizeof(float), std::align_val_t{64})));
      capacity_ = count;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<float, Free> data_;
  size_t capacity_ = 0;
};

const Kernels& kernels() {
  switch (selected_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return kernels_avx512();
    case Isa::kAvx2:
      return kernels_avx2();
#elif defined(__aarch64__)
    case Isa::kNeon:
      return kernels_neon();
#endif
    default:
      return kernels_portable();
  }
}

size_t element_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

const char* at(const void* base, int64_t element, Dtype dtype) {
  return static_cast<const char*>(base) + element * static_cast<int64_t>(element_bytes(dtype));
}

// The 128-blocks of one shard that hold wanted columns, and where their rotated sums are kept.
struct Columns {
  const Shard* shard;
  int64_t first_block, blocks, rotated_begin;
};

class LinearRun {
 public:
  LinearRun(const LinearProblem& problem, const ForRange& for_range)
      : p_(problem), for_range_(for_range), kernels_(kernels()) {
    for (const Shard& shard : p_.shards) {
      if (shard.n_out == 0) continue;
      const int64_t first = shard.n_begin / kBlock;
      const int64_t last = (shard.n_begin + shard.n_out + kBlock - 1) / kBlock;
      columns_.push_back({&shard, first, last - first, width_});
      width_ += (last - first) * kBlock;
    }
  }

  void run() {
    if (columns_.empty()) return;
    for (int64_t row = 0; row < p_.m; row += kRowChunk) {
      rows(row, std::min(kRowChunk, p_.m - row));
    }
  }

 private:
  void rows(int64_t first, int64_t count) {
    thread_local Scratch activations, sums;
    float* x = activations.get(static_cast<size_t>(shards() * count * p_.k));
    float* rotated = sums.get(static_cast<size_t>(count * width_));
    transform_inputs(first, count, x);
    if (count == 1) {
      multiply_row(x, rotated);
    } else {
      multiply_rows(count, x, rotated);
    }
    transform_outputs(first, count, rotated);
  }

  int64_t shards() const { return static_cast<int64_t>(columns_.size()); }

  // x: [shard][row][k], each shard with its own suh.
  void transform_inputs(int64_t first, int64_t count, float* x) {
    const int64_t blocks = p_.k / kBlock;
    for_range_(0, shards() * count * blocks, kTransformGrain, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t block = item % blocks, row = item / blocks % count;
        const Shard& shard = *columns_[static_cast<size_t>(item / blocks / count)].shard;
        const int64_t k0 = block * kBlock;
        const int64_t from = std::clamp<int64_t>(p_.k_begin - k0, 0, kBlock);
        const int64_t to = std::clamp<int64_t>(p_.k_begin + p_.k_in - k0, from, kBlock);
        float* out = x + item * kBlock;
        if (from == to) {
          std::fill(out, out + kBlock, 0.0f);
          continue;
        }
        const int64_t element = (first + row) * p_.x_stride + k0 + from - p_.k_begin;
        kernels_.transform_in(at(p_.x, element, p_.dtype), p_.dtype, static_cast<int>(from),
                              static_cast<int>(to), shard.suh + k0, out);
      }
    });
  }

  // fn(shard index, first tile column, tile columns, its place in rotated) over parts of
  // [begin, end), which counts groups of `group` tile columns over all shards.
  template <class Fn>
  void for_columns(int64_t begin, int64_t end, int64_t group, Fn&& fn) const {
    int64_t offset = 0;
    for (int64_t s = 0; s < shards(); ++s) {
      const Columns& c = columns_[static_cast<size_t>(s)];
      const int64_t groups = c.blocks * 8 / group;
      const int64_t from = std::max(begin, offset) - offset;
      const int64_t to = std::min(end, offset + groups) - offset;
      if (from < to) {
        fn(s, c.first_block * 8 + from * group, (to - from) * group,
           c.rotated_begin + from * group * 16);
      }
      offset += groups;
    }
  }

  void multiply_row(const float* x, float* rotated) {
    const int64_t k_tiles = p_.k / 16;
    const int64_t grain = std::max<int64_t>(1, kGemvGrainTiles / k_tiles);
    for_range_(0, width_ / 16, grain, [&](int64_t begin, int64_t end) {
      for_columns(begin, end, 1, [&](int64_t s, int64_t tile, int64_t tiles, int64_t place) {
        const Shard& shard = *columns_[static_cast<size_t>(s)].shard;
        kernels_.gemv[shard.codebook][shard.tile_words / 8](
            x + s * p_.k, shard.trellis + tile * shard.tile_words, shard.n / 16 * shard.tile_words,
            k_tiles, static_cast<int>(tiles), rotated + place);
      });
    });
  }

  void multiply_rows(int64_t count, const float* x, float* rotated) {
    const int64_t k_tiles = p_.k / 16;
    for_range_(0, width_ / 16 / kItemTiles, 1, [&](int64_t begin, int64_t end) {
      thread_local Scratch panel_scratch, acc_scratch;
      float* panel = panel_scratch.get(kTilesOfK * 256);
      float* acc = acc_scratch.get(static_cast<size_t>(kItemTiles * count * kAccFloats));
      for_columns(begin, end, kItemTiles,
                  [&](int64_t s, int64_t tile, int64_t tiles, int64_t place) {
                    const Shard& shard = *columns_[static_cast<size_t>(s)].shard;
                    const int64_t row_words = shard.n / 16 * shard.tile_words;
                    for (int64_t item = 0; item < tiles; item += kItemTiles) {
                      std::fill(acc, acc + kItemTiles * count * kAccFloats, 0.0f);
                      for (int64_t a = 0; a < k_tiles; a += kTilesOfK) {
                        const int64_t depth = std::min(kTilesOfK, k_tiles - a);
                        for (int64_t c = 0; c < kItemTiles; ++c) {
                          kernels_.decode[shard.codebook][shard.tile_words / 8](
                              shard.trellis + a * row_words + (tile + item + c) * shard.tile_words,
                              row_words, depth, panel);
                          kernels_.gemm(x + s * count * p_.k + 16 * a, p_.k, count, panel, depth,
                                        acc + c * count * kAccFloats);
                        }
                      }
                      for (int64_t c = 0; c < kItemTiles; ++c) {
                        kernels_.reduce(acc + c * count * kAccFloats, count,
                                        rotated + place + 16 * (item + c), width_);
                      }
                    }
                  });
    });
  }

  void transform_outputs(int64_t first, int64_t count, const float* rotated) {
    const int64_t blocks = width_ / kBlock;
    for_range_(0, count * blocks, kTransformGrain, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t row = item / blocks, place = item % blocks * kBlock;
        size_t s = columns_.size() - 1;
        while (columns_[s].rotated_begin > place) --s;
        const Shard& shard = *columns_[s].shard;
        const int64_t n0 = columns_[s].first_block * kBlock + place - columns_[s].rotated_begin;
        const int64_t from = std::clamp<int64_t>(shard.n_begin - n0, 0, kBlock);
        const int64_t to = std::clamp<int64_t>(shard.n_begin + shard.n_out - n0, 0, kBlock);
        const int64_t column = shard.out_begin + n0 + from - shard.n_begin;
        const void* bias = p_.bias == nullptr ? nullptr : at(p_.bias, column, p_.bias_dtype);
        kernels_.transform_out(
            rotated + row * width_ + place, shard.svh + n0, bias, p_.bias_dtype,
            static_cast<int>(from), static_cast<int>(to),
            const_cast<char*>(at(p_.y, (first + row) * p_.n_total + column, p_.dtype)), p_.dtype);
      }
    });
  }

  const LinearProblem& p_;
  const ForRange& for_range_;
  const Kernels& kernels_;
  std::vector<Columns> columns_;
  int64_t width_ = 0;
};

}  // namespace

bool rate_supported(int tile_words, int codebook) { return is_legal_tile(tile_words, codebook); }

void linear(const LinearProblem& problem, const ForRange& for_range) {
  LinearRun(problem, for_range).run();
}

void rebuild(const LinearProblem& p, const Shard& shard, int64_t begin, int64_t end, uint16_t* out,
             const ForRange& for_range) {
  const Kernels& kernel = kernels();
  const int64_t row_words = shard.n / 16 * shard.tile_words;
  const int64_t n0 = shard.n_begin + begin, n1 = shard.n_begin + end;
  const int64_t first_block = n0 / kBlock, n_blocks = (n1 + kBlock - 1) / kBlock - first_block;
  const int64_t first_k = p.k_begin / kBlock;
  const int64_t k_blocks = (p.k_begin + p.k_in + kBlock - 1) / kBlock - first_k;
  for_range(0, k_blocks * n_blocks, 1, [&](int64_t from, int64_t to) {
    thread_local Scratch scratch;
    float* block = scratch.get(kBlock * kBlock);
    for (int64_t item = from; item < to; ++item) {
      const int64_t k = (first_k + item / n_blocks) * kBlock;
      const int64_t n = (first_block + item % n_blocks) * kBlock;
      for (int64_t c = 0; c < 8; ++c) {
        kernel.decode[shard.codebook][shard.tile_words / 8](
            shard.trellis + k / 16 * row_words + (n / 16 + c) * shard.tile_words, row_words, 8,
            block + c * 8 * 256);
      }
      const int64_t k_from = std::max(p.k_begin, k), n_from = std::max(n0, n);
      kernel.rebuild_block(block, shard.suh + k, shard.svh + n, static_cast<int>(k_from - k),
                           static_cast<int>(std::min(p.k_begin + p.k_in, k + kBlock) - k),
                           static_cast<int>(n_from - n),
                           static_cast<int>(std::min(n1, n + kBlock) - n),
                           out + (k_from - p.k_begin) * (end - begin) + n_from - n0, end - begin);
    }
  });
}

void decode_tile(const uint16_t* tile, int tile_words, int codebook, float* out) {
  float ordered[256];
  kernels().decode[codebook][tile_words / 8](tile, 0, 1, ordered);
  for (int q = 0; q < 4; ++q) {
    for (int c = 0; c < 16; ++c) {
      for (int s = 0; s < 4; ++s) {
        out[16 * (2 * s + (q & 1) + 8 * (q >> 1)) + c] = ordered[64 * q + 4 * c + s];
      }
    }
  }
}

}  // namespace exl3::cpu
