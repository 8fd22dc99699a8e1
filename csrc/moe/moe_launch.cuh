// Choosing the instance for a launch; included by the files that instantiate one rate each.
#pragma once

#include "linear/gemm_instances.cuh"
#include "linear/launch.cuh"
#include "moe/moe_kernel.cuh"

namespace exl3 {

template <class C>
cudaError_t launch_moe_config(MoeGemmParams& params, const GemmLaunch& launch) {
  params.by_steps = Divisor::of(static_cast<uint32_t>(params.k) / 16);
  params.by_strips = Divisor::of(static_cast<uint32_t>(params.strips));
  params.image_tile_bytes = image_bytes(params.k, C::kRows);
  params.next_tile_bytes = image_bytes(int64_t{params.strips} * 128, C::kRows);
  auto* kernel = moe_gemm_kernel<C>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, dim3(params.positions), C::kThreads, C::kSharedBytes,
                       launch.dependent_launch, launch.stream, params);
}

template <int kHalfBits>
cudaError_t launch_moe_gemm(MoeGemmParams& params, const GemmLaunch& launch) {
  return with_gemm_config<kHalfBits>(
      launch, [&](auto config) { return launch_moe_config<decltype(config)>(params, launch); });
}

}  // namespace exl3
