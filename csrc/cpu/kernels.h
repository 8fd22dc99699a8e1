// The instruction-set dependent pieces of exl3::linear, as a table of function pointers.
#pragma once

#include <cstdint>

#include "cpu/linear.h"

namespace exl3::cpu {

// Activations after the input transform are kept in tile order: within 16 consecutive k, position
// 4 q + s holds row 2 s + {0, 1, 8, 9}[q], so that the four rows a decoded vector needs are
// neighbours.
struct Kernels {
  // Input transform of one 128-block of one row: x * suh, Hadamard (unnormalised), tile order.
  // Elements outside [begin, end) of the block count as zero; x points at element `begin`.
  void (*transform_in)(const void* x, Dtype dtype, int begin, int end, const uint16_t* suh,
                       float* out);
  // Output transform of one 128-block: Hadamard / 128, * svh, + bias, columns [begin, end) stored
  // to y (which points at column `begin` of the block, as does bias).
  void (*transform_out)(const float* rotated, const uint16_t* svh, const void* bias,
                        Dtype bias_dtype, int begin, int end, void* y, Dtype dtype);
  // One row against `tiles` neighbouring tile columns: rotated[16 * tiles] = x . A. `trellis`
  // points at the first tile, rows of tiles are row_words 16-bit words apart.
  void (*gemv[3][17])(const float* x, const uint16_t* trellis, int64_t row_words, int64_t k_tiles,
                      int tiles, float* rotated);
  // Decodes k_tiles tiles of one tile column to vectors, 256 floats a tile, in the order gemm
  // reads.
  void (*decode[3][17])(const uint16_t* trellis, int64_t row_words, int64_t k_tiles, float* panel);
  // Eight decoded tile columns of eight tiles each (`block`, overwritten) to the weight in the
  // original basis, bfloat16: rows [row_begin, row_end) and columns [column_begin, column_end) of
  // the 128 x 128 block, the first of them at `out`.
  void (*rebuild_block)(float* block, const uint16_t* suh, const uint16_t* svh, int row_begin,
                        int row_end, int column_begin, int column_end, uint16_t* out,
                        int64_t out_stride);
  // acc[row][vectors of one tile] += x[row] . panel, for any number of rows.
  void (*gemm)(const float* x, int64_t x_stride, int64_t rows, const float* panel, int64_t k_tiles,
               float* acc);
  // rotated[row * stride + 0..15] = sums of acc[row].
  void (*reduce)(const float* acc, int64_t rows, float* rotated, int64_t stride);
};

inline constexpr int kAccFloats = 64;  // accumulators of one row and one tile column

const Kernels& kernels_portable();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_neon();

}  // namespace exl3::cpu
