// Choosing the instance for a launch; included by the files that instantiate one rate each.
#pragma once

#include "linear/launch.cuh"
#include "linear/stream_kernel.cuh"

namespace exl3 {

template <class C>
cudaError_t launch_stream_config(const StreamParams& params, const StreamLaunch& launch) {
  const int shared_bytes = C::kWarps * C::kRingBytes + params.input_blocks * kStreamBlockBytes;
  auto* kernel = params.prologue.kind == PrologueKind::kNone ? stream_kernel<C, false>
                                                             : stream_kernel<C, true>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, dim3(params.positions), C::kThreads, shared_bytes,
                       launch.dependent_launch, launch.stream, params);
}

template <int kHalfBits, Family kFamily>
cudaError_t launch_stream_family(const StreamParams& params, const StreamLaunch& launch) {
  return launch.form == Form::kFast
             ? launch_stream_config<StreamConfig<kHalfBits, kFamily, Form::kFast>>(params, launch)
             : launch_stream_config<StreamConfig<kHalfBits, kFamily, Form::kExact>>(params, launch);
}

template <int kHalfBits>
cudaError_t launch_stream(const StreamParams& params, const StreamLaunch& launch) {
  return with_family<kHalfBits>(launch.family, [&](auto family) {
    return launch_stream_family<kHalfBits, decltype(family)::value>(params, launch);
  });
}

}  // namespace exl3
