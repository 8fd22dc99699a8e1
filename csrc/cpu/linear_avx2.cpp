#if defined(__x86_64__)

#include "cpu/vec_avx2.h"
//
#include "cpu/linear_impl.h"

namespace exl3::cpu {

const Kernels& kernels_avx2() {
  static const Kernels table = make_kernels<Avx2>();
  return table;
}

}  // namespace exl3::cpu

#endif
