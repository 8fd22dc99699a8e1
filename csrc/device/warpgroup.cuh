// Products of a warpgroup (four warps): 64 channels by 16 inputs of weights, decoded into registers
// in the order of m16n8k16, times all rows of a tile, which the tensor core reads from shared
// memory itself. For sm_90a alone.
//
// `mma.sync` holds its scheduler up for 6 cycles a product on sm_90, whatever is interleaved with
// it. `wgmma` runs while its warp goes on, and beside decoding costs a scheduler half of that.
#pragma once

#include <cstdint>

namespace exl3 {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "code for compute capability 9.0 must be compiled for sm_90a, which has wgmma"
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define EXL3_WGMMA(...) asm volatile(__VA_ARGS__)
#else
#define EXL3_WGMMA(...)
#endif

// Registers of each thread from here on, a multiple of 8; all warps of a warpgroup say so.
template <int kCount>
__device__ __forceinline__ void raise_registers() {
  EXL3_WGMMA("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void lower_registers() {
  EXL3_WGMMA("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Registers and shared memory that products read were written before this.
__device__ __forceinline__ void begin_products() {
  EXL3_WGMMA("wgmma.fence.sync.aligned;" :: : "memory");
}
__device__ __forceinline__ void commit_products() {
  EXL3_WGMMA("wgmma.commit_group.sync.aligned;" :: : "memory");
}
// At most kPending committed groups of products still run.
template <int kPending>
__device__ __forceinline__ void await_products() {
  EXL3_WGMMA("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from touching accumulators before this point.
template <int kRowTiles>
__device__ __forceinline__ void pin_accumulators(float (&acc)[kRowTiles][4]) {
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) EXL3_WGMMA("" : "+f"(acc[r][i])::"memory");
  }
}

// The weights are made before this point.
__device__ __forceinline__ void pin_weights(uint32_t (&a)[4]) {
  EXL3_WGMMA("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// Where the activations of one k16 step lie in shared memory: core matrices of 8 rows x 8 inputs,
// 128 contiguous bytes each; the two along the inputs are neighbours, then the next 8 rows.
__device__ __forceinline__ uint64_t core_matrices(uint32_t shared_bytes) {
  constexpr uint64_t kNextInputs = 128 >> 4, kNextRows = 256 >> 4;
  return uint64_t{(shared_bytes & 0x3FFFF) >> 4} | kNextInputs << 16 | kNextRows << 32;
}

#define EXL3_D4(d, r) "+f"(d[r][0]), "+f"(d[r][1]), "+f"(d[r][2]), "+f"(d[r][3])
#define EXL3_D16(d, r) EXL3_D4(d, r), EXL3_D4(d, r + 1), EXL3_D4(d, r + 2), EXL3_D4(d, r + 3)
#define EXL3_D32(d, r) EXL3_D16(d, r), EXL3_D16(d, r + 4)
#define EXL3_D64(d, r) EXL3_D32(d, r), EXL3_D32(d, r + 8)
#define EXL3_A4(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
// Names of the operands: 32 accumulators from the first, the second and so on.
#define EXL3_N32_0                                         \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define EXL3_N32_1                                                   \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define EXL3_N32_2                                                   \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define EXL3_N32_3                                                               \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// D[64 channels, 8 * kRowTiles rows] += A[64, 16] * B[16, rows]; fp16 operands, fp32 accumulators,
// the first ones of d. A warp holds 16 channels, its registers in the order of m16n8k16.
template <int kRowTiles, int kAll>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[kAll][4], const uint32_t (&a)[4],
                                             uint64_t rows) {
  static_assert(kRowTiles <= kAll);
  static_assert(kRowTiles == 4 || kRowTiles == 8 || kRowTiles == 16 || kRowTiles == 24 ||
                kRowTiles == 32);
  if constexpr (kRowTiles == 4) {
    EXL3_WGMMA(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, "
        "0;" : EXL3_D16(d, 0) : EXL3_A4(a),
        "l"(rows));
  } else if constexpr (kRowTiles == 8) {
    EXL3_WGMMA("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" EXL3_N32_0
               "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;" : EXL3_D32(d, 0) : EXL3_A4(a),
               "l"(rows));
  } else if constexpr (kRowTiles == 16) {
    EXL3_WGMMA("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" EXL3_N32_0 "," EXL3_N32_1
               "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;" : EXL3_D64(d, 0) : EXL3_A4(a),
               "l"(rows));
  } else if constexpr (kRowTiles == 24) {
    EXL3_WGMMA("wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" EXL3_N32_0 "," EXL3_N32_1
               "," EXL3_N32_2 "}, {%96,%97,%98,%99}, %100, 1, 1, 1, 0;" : EXL3_D64(d, 0),
               EXL3_D32(d, 16) : EXL3_A4(a), "l"(rows));
  } else {
    EXL3_WGMMA("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" EXL3_N32_0 "," EXL3_N32_1
               "," EXL3_N32_2 "," EXL3_N32_3
               "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 0;" : EXL3_D64(d, 0),
               EXL3_D64(d, 16) : EXL3_A4(a), "l"(rows));
  }
}

#undef EXL3_D4
#undef EXL3_D16
#undef EXL3_D32
#undef EXL3_D64
#undef EXL3_A4
#undef EXL3_N32_0
#undef EXL3_N32_1
#undef EXL3_N32_2
#undef EXL3_N32_3

}  // namespace exl3
