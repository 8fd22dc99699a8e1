// Kernels of routed experts at 1 bits per weight.
#include "moe/moe_launch.cuh"

namespace exl3 {
template cudaError_t launch_moe_gemm<2>(MoeGemmParams&, const GemmLaunch&);
}  // namespace exl3
