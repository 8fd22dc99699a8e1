// Rows of measured choices for routed experts, as operators take them: flat lists of numbers.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <vector>

#include "moe/choice.h"

namespace exl3::ops {

// k, inner, experts, experts of all ranks, slots, half bits, family, tokens, rows, form, blocks
inline constexpr size_t kMoeTableFields = 11;

inline std::vector<MoeOverride> read_moe_table(const char* op, const std::vector<int64_t>& table) {
  STD_TORCH_CHECK(table.size() % kMoeTableFields == 0, op, ": ", table.size(),
                  " numbers, expected ", kMoeTableFields, " for each row");
  std::vector<MoeOverride> overrides;
  for (size_t i = 0; i < table.size(); i += kMoeTableFields) {
    const int64_t* f = table.data() + i;
    STD_TORCH_CHECK(is_moe_plan(f[8], f[9]) && f[10] >= 0 && f[10] <= kMoeMostBlocks, op, ": row ",
                    i / kMoeTableFields, ": plan (", f[8], ", ", f[9], ", ", f[10],
                    ") is none: ", kMoePlans, ", blocks up to ", kMoeMostBlocks);
    overrides.push_back({f[0], f[1], f[2], f[3], static_cast<int>(f[4]), static_cast<int>(f[5]),
                         static_cast<int>(f[6]), f[7], static_cast<int>(f[8]),
                         static_cast<int>(f[9]), static_cast<int>(f[10])});
  }
  return overrides;
}

}  // namespace exl3::ops
