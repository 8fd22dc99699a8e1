// Choosing the instance for a launch; included by the files that instantiate one rate each.
#pragma once

#include "linear/launch.cuh"
#include "moe/moe_tall_kernel.cuh"

namespace exl3 {

template <int kHalfBits>
cudaError_t launch_moe_tall(MoeTallParams& params, const MoeTallLaunch& launch) {
  params.by_strips = Divisor::of(static_cast<uint32_t>(params.strips));
  return with_family<kHalfBits>(launch.family, [&](auto family) {
    using C = MoeTallConfig<kHalfBits, decltype(family)::value>;
    auto* kernel = moe_tall_kernel<C>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
    if (error != cudaSuccess) return error;
    return launch_kernel(kernel, dim3(params.blocks), C::kLaunchThreads, C::kSharedBytes,
                         launch.dependent, launch.stream, params);
  });
}

}  // namespace exl3
