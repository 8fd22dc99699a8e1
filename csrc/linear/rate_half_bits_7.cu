// Kernels of 3.5 bits per weight.
#include "linear/gemm_launch.cuh"
#include "linear/rebuild_kernel.cuh"
#include "linear/stream_launch.cuh"

namespace exl3 {
template cudaError_t launch_gemm<7>(GemmParams&, const GemmLaunch&);
template cudaError_t launch_stream<7>(const StreamParams&, const StreamLaunch&);
template cudaError_t launch_rebuild<7>(const RebuildParams&, Family, cudaStream_t);
template cudaError_t launch_reconstruct<7>(const ReconstructParams&, Family, cudaStream_t);
}  // namespace exl3
