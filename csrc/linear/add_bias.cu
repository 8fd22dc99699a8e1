// The bias of a dense product.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "device/convert.cuh"
#include "linear/launch.cuh"
#include "linear/rebuild.h"

namespace exl3 {
namespace {

__global__ void add_bias_kernel(uint16_t* out, Dtype dtype, const void* bias, Dtype bias_dtype,
                                int64_t rows, int64_t columns) {
  const int64_t count = rows * columns, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const float add = load_as_float(bias, bias_dtype, i % columns);
    if (dtype == Dtype::kBfloat16) {
      auto* to = reinterpret_cast<__nv_bfloat16*>(out) + i;
      *to = __float2bfloat16_rn(__bfloat162float(*to) + add);
    } else {
      auto* to = reinterpret_cast<__half*>(out) + i;
      *to = __float2half_rn(__half2float(*to) + add);
    }
  }
}

}  // namespace

cudaError_t launch_add_bias(uint16_t* out, Dtype dtype, const void* bias, Dtype bias_dtype,
                            int64_t rows, int64_t columns, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(2048, (rows * columns + 255) / 256));
  return launch_kernel(add_bias_kernel, dim3(blocks), 256, 0, false, stream, out, dtype, bias,
                       bias_dtype, rows, columns);
}

}  // namespace exl3
