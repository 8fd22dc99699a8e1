// Activations as a layer wants them, where something stands before it that is not worth a kernel of
// its own at few rows: the residual with an RMS norm, or a gated activation. Roundings are those of
// the operators that they stand for: wherever a tensor of x's type would have been.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "linear/input.cuh"

namespace exl3 {

// Calls f with whether the type is bfloat16 as a constant: one straight piece of code each.
template <class F>
__device__ __forceinline__ void with_bfloat16(Dtype dtype, F&& f) {
  if (dtype == Dtype::kBfloat16) {
    f(std::true_type{});
  } else {
    f(std::false_type{});
  }
}

template <bool kBfloat16>
__device__ __forceinline__ uint32_t pack_pair(float a, float b) {
  if constexpr (kBfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

template <bool kBfloat16>
__device__ __forceinline__ void round_pair(float& a, float& b) {
  const float2 pair = unpack_pair(pack_pair<kBfloat16>(a, b), kBfloat16);
  a = pair.x, b = pair.y;
}

// Eight values, rounded.
__device__ __forceinline__ uint4 pack_8(Dtype dtype, const float (&v)[8]) {
  uint4 packed;
  with_bfloat16(dtype, [&](auto bfloat16) {
    constexpr bool kBfloat16 = decltype(bfloat16)::value;
    packed = make_uint4(pack_pair<kBfloat16>(v[0], v[1]), pack_pair<kBfloat16>(v[2], v[3]),
                        pack_pair<kBfloat16>(v[4], v[5]), pack_pair<kBfloat16>(v[6], v[7]));
  });
  return packed;
}

// Stores eight values from `column` of a row of `columns`, those that are inside.
__device__ __forceinline__ void store_8(void* row, Dtype dtype, int column, int columns,
                                        const float (&v)[8]) {
  const uint4 packed = pack_8(dtype, v);
  uint16_t* to = static_cast<uint16_t*>(row) + column;
  if (column + 8 <= columns && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    *reinterpret_cast<uint4*>(to) = packed;
    return;
  }
  const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < columns) to[i] = static_cast<uint16_t>(pairs[i / 2] >> 16 * (i % 2));
  }
}

// x + residual in fp32.
template <int kCount>
__device__ __forceinline__ void load_sums(const Input& in, const Prologue& p, int64_t row,
                                          int first, float (&v)[kCount]) {
  const Input residual{p.residual, p.residual_stride, in.dtype, in.k_begin, in.k_in};
  float r[kCount];
  load_inputs<kCount>(in, row, first, v);
  load_inputs<kCount>(residual, row, first, r);
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] += r[i];
}

// 1 / sqrt(mean of the squares of x + residual + epsilon) of a row, by all kWarps warps of a block,
// always in the same order. `store` says whether this block stores the sum. `meet` is shared
// memory; a barrier must come before it is used again.
template <int kWarps>
__device__ __forceinline__ float norm_factor(const Input& in, const Prologue& p, int64_t row,
                                             bool store, float* meet) {
  float squares = 0.0f;
#pragma unroll 1
  for (int column = 8 * threadIdx.x; column < in.k_in; column += 8 * 32 * kWarps) {
    float v[8];
    load_sums<8>(in, p, row, in.k_begin + column, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) squares = fmaf(v[i], v[i], squares);
    if (store) {
      store_8(static_cast<uint16_t*>(p.sum) + row * in.k_in, in.dtype, column, in.k_in, v);
    }
  }
#pragma unroll 1
  for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, d);
  if (threadIdx.x % 32 == 0) meet[threadIdx.x / 32] = squares;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += meet[w];
  return rsqrtf(sum / static_cast<float>(in.k_in) + p.epsilon);
}

// The norm of sums, in place.
template <int kCount>
__device__ __forceinline__ void normalise(const Input& in, const Prologue& p, float factor,
                                          int first, float (&v)[kCount]) {
  float w[kCount];
  const bool fp32_weight = p.weight_dtype == Dtype::kFloat32;
  if (fp32_weight) {
    const auto* weight = static_cast<const float*>(p.weight) + (first - in.k_begin);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool inside = first + i >= in.k_begin && first + i < in.k_begin + in.k_in;
      w[i] = inside ? __ldg(weight + i) : 0.0f;
    }
  } else {
    load_inputs<kCount>({p.weight, 0, in.dtype, in.k_begin, in.k_in}, 0, first, w);
  }
  with_bfloat16(in.dtype, [&](auto bfloat16) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      v[i] *= factor, v[i + 1] *= factor;
      if (!fp32_weight) round_pair<decltype(bfloat16)::value>(v[i], v[i + 1]);
      v[i] *= w[i], v[i + 1] *= w[i + 1];
      round_pair<decltype(bfloat16)::value>(v[i], v[i + 1]);
    }
  });
}

// silu(gate) * up.
template <int kCount>
__device__ __forceinline__ void load_gated(const Input& in, const Prologue& p, int64_t row,
                                           int first, float (&v)[kCount]) {
  Input up = in;
  up.x = static_cast<const uint16_t*>(in.x) + p.up;
  float u[kCount];
  load_inputs<kCount>(in, row, first, v);
  load_inputs<kCount>(up, row, first, u);
  with_bfloat16(in.dtype, [&](auto bfloat16) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      v[i] = __fdividef(v[i], 1.0f + __expf(-v[i]));
      v[i + 1] = __fdividef(v[i + 1], 1.0f + __expf(-v[i + 1]));
      round_pair<decltype(bfloat16)::value>(v[i], v[i + 1]);
      v[i] *= u[i], v[i + 1] *= u[i + 1];
      round_pair<decltype(bfloat16)::value>(v[i], v[i + 1]);
    }
  });
}

// Inputs first to first + kCount - 1 of a row as the layer wants them, as load_inputs; `factor` is
// that of the norm.
template <int kCount>
__device__ __forceinline__ void load_prepared(const Input& in, const Prologue& p, float factor,
                                              int64_t row, int first, float (&v)[kCount]) {
  if (p.kind == PrologueKind::kNone) {
    load_inputs<kCount>(in, row, first, v);
  } else if (p.kind == PrologueKind::kNorm) {
    load_sums<kCount>(in, p, row, first, v);
    normalise<kCount>(in, p, factor, first, v);
  } else {
    load_gated<kCount>(in, p, row, first, v);
  }
}

}  // namespace exl3
