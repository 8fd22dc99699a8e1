// What stands before a layer, as a kernel of its own: for more than the one row whose product does
// it itself.
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
