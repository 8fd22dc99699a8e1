// Kernels of routed experts at 2 bits per weight.
#include "moe/moe_launch.cuh"
#include "moe/moe_stream_launch.cuh"
#include "moe/moe_tall_launch.cuh"

namespace exl3 {
template cudaError_t launch_moe_gemm<4>(MoeGemmParams&, const GemmLaunch&);
template cudaError_t launch_moe_stream<4>(const MoeStreamParams&, const MoeStreamLaunch&);
template cudaError_t launch_moe_tall<4>(MoeTallParams&, const MoeTallLaunch&);
}  // namespace exl3
