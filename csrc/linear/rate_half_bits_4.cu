// Kernels of 2 bits per weight.
#include "linear/gemm_launch.cuh"
#include "linear/rebuild_kernel.cuh"
#include "linear/stream_launch.cuh"

namespace exl3 {
template cudaError_t launch_gemm<4>(GemmParams&, const GemmLaunch&);
template cudaError_t launch_stream<4>(const StreamParams&, const StreamLaunch&);
template cudaError_t launch_rebuild<4>(const RebuildParams&, Family, cudaStream_t);
template cudaError_t launch_reconstruct<4>(const ReconstructParams&, Family, cudaStream_t);
}  // namespace exl3
