// torch registration of exl3::reconstruct on CUDA: the rotated weight of one matrix.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include "format/windows.cuh"
#include "linear/rates.h"
#include "linear/rebuild.h"
#include "ops/cuda_problem.h"
#include "ops/stream.h"

namespace exl3::ops {
namespace {

using torch::headeronly::ScalarType;

Tensor reconstruct(const Tensor trellis, int64_t codebook) {
  STD_TORCH_CHECK(
      trellis.scalar_type() == ScalarType::Short && trellis.dim() == 3 && trellis.is_contiguous(),
      "exl3::reconstruct: trellis must be contiguous int16 [k/16, n/16, words]");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(trellis.const_data_ptr()) % 4 == 0,
                  "exl3::reconstruct: trellis must begin at a multiple of 4 bytes; clone the view "
                  "that does not");
  const int64_t words = trellis.size(2);
  const Shard shard{static_cast<int>(codebook),
                    static_cast<int>(words / 8),
                    0,
                    0,
                    0,
                    0,
                    nullptr,
                    nullptr,
                    nullptr};
  STD_TORCH_CHECK(is_legal_tile(words, codebook), "exl3::reconstruct: codebook ", codebook,
                  " has no rate with ", words, " words a tile");
  const int device = trellis.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  device_facts(device);
  Tensor out = torch::stable::new_empty(trellis, {trellis.size(0) * 16, trellis.size(1) * 16},
                                        ScalarType::Half);
  if (trellis.size(0) * trellis.size(1) == 0) return out;
  ReconstructParams params{};
  params.tiles = static_cast<const uint32_t*>(trellis.const_data_ptr());
  params.out = static_cast<uint16_t*>(out.mutable_data_ptr());
  params.k_tiles = static_cast<int>(trellis.size(0));
  params.n_tiles = static_cast<int>(trellis.size(1));
  params.constants = shard.constants();
  const cudaStream_t stream = stream_of(device);
  check_launch("reconstruct", with_rate(shard.half_bits, [&](auto rate) {
                 return launch_reconstruct<decltype(rate)::half_bits>(params, shard.family(),
                                                                      stream);
               }));
  return out;
}

}  // namespace
}  // namespace exl3::ops

STABLE_TORCH_LIBRARY_IMPL(exl3, CUDA, m) {
  m.impl("reconstruct", TORCH_BOX(&exl3::ops::reconstruct));
}
