// The experts' product by warpgroups: parts of up to 256 rows of one expert times its matrices.
//
// As tall_kernel: warpgroups decode weights into registers and multiply (`wgmma`), one thread
// fetches by bulk copies, barriers in shared memory say which stages are full and which are free. A
// thread block takes a whole strip of outputs of a part at a time, so no sums are exchanged and a
// row's do not depend on the batch. Who takes which is decided while it runs: parts differ.
#pragma once

#include <cstdint>

#include "device/bulk.cuh"
#include "device/warpgroup.cuh"
#include "linear/gemm_multiply.cuh"
#include "moe/moe_tall_config.cuh"
#include "moe/moe_tall_finish.cuh"

namespace exl3 {

// The ring in shared memory and where its user is.
template <class C>
struct MoeTallRing {
  uint8_t* shared;
  uint32_t stages, barriers;  // shared addresses
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ explicit MoeTallRing(uint8_t* base)
      : shared(base), stages(shared_address(base)), barriers(stages + C::kBarriersAt) {}
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < C::kStages; ++i) {
      init_barrier(barriers + 8 * i, 1);
      init_barrier(barriers + 8 * (C::kStages + i), C::kThreads);
    }
  }
  // Of a stage the weights come first, then the rows.
  __device__ __forceinline__ uint32_t stage() const { return stages + slot * C::kStageBytes; }
  __device__ __forceinline__ const uint8_t* weights() const {
    return shared + slot * C::kStageBytes;
  }
  __device__ __forceinline__ uint32_t full() const { return barriers + 8 * slot; }
  __device__ __forceinline__ void await_full() const { await_phase(full(), phase); }
  // All stages are empty at the start.
  __device__ __forceinline__ void await_empty() const {
    await_phase(barriers + 8 * (C::kStages + slot), phase ^ 1);
  }
  // Every lane says so for itself, as in tall_kernel.
  __device__ __forceinline__ void release(int freed) const {
    arrive(barriers + 8 * (C::kStages + freed));
  }
  __device__ __forceinline__ void advance() {
    if (++slot == C::kStages) slot = 0, phase ^= 1;
  }
  __device__ __forceinline__ MoePiece& piece(int number) const {
    return reinterpret_cast<MoePiece*>(shared + C::kPiecesAt)[number % C::kPieces];
  }
};

// One thread: takes items until there are none, and fetches all stages of their pieces in order.
template <class C>
__device__ __forceinline__ void fetch_pieces(const MoeTallParams& p, MoeTallRing<C>& ring) {
  const int items = __ldcg(p.list_count) * p.strips;
  int number = 0;
#pragma unroll 1
  for (int item = blockIdx.x; item < items;) {
    const int at = p.by_strips.divide(item);
    const int4 raw = __ldcg(reinterpret_cast<const int4*>(p.list) + at);
    const MoeTile entry{raw.x, raw.y, raw.z, raw.w};
    const int next = static_cast<int>(gridDim.x + atomicAdd(p.taken, 1u));
    const int rows_of_expert = __ldcg(p.counts + entry.expert);
    // The parts of an expert take turns inside a strip, so that they find its weights in the L2.
    const int local = item - entry.first * p.strips;
    const int strip = entry.count == 1 ? local : local / entry.count;
    const int index = local - strip * entry.count;
    const int all = (rows_of_expert + kMoeTallTile - 1) / kMoeTallTile;
    const int begin = part_begin(all, entry.count, index);
    const int tiles = part_begin(all, entry.count, index + 1) - begin;
    const int first = entry.tile + begin;
    const uint32_t row_bytes = C::kStageSteps * tiles * (kMoeTallTile * 32);
#pragma unroll 1
    for (int half = 0; half < (p.pair ? 2 : 1); ++half, ++number) {
      const int64_t word = __ldg(reinterpret_cast<const long long*>(
          (half == 0 ? p.table[0] : p.table[1]) + int64_t{entry.expert} * 2));
      const uint8_t* weights =
          p.weights + 2 * word + int64_t{strip} * (p.k / 16) * C::kStepWeightBytes;
      const uint8_t* rows =
          (half == 0 ? p.image[0] : p.image[1]) + int64_t{first} * kMoeTallTile * 2 * p.k;
#pragma unroll 1
      for (int k = 0; k < p.k; k += 16 * C::kStageSteps) {
        const uint32_t full = ring.full();
        ring.await_empty();
        if (k == 0) {
          MoePiece& piece = ring.piece(number);
          piece.strip = strip, piece.first = first, piece.tiles = tiles;
          piece.rows = min(rows_of_expert - begin * kMoeTallTile, tiles * kMoeTallTile);
          const uint32_t suh_bytes = p.pair && half == 1 ? 256 : 0;
          const uint32_t pair_bytes = p.pair ? 0 : tiles * (kMoeTallTile * 4);
          announce_bytes(full, C::kWeightBytes + row_bytes + 256 + suh_bytes + pair_bytes);
          copy_bulk(shared_address(piece.svh),
                    (half == 0 ? p.svh[0] : p.svh[1]) + entry.expert * p.svh_stride + strip * 128,
                    256, full);
          if (suh_bytes > 0) {
            copy_bulk(shared_address(piece.next_suh),
                      p.next_suh + (int64_t{entry.expert} * p.strips + strip) * 128, suh_bytes,
                      full);
          }
          if (pair_bytes > 0) {
            copy_bulk(shared_address(piece.row_pair), p.row_pair + first * kMoeTallTile, pair_bytes,
                      full);
          }
        } else {
          announce_bytes(full, C::kWeightBytes + row_bytes);
        }
        copy_bulk(ring.stage(), weights, C::kWeightBytes, full);
        copy_bulk(ring.stage() + C::kWeightBytes, rows, row_bytes, full);
        weights += C::kWeightBytes;
        rows += row_bytes;
        ring.advance();
      }
    }
    item = next;
  }
  ring.await_empty();
  ring.piece(number).strip = -1;
  arrive(ring.full());
}

template <class C>
using TallAccumulators = float[C::kRowTiles][4];

// The weights of a stage, decoded.
template <class C>
using StageWeights = uint32_t[C::kStageSteps][4];

// The products of a stage with kRowTiles octets of rows, the first ones of acc.
template <class C, int kRowTiles>
__device__ __forceinline__ void start_products(const StageWeights<C>& a, uint64_t rows,
                                               TallAccumulators<C>& acc) {
  constexpr int kRowStep = kRowTiles * 256 >> 4;  // in the units of a descriptor
  begin_products();
#pragma unroll
  for (int step = 0; step < C::kStageSteps; ++step) {
    wgmma_m64k16<kRowTiles>(acc, a[step], rows + step * kRowStep);
  }
  commit_products();
}

// One piece, stage by stage: the weights of a stage are decoded while the products of the one
// before run.
template <class C>
__device__ __forceinline__ void multiply_piece(const MoeTallParams& p, MoeTallRing<C>& ring,
                                               const LaneState<C>& state, int tiles,
                                               TallAccumulators<C>& acc) {
  StageWeights<C> a[2];
  // The slots of the two stages before: products of the last one may still read it.
  int last = -1, before = -1;
#pragma unroll 1
  for (int k = 0; k < p.k; k += 2 * 16 * C::kStageSteps) {
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      ring.await_full();
      await_products<1>();
      if (before >= 0) ring.release(before);
      const uint8_t* weights = ring.weights();
      const uint64_t rows = core_matrices(ring.stage() + C::kWeightBytes);
      TileWords<C> words[C::kStageSteps];
#pragma unroll
      for (int step = 0; step < C::kStageSteps; ++step) {
        words[step].load(state, weights + step * C::kStepWeightBytes, 0);
      }
#pragma unroll
      for (int step = 0; step < C::kStageSteps; ++step) {
        exact_fragment<C::kHalfBits, C::kFamily>(words[step].run(state, 0), p.constants,
                                                 a[turn][step]);
      }
#pragma unroll
      for (int step = 0; step < C::kStageSteps; ++step) pin_weights(a[turn][step]);
      switch (tiles) {
        case 1:
          start_products<C, 8>(a[turn], rows, acc);
          break;
        case 2:
          start_products<C, 16>(a[turn], rows, acc);
          break;
        case 3:
          start_products<C, 24>(a[turn], rows, acc);
          break;
        default:
          start_products<C, 32>(a[turn], rows, acc);
          break;
      }
      before = last;
      last = ring.slot;
      ring.advance();
    }
  }
  await_products<0>();
  pin_accumulators(acc);
  ring.release(before);
  ring.release(last);
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
  MoeTallRing<C> ring(shared);
  release_dependents();
  if (threadIdx.x == C::kThreads) {
    ring.init();
    publish_barriers();
  }
  __syncthreads();
  if (warp >= C::kWarps) {
    lower_registers<C::kFetchRegisters>();
    if (threadIdx.x == C::kThreads) {
      await_predecessors();
      fetch_pieces<C>(p, ring);
    }
    return;
  }
  raise_registers<C::kRegisters>();
  await_predecessors();
  const LaneState<C> state(lane, warp);
  auto* sums = reinterpret_cast<float*>(shared + C::kSumsAt);
  TallAccumulators<C> acc;
  int half = 0;
#pragma unroll 1
  for (int number = 0;; ++number) {
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[r][i] = 0.0f;
    }
    ring.await_full();
    const MoePiece& piece = ring.piece(number);
    if (__shfl_sync(0xFFFFFFFFu, piece.strip, 0) < 0) break;
    multiply_piece<C>(p, ring, state, __shfl_sync(0xFFFFFFFFu, piece.tiles, 0), acc);
    finish_piece<C>(p, piece, half, sums, acc, warp, lane);
    half = p.pair ? half ^ 1 : 0;
  }
}
#endif

}  // namespace exl3
