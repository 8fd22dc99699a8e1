// The norm or activation before a layer as a kernel of its own: for every call that the stream
// kernel, which does it itself, does not take.
#pragma once

#include <cuda_runtime_api.h>

#include "linear/operands.h"

namespace exl3 {

struct PrepareParams {
  Input input;  // k_begin 0
  Prologue prologue;
  int m;
  void* out;  // [m, k_in] of x's type
};

cudaError_t launch_prepare(const PrepareParams& params, bool dependent_launch, cudaStream_t stream);

}  // namespace exl3
