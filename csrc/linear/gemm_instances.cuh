// The instances of the product, for whoever launches one: linear layers and routed experts.
#pragma once

#include "linear/gemm.h"
#include "linear/gemm_config.cuh"
#include "linear/launch.cuh"
#include "linear/tall_config.cuh"

namespace exl3 {

template <int kHalfBits, Family kFamily, Form kForm, int kRows, class F>
cudaError_t with_gemm_room(const GemmLaunch& launch, F&& f) {
  if constexpr (gemm_gains_from_room(kRows)) {
    if (launch.room == Room::kLarge) {
      return f(GemmConfig<kHalfBits, kFamily, kForm, kRows, Room::kLarge>{});
    }
  }
  return f(GemmConfig<kHalfBits, kFamily, kForm, kRows>{});
}

// Calls f with the GemmConfig that a launch asks for, and refuses one that does not exist.
template <int kHalfBits, class F>
cudaError_t with_gemm_config(const GemmLaunch& launch, F&& f) {
  return with_family<kHalfBits>(launch.family, [&](auto family) {
    constexpr Family kFamily = decltype(family)::value;
    if (launch.form == Form::kFast) {
      if (launch.rows != kFastRows) return cudaErrorInvalidValue;
      return with_gemm_room<kHalfBits, kFamily, Form::kFast, kFastRows>(launch, f);
    }
    switch (launch.rows) {
      case 8:
        return with_gemm_room<kHalfBits, kFamily, Form::kExact, 8>(launch, f);
      case 16:
        return with_gemm_room<kHalfBits, kFamily, Form::kExact, 16>(launch, f);
      case 32:
        return with_gemm_room<kHalfBits, kFamily, Form::kExact, 32>(launch, f);
      case 64:
        return with_gemm_room<kHalfBits, kFamily, Form::kExact, 64>(launch, f);
      case 128:
        return with_gemm_room<kHalfBits, kFamily, Form::kExact, 128>(launch, f);
      default:
        return cudaErrorInvalidValue;
    }
  });
}

// The same for the TallConfig.
template <int kHalfBits, class F>
cudaError_t with_tall_config(const GemmLaunch& launch, F&& f) {
  if (launch.form != Form::kExact) return cudaErrorInvalidValue;
  return with_family<kHalfBits>(launch.family, [&](auto family) {
    constexpr Family kFamily = decltype(family)::value;
    switch (launch.rows) {
      case 32:
        return f(TallConfig<kHalfBits, kFamily, 32>{});
      case 64:
        return f(TallConfig<kHalfBits, kFamily, 64>{});
      case 128:
        return f(TallConfig<kHalfBits, kFamily, 128>{});
      default:
        return cudaErrorInvalidValue;
    }
  });
}

}  // namespace exl3
