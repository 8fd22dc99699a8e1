// Bulk copies to shared memory: one thread starts a copy of any length, a barrier in shared memory
// counts its bytes. From sm_90 on; elsewhere these do nothing.
#pragma once

#include <cstdint>

namespace exl3 {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define EXL3_SM90(...) asm volatile(__VA_ARGS__)
#else
#define EXL3_SM90(...)
#endif

// A barrier whose phase is complete after so many arrivals and the bytes that they announce.
__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
  EXL3_SM90("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// New barriers are there for copies too, once a barrier of the threads has followed.
__device__ __forceinline__ void publish_barriers() {
  EXL3_SM90("fence.mbarrier_init.release.cluster;" :: : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  EXL3_SM90("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// An arrival; so many bytes are on their way or will be.
__device__ __forceinline__ void announce_bytes(uint32_t barrier, uint32_t bytes) {
  EXL3_SM90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
            "r"(bytes) : "memory");
}
// Waits until phase `parity` of a barrier is complete.
__device__ __forceinline__ void await_phase(uint32_t barrier, uint32_t parity) {
  EXL3_SM90(
      "{\n"
      ".reg .pred done;\n"
      "again%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again%=;\n"
      "}" ::"r"(barrier),
      "r"(parity) : "memory");
}

// Copies a multiple of 16 bytes, which the barrier counts as they arrive.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier) {
  EXL3_SM90(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

}  // namespace exl3
