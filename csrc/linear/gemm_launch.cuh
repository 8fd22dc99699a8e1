// Choosing the instance for a launch; included by the files that instantiate one rate each.
#pragma once

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

template <int kHalfBits, Family kFamily, Form kForm, int kRows>
cudaError_t launch_rows(GemmParams& params, const GemmLaunch& launch) {
  if constexpr (gemm_gains_from_room(kRows)) {
    if (launch.room == Room::kLarge) {
      return launch_config<GemmConfig<kHalfBits, kFamily, kForm, kRows, Room::kLarge>>(params,
                                                                                       launch);
    }
  }
  return launch_config<GemmConfig<kHalfBits, kFamily, kForm, kRows>>(params, launch);
}

template <int kHalfBits, Family kFamily>
cudaError_t launch_family(GemmParams& params, const GemmLaunch& launch) {
  if (launch.form == Form::kFast) {
    if (launch.rows != kFastRows) return cudaErrorInvalidValue;
    return launch_rows<kHalfBits, kFamily, Form::kFast, kFastRows>(params, launch);
  }
  switch (launch.rows) {
    case 8:
      return launch_rows<kHalfBits, kFamily, Form::kExact, 8>(params, launch);
    case 16:
      return launch_rows<kHalfBits, kFamily, Form::kExact, 16>(params, launch);
    case 32:
      return launch_rows<kHalfBits, kFamily, Form::kExact, 32>(params, launch);
    case 64:
      return launch_rows<kHalfBits, kFamily, Form::kExact, 64>(params, launch);
    case 128:
      return launch_rows<kHalfBits, kFamily, Form::kExact, 128>(params, launch);
    default:
      return cudaErrorInvalidValue;
  }
}

template <int kHalfBits>
cudaError_t launch_gemm(GemmParams& params, const GemmLaunch& launch) {
  if (launch.family == Family::kByteSum) {
    return launch_family<kHalfBits, Family::kByteSum>(params, launch);
  }
  if constexpr (kHalfBits % 2 == 0) {
    return launch_family<kHalfBits, Family::kHalves>(params, launch);
  }
  return cudaErrorInvalidValue;
}

}  // namespace exl3
