// Kernels of 3.5 bits per weight.
#include "linear/gemm_launch.cuh"
#include "linear/rebuild_kernel.cuh"

namespace exl3 {
template cudaError_t launch_gemm<7>(GemmParams&, const GemmLaunch&);
template cudaError_t launch_rebuild<7>(const RebuildParams&, Family, cudaStream_t);
template cudaError_t launch_reconstruct<7>(const ReconstructParams&, Family, cudaStream_t);
}  // namespace exl3
