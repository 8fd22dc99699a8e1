// Which instruction set the CPU kernels use: chosen once per process, at run time.
#pragma once

namespace exl3::cpu {

// kAvx512 stands for F+BW+DQ+VL with VBMI, VBMI2 and VNNI (Ice Lake, Zen 4 and later): without
// those the AVX2 path is as fast, so there is no third x86 variant.
enum class Isa { kPortable, kAvx2, kAvx512, kNeon };

const char* isa_name(Isa isa);

// True when this processor (and this build) can run `isa`.
bool isa_supported(Isa isa);

// The best supported set, or the one named by the environment variable EXL3_CPU_ISA
// (avx512, avx2, neon, portable). A name that is unknown or not supported here throws
// std::runtime_error; the variable is read at the first call.
Isa selected_isa();

}  // namespace exl3::cpu
