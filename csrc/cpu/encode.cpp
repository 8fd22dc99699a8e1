// Around the search: codebook tables, the choice of instruction set, packing of the found walks.
#include "cpu/encode.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "cpu/encode_search.h"
#include "format/codebook.cuh"

namespace exl3::cpu {

namespace {

constexpr int kCodebooks = 3;
constexpr int kMaxTileWords = 128;

// Bits that an even and an odd step add.
struct Bits {
  int even, odd;
  int of(int step) const { return step % 2 == 0 ? even : odd; }
};
Bits step_bits(int tile_words) { return {tile_words / 16, (tile_words + 8) / 16}; }

float codebook_value(int codebook, uint32_t state) {
  switch (codebook) {
    case Codebook3inst::kIndex:
      return Codebook3inst::value(state);
    case CodebookMcg::kIndex:
      return CodebookMcg::value(state);
    default:
      return CodebookMul1::value(state);
  }
}

// Throws for what the format does not have.
void check_rate(int tile_words, int codebook) {
  if (codebook < 0 || codebook >= kCodebooks) {
    throw std::invalid_argument("codebook " + std::to_string(codebook) +
                                ": expected 0 (3inst), 1 (mcg) or 2 (mul1)");
  }
  const bool half = tile_words == 24 || tile_words == 40 || tile_words == 56;
  const bool whole = tile_words % 16 == 0 && tile_words >= 16 && tile_words <= kMaxTileWords;
  if (!half && !whole) {
    throw std::invalid_argument(
        std::to_string(tile_words) +
        " words per tile: expected 16 * bits, that is 16, 32, .. 128 for 1 to 8 bits or 24, 40, "
        "56 for 1.5, 2.5, 3.5 bits");
  }
  if (half && codebook != CodebookMul1::kIndex) {
    throw std::invalid_argument(std::to_string(tile_words) +
                                " words per tile (a half rate) exist only with codebook 2 (mul1), "
                                "found codebook " +
                                std::to_string(codebook));
  }
}

SearchEntry search_entry_of(Isa isa, int tile_words) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return search_avx512(tile_words);
  if (isa == Isa::kAvx2) return search_avx2(tile_words);
#else
  (void)isa;
#endif
  return search_portable(tile_words);
}

// Keeps the D(i) low bits of every state, most significant first. Of each pair of 16-bit words the
// second comes first in the ring.
void pack(const uint16_t* states, Bits bits, uint16_t* words) {
  uint32_t pending = 0;
  int count = 0, word = 0;
  for (int step = 0; step < kSteps; ++step) {
    const int added = bits.of(step);
    pending = pending << added | (states[step] & ((1u << added) - 1));
    count += added;
    if (count >= 16) {
      count -= 16;
      words[word++ ^ 1] = static_cast<uint16_t>(pending >> count);
    }
  }
}

// Values in the order of SearchTables for steps after which `leaving` bits leave the state.
void fill_table(int codebook, int leaving, float* table) {
  for (uint32_t state = 0; state < 1u << kStateBits; ++state) {
    const uint32_t branch = state >> (kStateBits - leaving);
    const uint32_t node = state & ((1u << (kStateBits - leaving)) - 1);
    const size_t at = ((node / kVector << leaving) + branch) * kVector + node % kVector;
    table[at] = codebook_value(codebook, state);
  }
}

float* allocate_table() {
  return static_cast<float*>(
      ::operator new(sizeof(float) << kStateBits, std::align_val_t{kAlignment}));
}

}  // namespace

void TableDeleter::operator()(float* table) const {
  ::operator delete(table, std::align_val_t{kAlignment});
}

TileEncoder::TileEncoder(int tile_words, int codebook, Isa isa) : tile_words_(tile_words) {
  check_rate(tile_words, codebook);
  search_ = search_entry_of(isa, tile_words);
  const Bits bits = step_bits(tile_words);
  auto tables = std::make_unique<SearchTables>();
  for (int parity = 0; parity < (bits.even == bits.odd ? 1 : 2); ++parity) {
    tables->storage[parity].reset(allocate_table());
    fill_table(codebook, bits.of(parity), tables->storage[parity].get());
  }
  tables->by_next_parity[0] = tables->storage[0].get();
  tables->by_next_parity[1] = tables->storage[bits.even == bits.odd ? 0 : 1].get();
  tables_ = std::move(tables);
}

TileEncoder::~TileEncoder() = default;

size_t TileEncoder::scratch_bytes() const { return search_.scratch_floats * sizeof(float); }

void TileEncoder::encode(const float* tiles, int64_t count, uint16_t* packed, float* values,
                         void* scratch) const {
  const Bits bits = step_bits(tile_words_);
  uint16_t states[kEncodeBlock * kSteps];
  for (int64_t first = 0; first < count; first += kEncodeBlock) {
    const int block = static_cast<int>(std::min<int64_t>(kEncodeBlock, count - first));
    search_.search(*tables_, tiles + first * kSteps, block, states, static_cast<float*>(scratch));
    for (int t = 0; t < block; ++t) {
      const uint16_t* walk = states + t * kSteps;
      pack(walk, bits, packed + (first + t) * tile_words_);
      float* out = values + (first + t) * kSteps;
      for (int step = 0; step < kSteps; ++step)
        out[step] = tables_->value(walk[step], step, bits.of(step + 1));
    }
  }
}

const TileEncoder& tile_encoder(int tile_words, int codebook) {
  check_rate(tile_words, codebook);
  static std::mutex mutex;
  static std::unique_ptr<TileEncoder> made[kMaxTileWords / 8 + 1][kCodebooks];
  const std::lock_guard<std::mutex> lock(mutex);
  auto& encoder = made[tile_words / 8][codebook];
  if (!encoder) encoder = std::make_unique<TileEncoder>(tile_words, codebook, selected_isa());
  return *encoder;
}

}  // namespace exl3::cpu
