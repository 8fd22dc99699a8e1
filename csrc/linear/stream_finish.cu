// The last step of the product for one row: adds what positions and warps left of each strip, in
// the order of k, then the output Hadamard, svh, bias, rounding.
#include "device/hadamard.cuh"
#include "device/instructions.cuh"
#include "device/partition.cuh"
#include "linear/launch.cuh"
#include "linear/output.cuh"
#include "linear/stream.h"

namespace exl3 {
namespace {

constexpr int kWarps = 2;  // of a thread block; a warp finishes one strip
// What it needs to have all worked out before it waits. It also fits beside the product: a block of
// it leaves that 120 registers a thread.
constexpr int kRegisters = 56;

// The plan uses it on sm_90 alone, so it is empty elsewhere.
__global__ void __maxnreg__(kRegisters) finish_kernel(const __grid_constant__ FinishParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
  constexpr int kBatch = 4;  // loads under way at a time
  release_dependents();
  const int lane = threadIdx.x % 32;
  const int strip = blockIdx.x * kWarps + threadIdx.x / 32;
  if (strip >= p.strips) return;
  const auto& shard = shard_of_strip(p, strip);
  const int channel = (strip - shard.columns.strip_begin) * 128 + 4 * lane;

  const int strip_steps = p.k / 16;
  const int begin = strip * strip_steps, end = begin + strip_steps;
  const int first = p.split.part_of(begin), last = p.split.part_of(end - 1);
  // The warp with the last step of the strip: whether its share goes on.
  const UnitRange range = p.split.range(last);
  const UnitRange part{max(range.begin, shard.columns.strip_begin * strip_steps),
                       min(range.end, shard_end_strip(p, shard) * strip_steps)};
  const EvenSplit shares = stream_shares(part);
  const int warp = shares.part_of(end - 1 - part.begin);
  const bool goes_on = part.begin + shares.range(warp).end > end;
  const float* from = p.partials + (int64_t{first} + strip) * 128 + 4 * lane;
  // This kernel starts while the product runs, so it has the time to go through the motions once
  // without its inputs: its instructions are then near when they count.
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 1) await_predecessors();
    const int parts = pass == 0 ? 0 : last - first + 1;
    float z[4] = {};
    float4 piece = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // of a share that goes on
    if (goes_on && pass == 1) {
      piece = __ldcg(reinterpret_cast<const float4*>(p.ends + int64_t{strip} * 128 + 4 * lane));
    }
    const uint2 raw_scales = __ldg(reinterpret_cast<const uint2*>(shard.columns.svh + channel));
    int part = 0;
#pragma unroll 1
    do {
      float4 v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (part + i < parts) {
          v[i] = __ldcg(reinterpret_cast<const float4*>(from + (part + i) * 128));
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        z[0] += v[i].x, z[1] += v[i].y, z[2] += v[i].z, z[3] += v[i].w;
      }
      part += kBatch;
    } while (part < parts);
    z[0] += piece.x, z[1] += piece.y, z[2] += piece.z, z[3] += piece.w;
    hadamard_128(z, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) z[i] *= kHadamardScale;
    if (pass == 1) {
      store_channels(p.out, shard.columns, 0, channel, unpack_scales(raw_scales), z);
    }
  }
#endif
}

}  // namespace

cudaError_t launch_finish(const FinishParams& params, bool dependent_launch, cudaStream_t stream) {
  return launch_kernel(finish_kernel, dim3((params.strips + kWarps - 1) / kWarps), 32 * kWarps, 0,
                       dependent_launch, stream, params);
}

}  // namespace exl3
