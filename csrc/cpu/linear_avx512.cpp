#if defined(__x86_64__)

#include "cpu/vec_avx512.h"
//
#include "cpu/linear_impl.h"

namespace exl3::cpu {

const Kernels& kernels_avx512() {
  static const Kernels table = make_kernels<Avx512>();
  return table;
}

}  // namespace exl3::cpu

#endif
