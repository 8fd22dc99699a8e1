#include "cpu/vec_portable.h"
//
#include "cpu/linear_impl.h"

namespace exl3::cpu {

const Kernels& kernels_portable() {
  static const Kernels table = make_kernels<Portable>();
  return table;
}

}  // namespace exl3::cpu
