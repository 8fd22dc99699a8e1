// From a rate known at run time to the function compiled for it.
#pragma once

#include <cuda_runtime_api.h>

namespace exl3 {

template <int kHalfBits>
struct RateTag {
  static constexpr int half_bits = kHalfBits;
};

// Calls f(RateTag<half_bits>{}) for a legal rate; cudaErrorInvalidValue otherwise.
template <class F>
cudaError_t with_rate(int half_bits, F&& f) {
  switch (half_bits) {
    case 2:
      return f(RateTag<2>{});
    case 3:
      return f(RateTag<3>{});
    case 4:
      return f(RateTag<4>{});
    case 5:
      return f(RateTag<5>{});
    case 6:
      return f(RateTag<6>{});
    case 7:
      return f(RateTag<7>{});
    case 8:
      return f(RateTag<8>{});
    case 10:
      return f(RateTag<10>{});
    case 12:
      return f(RateTag<12>{});
    case 14:
      return f(RateTag<14>{});
    case 16:
      return f(RateTag<16>{});
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace exl3
