// Compiles the decoder headers for a device, every codebook and rate. One warp decodes one tile.
#include "format/windows.cuh"

template <class Codebook, int kHalfBits>
__global__ void decode_lanes(const uint32_t* trellis, float* out) {
  using namespace exl3;
  const uint32_t* words = trellis + blockIdx.x * Rate<kHalfBits>::words32;
  const int lane = static_cast<int>(threadIdx.x);
  const LaneRun run = lane_run<kHalfBits>(words, lane);
  for (int j = 0; j < kLaneWeights; ++j) {
    const int position = kLaneWeights * lane + j;
    out[kTileWeights * blockIdx.x + tile_element(position)] =
        Codebook::value(window_of_run<kHalfBits>(run, j));
  }
}

#define DECODE(codebook, half_bits) \
  template __global__ void decode_lanes<exl3::codebook, half_bits>(const uint32_t*, float*);
#define DECODE_WHOLE(codebook)                                                      \
  DECODE(codebook, 2)                                                               \
  DECODE(codebook, 4)                                                               \
  DECODE(codebook, 6) DECODE(codebook, 8) DECODE(codebook, 10) DECODE(codebook, 12) \
      DECODE(codebook, 14) DECODE(codebook, 16)

DECODE_WHOLE(Codebook3inst)
DECODE_WHOLE(CodebookMcg)
DECODE_WHOLE(CodebookMul1)
DECODE(CodebookMul1, 3)
DECODE(CodebookMul1, 5)
DECODE(CodebookMul1, 7)
