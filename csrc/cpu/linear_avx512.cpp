#if defined(__x86_64__)

#include "cpu/vec_avx512.h"
//
#include "cpu/rebuild_impl.h"

namespace exl3::cpu {

const Kernels& kernels_avx512() {
  static const Kernels table = [] {
    Kernels made = make_kernels<Avx512>();
    made.rebuild_block = &rebuild_block<Avx512>;
    return made;
  }();
  return table;
}

}  // namespace exl3::cpu

#endif
