// Elements of a tensor whose type is known at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "linear/operands.h"

namespace exl3 {

__device__ __forceinline__ float load_as_float(const void* data, Dtype dtype, int64_t at) {
  switch (dtype) {
    case Dtype::kBfloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
    case Dtype::kFloat16:
      return __half2float(static_cast<const __half*>(data)[at]);
    default:
      return static_cast<const float*>(data)[at];
  }
}

}  // namespace exl3
