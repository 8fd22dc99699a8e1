// Kernels that decode some tiles and do nothing else, for counting instructions: every rate, family
// and form of csrc/device/decode.cuh. What a kernel of four tiles has more than one of two, loads
// and stores aside, is what two tiles cost.
#include "device/decode.cuh"

using namespace exl3;

template <int kHalfBits, Family kFamily, Form kForm, int kTiles>
__device__ __forceinline__ void decode_tiles(const uint32_t* words, uint4* out,
                                             const DecodeConstants& constants) {
  constexpr int kWords = Rate<kHalfBits>::words32;
  constexpr bool kThree = Rate<kHalfBits>::lane_words == 3;
  const LaneWords<kHalfBits> lane(static_cast<int>(threadIdx.x));
  // Three addresses, so that every load has a constant offset, as it has in the kernels.
  const uint32_t* last = words + lane.last;
  const uint32_t* previous = words + lane.previous;
  const uint32_t* before = words + lane.before;
  out += threadIdx.x;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int at = tile * kWords;
    const AlignedRun run =
        align_run<kHalfBits>(last[at], previous[at], kThree ? before[at] : 0u, lane.shift);
    uint32_t a[4], b[4];
    if constexpr (kForm == Form::kExact) {
      exact_fragment<kHalfBits, kFamily>(run, constants, a);
    } else if constexpr (kFamily == Family::kByteSum) {
      byte_sum_fragment<kHalfBits>(run, constants, a);
    } else {
      two_term_fragment<kHalfBits>(run, constants, a, b);
      out[(2 * tile + 1) * kLanes] = make_uint4(b[0], b[1], b[2], b[3]);
    }
    out[2 * tile * kLanes] = make_uint4(a[0], a[1], a[2], a[3]);
  }
}

#define EXL3_PROBE(half_bits, family, form, tiles)                                              \
  extern "C" __global__ void probe_##half_bits##_##family##_##form##_##tiles(                   \
      const uint32_t* __restrict__ words, uint4* __restrict__ out, DecodeConstants constants) { \
    decode_tiles<half_bits, Family::k##family, Form::k##form, tiles>(words, out, constants);    \
  }
#define EXL3_FORMS(half_bits, family)     \
  EXL3_PROBE(half_bits, family, Exact, 2) \
  EXL3_PROBE(half_bits, family, Exact, 4) \
  EXL3_PROBE(half_bits, family, Fast, 2)  \
  EXL3_PROBE(half_bits, family, Fast, 4)
#define EXL3_FAMILIES(half_bits) EXL3_FORMS(half_bits, Halves) EXL3_FORMS(half_bits, ByteSum)

EXL3_FAMILIES(2)
EXL3_FAMILIES(4)
EXL3_FAMILIES(6)
EXL3_FAMILIES(8)
EXL3_FAMILIES(10)
EXL3_FAMILIES(12)
EXL3_FAMILIES(14)
EXL3_FAMILIES(16)
EXL3_FORMS(3, ByteSum)
EXL3_FORMS(5, ByteSum)
EXL3_FORMS(7, ByteSum)
