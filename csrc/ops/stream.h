// The stream that torch currently launches on.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/Exception.h>

namespace exl3::ops {

inline cudaStream_t stream_of(int device) {
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == 0,
                  "exl3: torch gave no CUDA stream for device ", device);
  return static_cast<cudaStream_t>(stream);
}

}  // namespace exl3::ops
