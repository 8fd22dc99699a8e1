// The experts' product by warpgroups: parts of up to 256 rows of one expert times its matrices.
//
// As tall_kernel: warpgroups decode weights into registers and multiply (`wgmma`), one thread
// fetches by bulk copies, barriers in shared memory say which stages are full and which are free. A
// thread block takes whole strips of outputs, one after the other, so no sums are exchanged and a
// row's do not depend on the batch.
#pragma once

#include <cstdint>

#include "device/bulk.cuh"
#include "device/warpgroup.cuh"
#include "linear/gemm_multiply.cuh"
#include "moe/moe_tall_config.cuh"
#include "moe/moe_tall_finish.cuh"

namespace exl3 {

template <class C>
struct MoeTallRing {
  uint8_t* shared;
  uint32_t stages, full, empty;  // shared addresses

  __device__ __forceinline__ explicit MoeTallRing(uint8_t* base)
      : shared(base),
        stages(shared_address(base)),
        full(stages + C::kRingBytes + C::kSumBytes + C::kPieces * C::kPieceBytes),
        empty(full + C::kStages * 8) {}
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < C::kStages; ++i) {
      init_barrier(full + 8 * i, 1);
      init_barrier(empty + 8 * i, C::kThreads);
    }
  }
  __device__ __forceinline__ float* sums() const {
    return reinterpret_cast<float*>(shared + C::kRingBytes);
  }
  __device__ __forceinline__ MoePiece& piece(int index) const {
    return reinterpret_cast<MoePiece*>(shared + C::kRingBytes + C::kSumBytes)[index % C::kPieces];
  }
};

// One thread: all stages of all pieces of the block, in order.
template <class C>
__device__ __forceinline__ void fetch_pieces(const MoeTallParams& p, const MoeTallRing<C>& ring,
                                             int items) {
  static_assert(sizeof(MoePiece) == C::kPieceBytes);
  const int stages = p.k / (16 * C::kStageSteps);
  int slot = 0, number = 0;
  uint32_t phase = 1;  // all stages are empty at the start
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int at = p.by_strips.divide(item);
    const int4 raw = __ldcg(reinterpret_cast<const int4*>(p.list) + at);
    const MoeTile entry{raw.x, raw.y, raw.z, raw.w};
    const int rows_of_expert = __ldcg(p.counts + entry.expert);
    // The parts of an expert take turns inside a strip, so that they find its weights in the L2.
    const int local = item - entry.first * p.strips;
    const int strip = entry.count == 1 ? local : local / entry.count;
    const int index = local - strip * entry.count;
    const int tiles_of_expert = (rows_of_expert + kMoeTallTile - 1) / kMoeTallTile;
    const int begin = part_begin(tiles_of_expert, entry.count, index);
    const int tiles = part_begin(tiles_of_expert, entry.count, index + 1) - begin;
    const int first = entry.tile + begin;
    const uint32_t row_bytes = C::kStageSteps * tiles * (kMoeTallTile * 32);
#pragma unroll 1
    for (int half = 0; half < (p.pair ? 2 : 1); ++half, ++number) {
      const int64_t word = __ldg(reinterpret_cast<const long long*>(
          (half == 0 ? p.table[0] : p.table[1]) + int64_t{entry.expert} * 2));
      const uint8_t* weights =
          p.weights + 2 * word + int64_t{strip} * (p.k / 16) * C::kStepWeightBytes;
      const uint8_t* rows = (half == 0 ? p.image[0] : p.image[1]) +
                            int64_t{first} * kMoeTallTile * 2 * p.k;
      const bool scaled = p.pair && half == 1;
#pragma unroll 1
      for (int stage = 0; stage < stages; ++stage) {
        const uint32_t to = ring.stages + slot * C::kStageBytes, full = ring.full + 8 * slot;
        await_phase(ring.empty + 8 * slot, phase);
        uint32_t bytes = C::kWeightBytes + row_bytes;
        if (stage == 0) {
          MoePiece& piece = ring.piece(number);
          piece.strip = strip, piece.first = first, piece.tiles = tiles;
          piece.rows = min(rows_of_expert - begin * kMoeTallTile, tiles * kMoeTallTile);
          const uint32_t pairs = p.pair ? 0 : tiles * (kMoeTallTile * 4);
          announce_bytes(full, bytes + 256 + (scaled ? 256 : 0) + pairs);
          copy_bulk(shared_address(piece.svh),
                    (half == 0 ? p.svh[0] : p.svh[1]) + entry.expert * p.svh_stride + strip * 128,
                    256, full);
          if (scaled) {
            copy_bulk(shared_address(piece.next_suh),
                      p.next_suh + (int64_t{entry.expert} * p.strips + strip) * 128, 256, full);
          }
          if (pairs > 0) {
            copy_bulk(shared_address(piece.row_pair), p.row_pair + first * kMoeTallTile, pairs,
                      full);
          }
        } else {
          announce_bytes(full, bytes);
        }
        copy_bulk(to, weights, C::kWeightBytes, full);
        copy_bulk(to + C::kWeightBytes, rows, row_bytes, full);
        weights += C::kWeightBytes;
        rows += row_bytes;
        if (++slot == C::kStages) slot = 0, phase ^= 1;
      }
    }
  }
}

template <class C>
using TallAccumulators = float[C::kRowTiles][4];

// Where a block is in its ring.
struct MoeTallPlace {
  int slot = 0;
  uint32_t phase = 0;
};

// Two steps' products of kRowTiles octets of rows, the first ones of acc.
template <class C, int kRowTiles>
__device__ __forceinline__ void start_two(const uint32_t (&a)[2][4], uint64_t rows, int step,
                                          TallAccumulators<C>& acc) {
  constexpr int kRowStep = kRowTiles * 256 >> 4;  // in the units of a descriptor
  begin_products();
  wgmma_m64k16<kRowTiles>(acc, a[0], rows + step * kRowStep);
  wgmma_m64k16<kRowTiles>(acc, a[1], rows + (step + 1) * kRowStep);
  commit_products();
}

// One piece. Two steps at a time: their weights are decoded while the products of the two before
// run.
template <class C>
__device__ __forceinline__ void multiply_piece(const MoeTallRing<C>& ring,
                                               const LaneState<C>& state,
                                               const DecodeConstants& constants, int stages,
                                               int tiles, MoeTallPlace& place,
                                               TallAccumulators<C>& acc) {
  uint32_t a[2][2][4];
  int held = -1;  // the stage before, which the last products may still read
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    await_phase(ring.full + 8 * place.slot, place.phase);
    const uint8_t* weights = ring.shared + place.slot * C::kStageBytes;
    const uint64_t rows = core_matrices(ring.stages + place.slot * C::kStageBytes +
                                        C::kWeightBytes);
#pragma unroll
    for (int two = 0; two < C::kStageSteps / 2; ++two) {
      await_products<1>();
      // Every lane says so for itself, as in tall_kernel.
      if (two == 1 && held >= 0) arrive(ring.empty + 8 * held);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        TileWords<C> words;
        words.load(state, weights + (2 * two + i) * C::kStepWeightBytes, 0);
        exact_fragment<C::kHalfBits, C::kFamily>(words.run(state, 0), constants, a[two][i]);
      }
      pin_weights(a[two][0]);
      pin_weights(a[two][1]);
      switch (tiles) {
        case 1: start_two<C, 8>(a[two], rows, 2 * two, acc); break;
        case 2: start_two<C, 16>(a[two], rows, 2 * two, acc); break;
        case 3: start_two<C, 24>(a[two], rows, 2 * two, acc); break;
        default: start_two<C, 32>(a[two], rows, 2 * two, acc); break;
      }
    }
    held = place.slot;
    if (++place.slot == C::kStages) place.slot = 0, place.phase ^= 1;
  }
  await_products<0>();
  pin_accumulators(acc);
  arrive(ring.empty + 8 * held);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
template <class C>
__global__ void moe_tall_kernel(const __grid_constant__ MoeTallParams p) {}
#else

template <class C>
__global__ void __launch_bounds__(C::kLaunchThreads, 1)
    moe_tall_kernel(const __grid_constant__ MoeTallParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  // The compiler must see that a warp takes one way.
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const MoeTallRing<C> ring(shared);
  release_dependents();
  if (threadIdx.x == C::kThreads) {
    ring.init();
    publish_barriers();
  }
  __syncthreads();
  await_predecessors();
  const int items = __ldcg(p.list_count) * p.strips;
  if (warp >= C::kWarps) {
    lower_registers<C::kFetchRegisters>();
    if (threadIdx.x == C::kThreads) fetch_pieces<C>(p, ring, items);
    return;
  }
  raise_registers<C::kRegisters>();
  const LaneState<C> state(lane, warp);
  const int stages = p.k / (16 * C::kStageSteps);
  MoeTallPlace place;
  TallAccumulators<C> acc;
  int number = 0;
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
#pragma unroll 1
    for (int half = 0; half < (p.pair ? 2 : 1); ++half, ++number) {
#pragma unroll
      for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[r][i] = 0.0f;
      }
      await_phase(ring.full + 8 * place.slot, place.phase);
      const MoePiece& piece = ring.piece(number);
      const int tiles = __shfl_sync(0xFFFFFFFFu, piece.tiles, 0);
      multiply_piece<C>(ring, state, p.constants, stages, tiles, place, acc);
      finish_piece<C>(p, piece, half, ring.sums(), acc, warp, lane);
    }
  }
}
#endif

}  // namespace exl3
