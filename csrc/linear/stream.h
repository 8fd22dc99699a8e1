// The product for one row: what the host hands to the device.
#pragma once

#include <cuda_runtime_api.h>

#include "device/forms.h"
#include "linear/operands.h"
#include "linear/stream_limits.h"

namespace exl3 {

struct StreamShard {
  const uint8_t* weights;  // strips
  const uint16_t* suh;     // fp16 [k]
  Columns columns;
};

struct StreamParams {
  StreamShard shards[kMaxShards];
  int shard_count;
  Input input;
  Prologue prologue;
  int k;             // multiple of 128
  int strips;        // of all shards
  int positions;     // thread blocks
  EvenSplit split;   // of the k16 steps of all strips to positions
  int input_blocks;  // room in shared memory, in blocks of 128 inputs
  float* partials;   // [positions + strips][128]: of position p and strip s at p + s
  float* ends;       // [strips][128]: last pieces of strips, see stream_kernel.cuh
  DecodeConstants constants;
};

struct FinishShard {
  Columns columns;
};

struct FinishParams {
  FinishShard shards[kMaxShards];
  int shard_count;
  int k, strips;
  EvenSplit split;
  const float *partials, *ends;
  Output out;
};

struct StreamLaunch {
  Form form;
  Family family;
  bool dependent_launch;
  cudaStream_t stream;
};

// One function a rate, each in a file of its own: kHalfBits is twice the bits per weight.
template <int kHalfBits>
cudaError_t launch_stream(const StreamParams& params, const StreamLaunch& launch);

cudaError_t launch_finish(const FinishParams& params, bool dependent_launch, cudaStream_t stream);

}  // namespace exl3
