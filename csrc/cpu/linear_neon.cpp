#if defined(__aarch64__)

#include "cpu/vec_neon.h"
//
#include "cpu/rebuild_impl.h"

namespace exl3::cpu {

const Kernels& kernels_neon() {
  static const Kernels table = [] {
    Kernels made = make_kernels<Neon>();
    made.rebuild_block = &rebuild_block<Neon>;
    return made;
  }();
  return table;
}

}  // namespace exl3::cpu

#endif
