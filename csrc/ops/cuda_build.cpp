// What this library was built from and for. Calibration profiles are keyed by the source hash, and
// the architectures decide whether a device can run the kernels at all.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "exl3_source_hash.h"

namespace {

// "80,90" to {80, 90}. The text comes from the build and holds digits and commas only.
std::vector<int64_t> numbers(std::string_view text) {
  std::vector<int64_t> values;
  int64_t value = 0;
  for (const char c : text) {
    if (c == ',') {
      values.push_back(value);
      value = 0;
    } else {
      value = 10 * value + (c - '0');
    }
  }
  if (!text.empty()) values.push_back(value);
  return values;
}

// Compute capabilities, times ten, that there is machine code for.
std::vector<int64_t> cuda_architectures() { return numbers(EXL3_ARCHITECTURES); }

std::string cuda_build_info() {
  return "{\"source_hash\": \"" EXL3_SOURCE_HASH "\", \"architectures\": [" EXL3_ARCHITECTURES
         "], \"ptx\": [" EXL3_PTX "], \"nvcc\": \"" EXL3_NVCC_VERSION "\"}";
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def("cuda_build_info() -> str");
  m.def("cuda_architectures() -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("cuda_build_info", TORCH_BOX(&cuda_build_info));
  m.impl("cuda_architectures", TORCH_BOX(&cuda_architectures));
}
