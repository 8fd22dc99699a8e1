// binary16 as an arithmetic type: GCC 12 knows _Float16 in C++ on x86 and __fp16 on Arm.
#pragma once

namespace exl3::cpu {

#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif

}  // namespace exl3::cpu
