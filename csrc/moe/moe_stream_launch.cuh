// Choosing the instance for a launch; included by the files that instantiate one rate each.
#pragma once

#include "linear/launch.cuh"
#include "moe/moe_stream_kernel.cuh"

namespace exl3 {

template <class C>
cudaError_t launch_moe_stream_config(const MoeStreamParams& params, const MoeStreamLaunch& launch) {
  const int shared_bytes = C::kWarps * C::kRingBytes + launch.input_bytes;
  auto* kernel = moe_stream_kernel<C>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, dim3(params.work.positions), C::kThreads, shared_bytes,
                       launch.dependent_launch, launch.stream, params);
}

template <int kHalfBits, Family kFamily>
cudaError_t launch_moe_stream_family(const MoeStreamParams& params, const MoeStreamLaunch& launch) {
  if (launch.form == Form::kFast) {
    return launch_moe_stream_config<StreamConfig<kHalfBits, kFamily, Form::kFast>>(params, launch);
  }
  return launch_moe_stream_config<StreamConfig<kHalfBits, kFamily, Form::kExact>>(params, launch);
}

template <int kHalfBits>
cudaError_t launch_moe_stream(const MoeStreamParams& params, const MoeStreamLaunch& launch) {
  return with_family<kHalfBits>(launch.family, [&](auto family) {
    return launch_moe_stream_family<kHalfBits, decltype(family)::value>(params, launch);
  });
}

}  // namespace exl3
