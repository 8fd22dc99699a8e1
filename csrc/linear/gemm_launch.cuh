// Choosing the instance for a launch; included by the files that instantiate one rate each.
#pragma once

#include "linear/gemm_instances.cuh"
#include "linear/gemm_kernel.cuh"
#include "linear/launch.cuh"
#include "linear/tall_kernel.cuh"

namespace exl3 {

template <class C, class Kernel>
cudaError_t launch_config(Kernel* kernel, int threads, GemmParams& params,
                          const GemmLaunch& launch) {
  params.image_tile_bytes = image_bytes(params.k, C::kRows);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int row_tiles = (params.m + C::kRows - 1) / C::kRows;
  return launch_kernel(kernel, dim3(params.positions, row_tiles), threads, C::kSharedBytes,
                       launch.dependent_launch, launch.stream, params);
}

template <int kHalfBits>
cudaError_t launch_gemm(GemmParams& params, const GemmLaunch& launch) {
  if (tall_runs(launch.room, launch.rows)) {
    return with_tall_config<kHalfBits>(launch, [&](auto config) {
      using C = decltype(config);
      return launch_config<C>(tall_kernel<C>, C::kLaunchThreads, params, launch);
    });
  }
  return with_gemm_config<kHalfBits>(launch, [&](auto config) {
    using C = decltype(config);
    if constexpr (tall_runs(C::kRoom, C::kRows)) {
      return cudaErrorInvalidValue;  // of experts alone
    } else {
      return launch_config<C>(gemm_kernel<C>, C::kThreads, params, launch);
    }
  });
}

}  // namespace exl3
