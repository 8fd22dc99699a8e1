#include "ops/cuda_problem.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <mutex>

#include "format/windows.cuh"

namespace exl3::ops {

using torch::headeronly::ScalarType;

namespace {

void check_tensor(const char* op, const Tensor& t, ScalarType type, const char* what, int64_t dim,
                  int device) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == device, op, ": ", what,
                  " must be on the device of suh, cuda:", device, "; move it there");
  STD_TORCH_CHECK(t.scalar_type() == type, op, ": ", what, " has scalar type ",
                  static_cast<int>(t.scalar_type()), ", expected ", static_cast<int>(type));
  STD_TORCH_CHECK(t.dim() == dim && t.is_contiguous(), op, ": ", what, " must be contiguous with ",
                  dim, " dimension(s), found ", t.dim(), t.is_contiguous() ? "" : " and strides");
}

}  // namespace

Weights read_weights(const char* op, const Tensor& trellis, const Tensor& suh, const Tensor& svh,
                     const std::vector<int64_t>& fields) {
  STD_TORCH_CHECK(!fields.empty() && fields.size() % kShardFields == 0, op, ": shards holds ",
                  fields.size(), " numbers, expected ", kShardFields, " for each shard");
  const int64_t count = static_cast<int64_t>(fields.size()) / kShardFields;
  STD_TORCH_CHECK(count <= kMaxShards, op, ": ", count, " shards, at most ", kMaxShards,
                  " fit one call; split the layer");
  STD_TORCH_CHECK(suh.is_cuda(), op, ": suh must be on a CUDA device; move it there");
  const int device = suh.get_device_index();
  check_tensor(op, trellis, ScalarType::Short, "trellis", 1, device);
  check_tensor(op, suh, ScalarType::Half, "suh", 2, device);
  check_tensor(op, svh, ScalarType::Half, "svh", 1, device);
  STD_TORCH_CHECK(suh.size(0) == count && suh.size(1) > 0 && suh.size(1) % 128 == 0, op,
                  ": suh is [", suh.size(0), ", ", suh.size(1), "], expected [", count,
                  " shards, a positive multiple of 128]");

  Weights weights{{}, suh.size(1), 0, 0, static_cast<const uint16_t*>(suh.const_data_ptr())};
  const auto* words = static_cast<const uint8_t*>(trellis.const_data_ptr());
  const auto* scales = static_cast<const uint16_t*>(svh.const_data_ptr());
  int64_t word = 0;
  for (int64_t index = 0; index < count; ++index) {
    const int64_t* f = fields.data() + index * kShardFields;
    const int64_t codebook = f[0], tile_words = f[1], n = f[2], n_begin = f[3], n_out = f[4];
    STD_TORCH_CHECK(is_legal_tile(tile_words, codebook), op, ": shard ", index, " has codebook ",
                    codebook, " with ", tile_words,
                    " words a tile; legal are 16 times 1..8 bits, and 24, 40, 56 with codebook 2");
    STD_TORCH_CHECK(n > 0 && n % 128 == 0 && n < (int64_t{1} << 30), op, ": shard ", index,
                    " stores ", n, " columns, expected a positive multiple of 128");
    STD_TORCH_CHECK(n_begin >= 0 && n_out >= 0 && n_begin + n_out <= n, op, ": shard ", index,
                    " wants columns [", n_begin, ", ", n_begin + n_out, ") of ", n);
    weights.shards.push_back({static_cast<int>(codebook), static_cast<int>(tile_words / 8), n,
                              n_begin, n_out, weights.n_out, words + 2 * word,
                              weights.suh + index * weights.k, scales + weights.n});
    word += weights.k / 16 * (n / 16) * tile_words;
    weights.n += n;
    weights.n_out += n_out;
  }
  STD_TORCH_CHECK(trellis.size(0) == word, op, ": trellis holds ", trellis.size(0),
                  " words, the shards need ", word);
  STD_TORCH_CHECK(svh.size(0) == weights.n, op, ": svh holds ", svh.size(0),
                  " columns, the shards have ", weights.n);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(words) % 16 == 0 &&
                      reinterpret_cast<uintptr_t>(weights.suh) % 16 == 0 &&
                      reinterpret_cast<uintptr_t>(scales) % 8 == 0,
                  op,
                  ": trellis and suh must begin at a multiple of 16 bytes, svh of 8; clone the "
                  "views that do not");
  return weights;
}

Dtype activation_dtype(const char* op, const Tensor& x) {
  if (x.scalar_type() == ScalarType::BFloat16) return Dtype::kBfloat16;
  if (x.scalar_type() == ScalarType::Half) return Dtype::kFloat16;
  STD_TORCH_CHECK(false, op, ": x has scalar type ", static_cast<int>(x.scalar_type()),
                  "; on CUDA x is bfloat16 or float16, convert it first");
}

Tensor readable_rows(const Tensor& x) {
  const bool in_place = x.dim() == 2 && x.stride(1) == 1 && x.stride(0) >= x.size(1);
  return in_place ? x : torch::stable::contiguous(x);
}

const DeviceFacts& device_facts(int device) {
  static std::mutex mutex;
  static std::array<DeviceFacts, 64> facts{};
  STD_TORCH_CHECK(device >= 0 && device < 64, "exl3: device ", device, " is out of range 0..63");
  const std::lock_guard<std::mutex> lock(mutex);
  DeviceFacts& entry = facts[device];
  if (entry.architecture == 0) {
    int major = 0, minor = 0, multiprocessors = 0, shared = 0;
    check_launch("device query",
                 cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    STD_TORCH_CHECK(major >= 8, "exl3: device ", device, " has compute capability ", major, ".",
                    minor, ", the kernels need 8.0 or newer; use another GPU");
    entry = {10 * major + minor, multiprocessors, shared};
  }
  return entry;
}

Options& options() {
  static Options instance;
  return instance;
}

void check_launch(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // so that the next call does not report this one
  STD_TORCH_CHECK(false, "exl3: ", what, " failed: ", cudaGetErrorString(error),
                  error == cudaErrorNoKernelImageForDevice
                      ? ". This build holds no code for the device; install the wheel or image "
                        "made for it, or build with scripts/build-kernels --arch"
                      : "");
}

}  // namespace exl3::ops
