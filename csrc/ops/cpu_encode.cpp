// exl3::encode_tiles for CPU tensors: argument checks, workspaces, torch's thread pool.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpu/encode.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTileElements = 256;

// A search works in several MiB, and a quantiser calls once for every row of tiles: each thread
// keeps its workspace, in huge pages where the system has them.
void* thread_workspace(size_t bytes) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> kept;
  thread_local size_t kept_bytes = 0;
  if (kept_bytes < bytes) {
    constexpr size_t kHugePage = size_t{2} << 20;
    const size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    kept_bytes = 0;
    kept.reset();
    kept.reset(std::aligned_alloc(kHugePage, rounded));
    if (!kept) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(kept.get(), rounded, MADV_HUGEPAGE);  // advice only: a refusal changes nothing
#endif
    kept_bytes = rounded;
  }
  return kept.get();
}

std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

void check_tiles(const Tensor& tiles) {
  if (tiles.dim() != 2 || tiles.size(1) != kTileElements) {
    throw std::invalid_argument("exl3::encode_tiles: tiles has shape " + shape_of(tiles) +
                                ", expected [T, 256] with the 256 elements in ring order");
  }
  if (tiles.scalar_type() != ScalarType::Float) {
    throw std::invalid_argument(
        "exl3::encode_tiles: tiles must be float32; convert with .float() before the call");
  }
}

void check_values(const float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (std::fabs(values[i]) <= exl3::cpu::kEncodeLimit) continue;  // false for NaN
    throw std::invalid_argument(
        "exl3::encode_tiles: tile " + std::to_string(i / kTileElements) + " has " +
        std::to_string(values[i]) + " at ring position " + std::to_string(i % kTileElements) +
        ", expected finite values of magnitude up to 65504 (about 1 after scaling)");
  }
}

std::tuple<Tensor, Tensor> encode_tiles(const Tensor& tiles_in, int64_t words, int64_t codebook) {
  check_tiles(tiles_in);
  const exl3::cpu::TileEncoder* encoder;
  try {
    const auto narrow = [](int64_t v) {
      return static_cast<int>(std::clamp<int64_t>(v, -1, 1 << 20));
    };
    encoder = &exl3::cpu::tile_encoder(narrow(words), narrow(codebook));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string("exl3::encode_tiles: ") + error.what());
  }

  const Tensor tiles = torch::stable::contiguous(tiles_in);
  const int64_t count = tiles.size(0);
  const Tensor packed = torch::stable::new_empty(tiles, {count, words}, ScalarType::Short);
  const Tensor values = torch::stable::new_empty(tiles, {count, kTileElements});
  const float* in = tiles.const_data_ptr<float>();
  check_values(in, count * kTileElements);
  auto* words_out = reinterpret_cast<uint16_t*>(packed.mutable_data_ptr<int16_t>());
  float* values_out = values.mutable_data_ptr<float>();

  // Cut between blocks, so that only the last one can be smaller.
  constexpr int64_t kBlock = exl3::cpu::kEncodeBlock;
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kBlock, last = std::min(end * kBlock, count);
    encoder->encode(in + first * kTileElements, last - first, words_out + first * words,
                    values_out + first * kTileElements, thread_workspace(encoder->scratch_bytes()));
  });
  return {packed, values};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def("encode_tiles(Tensor tiles, int words, int codebook) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) { m.impl("encode_tiles", TORCH_BOX(&encode_tiles)); }
