// Plans and rows of measured choices for linear layers, as operators take them: lists of numbers.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <vector>

#include "linear/gemm_limits.h"
#include "linear/plan.h"

namespace exl3::ops {

// k, n, half bits, family, rows, and a plan
inline constexpr size_t kPlanTableFields = 9;

// A plan from its four numbers: kernel, rows, form, blocks. One that no kernel can carry out is an
// error here, before anything divides by its rows.
inline Plan read_plan(const char* op, const int64_t* fields) {
  const int64_t kernel = fields[0], rows = fields[1], form = fields[2], blocks = fields[3];
  const bool legal_rows = rows == 8 || rows == 16 || rows == 32 || rows == 64 || rows == 128;
  const bool gemm = kernel == 0 && legal_rows && (form == 0 || (form == 1 && rows == kFastRows)) &&
                    blocks >= 0 && blocks < (1 << 20);
  const bool stream =
      kernel == 2 && rows == 1 && (form == 0 || form == 1) && blocks >= 0 && blocks < (1 << 20);
  STD_TORCH_CHECK(gemm || stream || kernel == 1, op, ": plan (", kernel, ", ", rows, ", ", form,
                  ", ", blocks,
                  ") is none: kernel 0 with rows 8, 16, 32, 64, 128 (form 1 with 8 alone) and "
                  "blocks from 0, kernel 1, or kernel 2 with rows 1 and blocks from 0");
  if (kernel == 1) return {Kernel::kDense, 0, 0, 0};
  return {kernel == 2 ? Kernel::kStream : Kernel::kGemm, static_cast<int>(rows),
          static_cast<int>(form), static_cast<int>(blocks)};
}

inline std::vector<PlanOverride> read_plan_table(const char* op,
                                                 const std::vector<int64_t>& table) {
  STD_TORCH_CHECK(table.size() % kPlanTableFields == 0, op, ": ", table.size(),
                  " numbers, expected ", kPlanTableFields, " for each row");
  std::vector<PlanOverride> overrides;
  for (size_t i = 0; i < table.size(); i += kPlanTableFields) {
    const int64_t* f = table.data() + i;
    overrides.push_back(
        {f[0], f[1], static_cast<int>(f[2]), static_cast<int>(f[3]), f[4], read_plan(op, f + 5)});
  }
  return overrides;
}

}  // namespace exl3::ops
