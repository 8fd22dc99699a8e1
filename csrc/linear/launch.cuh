// Launching: with and without the attribute for programmatic dependent launch, and for a family of
// codebooks that only the caller's data tell.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "device/forms.h"

namespace exl3 {

// Calls f with the family as a constant; refuses one that a rate, twice its bits, does not have.
template <int kHalfBits, class F>
cudaError_t with_family(Family family, F&& f) {
  if (family == Family::kByteSum) return f(std::integral_constant<Family, Family::kByteSum>{});
  if constexpr (kHalfBits % 2 == 0) {
    return f(std::integral_constant<Family, Family::kHalves>{});
  }
  return cudaErrorInvalidValue;
}

// Calls f with the row count of a tile as a constant; refuses one that is not among kRows.
template <int... kRows, class F>
cudaError_t with_rows(int rows, F&& f) {
  cudaError_t error = cudaErrorInvalidValue;
  (void)((rows == kRows && (error = f(std::integral_constant<int, kRows>{}), true)) || ...);
  return error;
}

template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), dim3 grid, int threads,
                          size_t shared_bytes, bool dependent_launch, cudaStream_t stream,
                          const Arguments&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace exl3
