#if defined(__x86_64__)

#include "cpu/vec_avx2.h"
//
#include "cpu/rebuild_impl.h"

namespace exl3::cpu {

const Kernels& kernels_avx2() {
  static const Kernels table = [] {
    Kernels made = make_kernels<Avx2>();
    made.rebuild_block = &rebuild_block<Avx2>;
    return made;
  }();
  return table;
}

}  // namespace exl3::cpu

#endif
