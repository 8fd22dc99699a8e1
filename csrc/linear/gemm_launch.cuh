// Choosing the instance for a launch; included by the files that instantiate one rate each.
#pragma once

#include "linear/gemm_instances.cuh"
#include "linear/gemm_kernel.cuh"
#include "linear/launch.cuh"

namespace exl3 {

template <class C>
cudaError_t launch_config(GemmParams& params, const GemmLaunch& launch) {
  params.image_tile_bytes = image_bytes(params.k, C::kRows);
  auto* kernel = gemm_kernel<C>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int row_tiles = (params.m + C::kRows - 1) / C::kRows;
  return launch_kernel(kernel, dim3(params.positions, row_tiles), C::kThreads, C::kSharedBytes,
                       launch.dependent_launch, launch.stream, params);
}

template <int kHalfBits>
cudaError_t launch_gemm(GemmParams& params, const GemmLaunch& launch) {
  return with_gemm_config<kHalfBits>(
      launch, [&](auto config) { return launch_config<decltype(config)>(params, launch); });
}

}  // namespace exl3
