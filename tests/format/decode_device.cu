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

template <class Codebook, int... kHalfBits>
void launch_each(const uint32_t* trellis, float* out) {
  (decode_lanes<Codebook, kHalfBits><<<1, exl3::kLanes>>>(trellis, out), ...);
}

void launch_every_codebook_and_rate(const uint32_t* trellis, float* out) {
  launch_each<exl3::Codebook3inst, 2, 4, 6, 8, 10, 12, 14, 16>(trellis, out);
  launch_each<exl3::CodebookMcg, 2, 4, 6, 8, 10, 12, 14, 16>(trellis, out);
  launch_each<exl3::CodebookMul1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16>(trellis, out);
}
