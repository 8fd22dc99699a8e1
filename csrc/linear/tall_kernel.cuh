// The product for 32 to 128 rows a tile on sm_90: as gemm_kernel, with what that architecture has.
//
// Warpgroups multiply (`wgmma`), so a scheduler decodes while its tensor core works; bulk copies by
// two warps of their own bring weights and activations, and barriers in shared memory say which
// stages of a ring are full and which are free. Units of work and the order of k are those of
// gemm_kernel, their split among blocks and the end of a segment are not (tall_finish.cuh).
#pragma once

#include <cstdint>

#include "device/bulk.cuh"
#include "device/warpgroup.cuh"
#include "linear/gemm_fetch.cuh"
#include "linear/tall_config.cuh"
#include "linear/tall_finish.cuh"

namespace exl3 {

// The ring of a group in shared memory.
template <class C>
struct TallRing {
  uint32_t stages, full, empty;  // shared addresses

  __device__ __forceinline__ TallRing(uint32_t shared, int group)
      : stages(shared + group * C::kRingBytes),
        full(shared + C::kGroups * C::kRingBytes + C::kSumBytes + group * 2 * C::kStages * 8),
        empty(full + C::kStages * 8) {}
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < C::kStages; ++i) {
      init_barrier(full + 8 * i, 1);
      init_barrier(empty + 8 * i, C::kGroupThreads);
    }
  }
};

// One thread: all stages of a group, in order.
template <class C>
struct TallFetcher : Fetcher<C> {
  using Fetcher<C>::Fetcher;

  __device__ __forceinline__ int steps() const { return min(this->left, C::kStageSteps); }
  __device__ __forceinline__ void fetch_weights(const TallRing<C>& ring, int slot) const {
    announce_bytes(ring.full + 8 * slot, steps() * C::kStepBytes);
    copy_bulk(ring.stages + slot * C::kStageBytes, this->weights, steps() * C::kStepWeightBytes,
              ring.full + 8 * slot);
  }
  __device__ __forceinline__ void fetch_rows(const TallRing<C>& ring, int slot) const {
    copy_bulk(ring.stages + slot * C::kStageBytes + C::kWeightBytes, this->rows,
              steps() * C::kStepRowBytes, ring.full + 8 * slot);
  }
};

template <class C>
__device__ __forceinline__ void fetch_all(const GemmParams& p, const TallRing<C>& ring,
                                          const UnitRange& range) {
  // Weights depend on no other kernel, so the ring fills with them while the transform runs.
  TallFetcher<C> ahead(p, range), fetcher = ahead;
#pragma unroll 1
  for (int i = 0; i < C::kStages && ahead.ready(); ++i, ahead.advance()) {
    ahead.fetch_weights(ring, i);
  }
  await_predecessors();
#pragma unroll 1
  for (int i = 0; i < C::kStages && fetcher.ready(); ++i, fetcher.advance()) {
    fetcher.fetch_rows(ring, i);
  }
  int slot = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (; fetcher.ready(); fetcher.advance()) {
    await_phase(ring.empty + 8 * slot, phase);
    fetcher.fetch_weights(ring, slot);
    fetcher.fetch_rows(ring, slot);
    if (++slot == C::kStages) slot = 0, phase ^= 1;
  }
}

// Decodes one k16 step and starts its product. Two buffers of weights take turns: the product of
// the one that is decoded into is over.
template <class C>
__device__ __forceinline__ void start_step(const LaneState<C>& state,
                                           const DecodeConstants& constants, const uint8_t* weights,
                                           uint64_t rows, uint32_t (&a)[4], Accumulators<C>& acc) {
  await_products<1>();
  TileWords<C> words;
  words.load(state, weights, 0);
  exact_fragment<C::kHalfBits, C::kFamily>(words.run(state, 0), constants, a);
  pin_weights(a);
  begin_products();
  wgmma_m64k16<C::kRowTiles>(acc[0], a, rows);
  commit_products();
}

// The steps of a stage. The last product still runs at the end, those of earlier stages do not.
template <class C>
__device__ __forceinline__ void multiply_stage(const LaneState<C>& state,
                                               const DecodeConstants& constants,
                                               const uint8_t* stage, int steps,
                                               Accumulators<C>& acc) {
  uint32_t a[2][4];
  const uint8_t* weights = stage;
  uint64_t rows = core_matrices(shared_address(stage + C::kWeightBytes));
#pragma unroll 1
  for (; steps >= 2; steps -= 2) {
    start_step<C>(state, constants, weights, rows, a[0], acc);
    start_step<C>(state, constants, weights + C::kStepWeightBytes, rows + (C::kStepRowBytes >> 4),
                  a[1], acc);
    weights += 2 * C::kStepWeightBytes;
    rows += 2 * C::kStepRowBytes >> 4;
  }
  if (steps > 0) {  // the end of a segment; the next stage begins with the same buffer
    start_step<C>(state, constants, weights, rows, a[0], acc);
    await_products<0>();
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
template <class C>
__global__ void tall_kernel(const __grid_constant__ GemmParams p) {}
#else

template <class C>
__global__ void __launch_bounds__(C::kLaunchThreads, 1)
    tall_kernel(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  // The compiler must see that a warp takes one way.
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const bool fetches = warp >= C::kWarps;
  const int group = fetches ? warp - C::kWarps : warp / C::kGroupWarps;
  const TallRing<C> ring(shared_address(shared), group);

  // Later positions are started first, because what finishes a strip waits for positions after it.
  const int position = p.positions - 1 - static_cast<int>(blockIdx.x);
  const int strip_steps = p.k / 16;
  const EvenSplit split = EvenSplit::of(p.strips * strip_steps, p.positions);
  const UnitRange range = split.range(position);
  release_dependents();
  if (fetches && group < C::kGroups && lane == 0) {
    ring.init();
    publish_barriers();
  }
  __syncthreads();

  if (fetches) {
    lower_registers<C::kFetchRegisters>();
    if (group < C::kGroups && lane == 0) fetch_all<C>(p, ring, range);
    if (warp == C::kPublishingWarp) publish_parts<C>(p, split, range, position, lane);
    return;
  }
  raise_registers<C::kRegisters>();
  await_predecessors();
  float* sums = reinterpret_cast<float*>(shared + C::kGroups * C::kRingBytes);
  const uint8_t* stages = shared + group * C::kRingBytes;
  const LaneState<C> state(lane, warp % C::kGroupWarps);
  int slot = 0;
  uint32_t phase = 0;
  Accumulators<C> acc;

#pragma unroll 1
  for (int begin = range.begin; begin < range.end;) {
    const int end = min(range.end, (begin / strip_steps + 1) * strip_steps);
    clear_accumulators<C>(acc);
    int held = -1;  // the stage before, which the last product may still read
    // Every lane says so for itself: the race checker orders no lane's reads by another's arrival.
    const auto free_held = [&] {
      if (held >= 0) arrive(ring.empty + 8 * held);
    };
    const UnitRange share = share_of_group<C>(begin, end, group);
#pragma unroll 1
    for (int done = share.begin; done < share.end; done += C::kStageSteps) {
      await_phase(ring.full + 8 * slot, phase);
      multiply_stage<C>(state, p.constants, stages + slot * C::kStageBytes,
                        min(share.end - done, C::kStageSteps), acc);
      free_held();
      held = slot;
      if (++slot == C::kStages) slot = 0, phase ^= 1;
    }
    await_products<0>();
    pin_accumulators(acc[0]);
    free_held();
    finish_segment<C>(p, split, begin, position, sums, acc, warp, lane);
    begin = end;
  }
}
#endif

}  // namespace exl3
