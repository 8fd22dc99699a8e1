// Inputs of the route for few tokens: t = H(v * suh) / sqrt(128) in blocks of 128, rounded once to
// fp16, into shared memory. v is a token for gate and up, and for down what the activation makes of
// the sums that gate and up left.
//
//   [segment of the block's range][row][k16 step][quad lane of 4][register of 2], 4 bytes each
#pragma once

#include <cstdint>

#include "device/hadamard.cuh"
#include "linear/input.cuh"
#include "linear/stream_input.cuh"
#include "moe/moe_stream_route.cuh"

namespace exl3 {

// Sums of kCount strips, of one row each, part by part in the order of k, channels 4 * lane
// onwards. The strips are told apart by lane: lane l % kCount finds the parts of strip(l % kCount).
template <int kCount, class Strip>
__device__ __forceinline__ void add_parts(const MoeStreamSums& from, const MoeStreamWork& work,
                                          const MoeShares& shares, int rows,
                                          const int (&row)[kCount], int lane, Strip&& strip_of,
                                          float (&z)[kCount][4]) {
  const int mine = strip_of(lane % kCount);
  const MoeParts parts = MoeParts::of(work, shares, mine);
  const int stride = rows * 128;
  const float *at[kCount], *ends[kCount];
  int count[kCount], most = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int strip = __shfl_sync(0xFFFFFFFFu, mine, i);
    const int first = __shfl_sync(0xFFFFFFFFu, parts.first, i);
    count[i] = __shfl_sync(0xFFFFFFFFu, parts.count, i);
    const bool goes_on = __shfl_sync(0xFFFFFFFFu, parts.goes_on ? 1 : 0, i) != 0;
    const int channel = row[i] * 128 + 4 * lane;
    at[i] = from.partials + int64_t{first + strip} * stride + channel;
    ends[i] = goes_on ? from.ends + int64_t{strip} * stride + channel : nullptr;
    most = max(most, count[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) z[i][j] = 0.0f;
  }
  const auto add = [&](int i, const float4& v) {
    z[i][0] += v.x, z[i][1] += v.y, z[i][2] += v.z, z[i][3] += v.w;
  };
  const auto load = [](const float* address, bool there) {
    return there ? __ldcg(reinterpret_cast<const float4*>(address))
                 : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  };
  float4 end[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) end[i] = load(ends[i], ends[i] != nullptr);
  constexpr int kBatch = 2;  // of each strip under way at a time
#pragma unroll 1
  for (int part = 0; part < most; part += kBatch) {
    float4 v[kBatch][kCount];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        v[b][i] = load(at[i] + (part + b) * stride, part + b < count[i]);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) add(i, v[b][i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) add(i, end[i]);
}

// Four inputs of down of a row: the activation of gate and up.
__device__ __forceinline__ void activate_sums(const MoeStreamParams& p, const MoeShares& before,
                                              int tile, int expert, int row, int block, int lane,
                                              float (&v)[4]) {
  float both[2][4];
  const int strips = p.before.strips, width = strips * 128, channel = block * 128 + 4 * lane;
  const uint16_t* svh = p.svh + int64_t{expert} * 2 * width + channel;
  const float4 scales[2] = {load_scales(svh), load_scales(svh + width)};
  add_parts<2>(
      p.from, p.before, before, p.ids.rows, {row, row}, lane,
      [&](int half) { return (tile * 2 + half) * strips + block; }, both);
  hadamard_128(both, lane);
  const float gate_scales[4] = {scales[0].x, scales[0].y, scales[0].z, scales[0].w};
  const float up_scales[4] = {scales[1].x, scales[1].y, scales[1].z, scales[1].w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float gate = both[0][j] * kHadamardScale * gate_scales[j];
    const float up = both[1][j] * kHadamardScale * up_scales[j];
    const bool counts = channel + j >= p.inner_begin && channel + j < p.inner_end;
    v[j] = counts ? activate_fast(p.activation, gate, up) : 0.0f;
  }
}

// Four inputs of gate and up of a row: the token.
__device__ __forceinline__ void load_token(const MoeStreamParams& p, int pair, int block, int lane,
                                           float (&v)[4]) {
  load_inputs<4>(p.input, p.by_slots.divide(pair), block * 128 + 4 * lane, v);
  if (p.pair_weights != nullptr) {
    const float weight = __ldg(p.pair_weights + pair);
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] *= weight;
  }
}

// Brings near what no kernel writes and the routing decides: the scales that down will want.
__device__ __forceinline__ void prefetch_scales(const MoeStreamParams& p, const MoeRoute& route) {
  const int k = p.work.steps * 16, units = p.work.strips * p.work.steps;
#pragma unroll 1
  for (int tile = route.first_segment; tile * units < route.end; ++tile) {
    const int64_t expert = route.expert[tile];
    // Lines of 64 scales: svh of gate and of up, then suh.
#pragma unroll 1
    for (int at = 64 * thread_index(); at < 3 * k; at += 64 * 32 * kStreamWarps) {
      prefetch_l2(at < 2 * k ? p.svh + expert * 2 * k + at : p.suh + expert * k + at - 2 * k);
    }
  }
}

// The inputs of the block's range, by all warps: a warp makes a block of 128 of a row at a time.
__device__ __forceinline__ void make_inputs(const MoeStreamParams& p, const MoeRoute& route,
                                            uint8_t* inputs) {
  const int begin = route.begin, end = route.end, first_segment = route.first_segment;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const int blocks = p.work.steps / 8, k = p.work.steps * 16;
  const int units = p.work.strips * p.work.steps;  // of a segment
  const int row_bytes = moe_stream_row_bytes(k);
  // Pair q of a step is register q / 4 of quad lane q % 4.
  const int q = 2 * (lane % 4);
  uint8_t* to = inputs + (lane / 4) * 32 + (q % 4) * 8 + (q / 4) * 4;
  const MoeShares before = MoeShares::of(p.before, route.tiles);
  int dealt = 0;
#pragma unroll 1
  for (int segment = first_segment; segment * units < end; ++segment) {
    const int low = max(begin - segment * units, 0), high = min(end - segment * units, units);
    // A range of less than a strip needs no more inputs than it has steps.
    int first = low / 8, count = (high + 7) / 8 - first;
    first -= p.work.by_steps.divide(low) * blocks;
    if (count >= blocks) first = 0, count = blocks;
    const int tile = p.work.tile_of(segment);
    const int half = p.work.halves == 2 ? segment & 1 : 0;
    const int expert = route.expert[tile], rows = route.rows[tile];
    const uint16_t* suh = p.suh + (int64_t{expert} * p.work.halves + half) * k + 4 * lane;
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
#pragma unroll 1
      for (int i = (warp - dealt) & (kStreamWarps - 1); i < count; i += kStreamWarps) {
        int block = first + i;
        if (block >= blocks) block -= blocks;
        const uint2 raw = __ldg(reinterpret_cast<const uint2*>(suh + block * 128));
        float v[4];
        if (p.down) {
          activate_sums(p, before, tile, expert, row, block, lane, v);
        } else {
          load_token(p, route.pair[tile * p.ids.rows + row], block, lane, v);
        }
        const float2 low_scales = unpack_pair(raw.x, false),
                     high_scales = unpack_pair(raw.y, false);
        v[0] *= low_scales.x, v[1] *= low_scales.y, v[2] *= high_scales.x, v[3] *= high_scales.y;
        hadamard_128(v, lane);
        auto* step = reinterpret_cast<uint32_t*>(
            to + ((segment - first_segment) * p.ids.rows + row) * row_bytes + block * 256);
        step[0] = rounded_pair(v[0], v[1]);
        step[2] = rounded_pair(v[2], v[3]);
      }
      dealt += count;
    }
  }
}

}  // namespace exl3
