// Prints what the C++ decoder makes of packed tiles, for comparison with the reference results.
//
//   decode_main codebook INDEX            65536 fp16 values as uint16
//   decode_main tiles INDEX HALF_BITS     reads tiles from stdin; for each: 256 states found one by
//                                         one, 256 states found lane by lane (uint16 each), then
//                                         the 16x16 decoded values (float32, row major)
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "format/windows.cuh"

namespace {

using namespace exl3;

// The decoder must be usable at compile time. Values from the format document.
static_assert(Codebook3inst::bits(0x0000) == 0x3a25 && Codebook3inst::bits(0xcafe) == 0xc130);
static_assert(CodebookMcg::bits(0x0001) == 0x304e && CodebookMcg::bits(0xffff) == 0x3acd);
static_assert(CodebookMul1::bits(0x0002) == 0xb72d && CodebookMul1::bits(0x8000) == 0xbaf2);
static_assert(Rate<3>::span == 27 && Rate<8>::span == 44 && Rate<16>::span == 72);
static_assert(tile_row(5) == 1 && tile_column(5) == 8 && tile_element(255) == 255);

template <class T>
void put(const T* values, size_t count) {
  if (std::fwrite(values, sizeof(T), count, stdout) != count) std::exit(3);
}

template <class Codebook>
void print_codebook() {
  for (uint32_t state = 0; state < 65536; ++state) {
    const uint16_t bits = Codebook::bits(state);
    if (normal_half_to_float(bits) != Codebook::value(state) && (bits & 0x7FFF) != 0) std::exit(4);
    put(&bits, 1);
  }
}

template <class Codebook, int kHalfBits>
void print_tiles() {
  uint32_t words[Rate<kHalfBits>::words32];
  while (std::fread(words, sizeof(words), 1, stdin) == 1) {
    uint16_t single[kTileWeights], by_lane[kTileWeights];
    for (int position = 0; position < kTileWeights; ++position) {
      single[position] = static_cast<uint16_t>(window<kHalfBits>(words, position));
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      const LaneRun run = lane_run<kHalfBits>(words, lane);
      for (int j = 0; j < kLaneWeights; ++j) {
        by_lane[kLaneWeights * lane + j] = static_cast<uint16_t>(window_of_run<kHalfBits>(run, j));
      }
    }
    float values[kTileWeights];
    decode_tile<Codebook, kHalfBits>(words, values);
    put(single, kTileWeights);
    put(by_lane, kTileWeights);
    put(values, kTileWeights);
  }
}

template <class Codebook, int... kHalfBits>
bool print_tiles_at(int half_bits, std::integer_sequence<int, kHalfBits...>) {
  return ((half_bits == kHalfBits && (print_tiles<Codebook, kHalfBits>(), true)) || ...);
}

using WholeRates = std::integer_sequence<int, 2, 4, 6, 8, 10, 12, 14, 16>;
using HalfRates = std::integer_sequence<int, 3, 5, 7>;

template <class Codebook>
bool run(int argc, char** argv) {
  if (std::strcmp(argv[1], "codebook") == 0) return print_codebook<Codebook>(), true;
  if (argc < 4) return false;
  const int half_bits = std::atoi(argv[3]);
  if constexpr (Codebook::kHasHalfRates) {
    if (print_tiles_at<Codebook>(half_bits, HalfRates{})) return true;
  }
  return print_tiles_at<Codebook>(half_bits, WholeRates{});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const int index = std::atoi(argv[2]);
  const bool known = (index == Codebook3inst::kIndex && run<Codebook3inst>(argc, argv)) ||
                     (index == CodebookMcg::kIndex && run<CodebookMcg>(argc, argv)) ||
                     (index == CodebookMul1::kIndex && run<CodebookMul1>(argc, argv));
  return known ? 0 : 2;
}
