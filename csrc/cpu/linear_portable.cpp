#include "cpu/vec_portable.h"
//
#include "cpu/rebuild_impl.h"

namespace exl3::cpu {

const Kernels& kernels_portable() {
  static const Kernels table = [] {
    Kernels made = make_kernels<Portable>();
    made.rebuild_block = &rebuild_block<Portable>;
    return made;
  }();
  return table;
}

}  // namespace exl3::cpu
