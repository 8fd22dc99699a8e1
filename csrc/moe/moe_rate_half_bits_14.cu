// Kernels of routed experts at 7 bits per weight.
#include "moe/moe_launch.cuh"
#include "moe/moe_stream_launch.cuh"
#include "moe/moe_tall_launch.cuh"

namespace exl3 {
template cudaError_t launch_moe_gemm<14>(MoeGemmParams&, const GemmLaunch&);
template cudaError_t launch_moe_stream<14>(const MoeStreamParams&, const MoeStreamLaunch&);
template cudaError_t launch_moe_tall<14>(MoeTallParams&, const MoeTallLaunch&);
}  // namespace exl3
