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
    return with_rows<8, 16, 32, 64, 128>(launch.rows, [&](auto rows) {
      return with_gemm_room<kHalfBits, kFamily, Form::kExact, decltype(rows)::value>(launch, f);
    });
  });
}

// The same for the TallConfig.
template <int kHalfBits, class F>
cudaError_t with_tall_config(const GemmLaunch& launch, F&& f) {
  if (launch.form != Form::kExact) return cudaErrorInvalidValue;
  return with_family<kHalfBits>(launch.family, [&](auto family) {
    constexpr Family kFamily = decltype(family)::value;
    return with_rows<32, 64, 128>(launch.rows, [&](auto rows) {
      return f(TallConfig<kHalfBits, kFamily, decltype(rows)::value>{});
    });
  });
}

}  // namespace exl3
