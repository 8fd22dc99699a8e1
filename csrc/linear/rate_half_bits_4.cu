// Kernels of 2 bits per weight.
#include "linear/gemm_launch.cuh"
#include "linear/rebuild_kernel.cuh"

namespace exl3 {
template cudaError_t launch_gemm<4>(GemmParams&, const GemmLaunch&);
template cudaError_t launch_rebuild<4>(const RebuildParams&, Family, cudaStream_t);
template cudaError_t launch_reconstruct<4>(const ReconstructParams&, Family, cudaStream_t);
}  // namespace exl3
