#include "cpu/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace exl3::cpu {

namespace {

constexpr Isa kByPreference[] = {Isa::kAvx512, Isa::kAvx2, Isa::kNeon, Isa::kPortable};

std::string supported_names() {
  std::string names;
  for (Isa isa : kByPreference) {
    if (isa_supported(isa)) names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  return names;
}

Isa choose() {
  if (const char* wanted = std::getenv("EXL3_CPU_ISA"); wanted != nullptr && *wanted != '\0') {
    for (Isa isa : kByPreference) {
      if (std::string(wanted) == isa_name(isa) && isa_supported(isa)) return isa;
    }
    throw std::runtime_error("EXL3_CPU_ISA=" + std::string(wanted) +
                             " cannot run here; this processor and build support: " +
                             supported_names() + ". Unset the variable to choose automatically.");
  }
  for (Isa isa : kByPreference) {
    if (isa_supported(isa)) return isa;
  }
  return Isa::kPortable;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kNeon:
      return "neon";
    case Isa::kPortable:
      break;
  }
  return "portable";
}

bool isa_supported(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return true;
#if defined(__x86_64__)
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return isa_supported(Isa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
             __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__)
    case Isa::kNeon:
      return true;
#endif
    default:
      return false;
  }
}

Isa selected_isa() {
  static const Isa isa = choose();
  return isa;
}

}  // namespace exl3::cpu
