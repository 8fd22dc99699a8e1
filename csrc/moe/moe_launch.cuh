// Choosing the instance for a launch; included by the files that instantiate one rate each.
#pragma once

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

// As launch_rows of the linear layers.
template <int kHalfBits, Family kFamily, Form kForm, int kRows>
cudaError_t launch_moe_rows(MoeGemmParams& params, const GemmLaunch& launch) {
  if constexpr (gemm_gains_from_room(kRows)) {
    if (launch.room == Room::kLarge) {
      return launch_moe_config<GemmConfig<kHalfBits, kFamily, kForm, kRows, Room::kLarge>>(params,
                                                                                           launch);
    }
  }
  return launch_moe_config<GemmConfig<kHalfBits, kFamily, kForm, kRows>>(params, launch);
}

template <int kHalfBits, Family kFamily>
cudaError_t launch_moe_family(MoeGemmParams& params, const GemmLaunch& launch) {
  if (launch.form == Form::kFast) {
    if (launch.rows != kFastRows) return cudaErrorInvalidValue;
    return launch_moe_rows<kHalfBits, kFamily, Form::kFast, kFastRows>(params, launch);
  }
  switch (launch.rows) {
    case 8:
      return launch_moe_rows<kHalfBits, kFamily, Form::kExact, 8>(params, launch);
    case 16:
      return launch_moe_rows<kHalfBits, kFamily, Form::kExact, 16>(params, launch);
    case 32:
      return launch_moe_rows<kHalfBits, kFamily, Form::kExact, 32>(params, launch);
    case 64:
      return launch_moe_rows<kHalfBits, kFamily, Form::kExact, 64>(params, launch);
    case 128:
      return launch_moe_rows<kHalfBits, kFamily, Form::kExact, 128>(params, launch);
    default:
      return cudaErrorInvalidValue;
  }
}

template <int kHalfBits>
cudaError_t launch_moe_gemm(MoeGemmParams& params, const GemmLaunch& launch) {
  if (launch.family == Family::kByteSum) {
    return launch_moe_family<kHalfBits, Family::kByteSum>(params, launch);
  }
  if constexpr (kHalfBits % 2 == 0) {
    return launch_moe_family<kHalfBits, Family::kHalves>(params, launch);
  }
  return cudaErrorInvalidValue;
}

}  // namespace exl3
