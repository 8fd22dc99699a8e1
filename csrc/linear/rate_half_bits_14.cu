// Kernels of 7 bits per weight.
#include "linear/gemm_launch.cuh"
#include "linear/rebuild_kernel.cuh"

namespace exl3 {
template cudaError_t launch_gemm<14>(GemmParams&, const GemmLaunch&);
template cudaError_t launch_rebuild<14>(const RebuildParams&, Family, cudaStream_t);
template cudaError_t launch_reconstruct<14>(const ReconstructParams&, Family, cudaStream_t);
}  // namespace exl3
