// Rows of activations as the layer behind them wants them, see prologue.cuh. The arithmetic and its
// order are those of the product of one row.
#include "device/instructions.cuh"
#include "linear/launch.cuh"
#include "linear/prepare.h"
#include "linear/prologue.cuh"
#include "linear/stream_limits.h"

namespace exl3 {
namespace {

constexpr int kThreads = 32 * kStreamWarps;

__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ PrepareParams p) {
  __shared__ float meet[kStreamWarps];
  release_dependents();
  await_predecessors();
  const int64_t row = blockIdx.x;
  const float factor =
      p.prologue.kind == PrologueKind::kNorm
          ? norm_factor<kStreamWarps>(p.input, p.prologue, row, p.prologue.sum != nullptr, meet)
          : 1.0f;
#pragma unroll 1
  for (int column = 8 * threadIdx.x; column < p.input.k_in; column += 8 * kThreads) {
    float v[8];
    load_prepared<8>(p.input, p.prologue, factor, row, column, v);
    store_8(static_cast<uint16_t*>(p.out) + row * p.input.k_in, p.input.dtype, column, p.input.k_in,
            v);
  }
}

}  // namespace

cudaError_t launch_prepare(const PrepareParams& params, bool dependent_launch,
                           cudaStream_t stream) {
  return launch_kernel(prepare_kernel, dim3(params.m), kThreads, 0, dependent_launch, stream,
                       params);
}

}  // namespace exl3
