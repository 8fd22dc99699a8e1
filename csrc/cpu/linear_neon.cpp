#if defined(__aarch64__)

#include "cpu/vec_neon.h"
//
#include "cpu/linear_impl.h"

namespace exl3::cpu {

const Kernels& kernels_neon() {
  static const Kernels table = make_kernels<Neon>();
  return table;
}

}  // namespace exl3::cpu

#endif
