// Trellis search: the tail-biting walk of 256 steps whose codebook values come nearest to a tile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cpu/isa.h"

namespace exl3::cpu {

struct SearchTables;

// Searches one to kEncodeBlock tiles and writes the states of their walks, 256 a tile.
using SearchFn = void (*)(const SearchTables&, const float* tiles, int count, uint16_t* states,
                          float* scratch);
struct SearchEntry {
  SearchFn search;
  size_t scratch_floats;
};

// Counts that are multiples of this are searched fastest.
inline constexpr int kEncodeBlock = 4;

// Inputs must be finite and no larger than this (fp16's largest number), so costs stay finite.
inline constexpr float kEncodeLimit = 65504.0f;

// One rate and codebook on one instruction set. Immutable, so every thread may use it at once.
class TileEncoder {
 public:
  // tile_words: 16 * bits. codebook: 0 3inst, 1 mcg, 2 mul1. Throws std::invalid_argument for a
  // pair that the format does not have.
  TileEncoder(int tile_words, int codebook, Isa isa);
  ~TileEncoder();

  // Bytes of scratch, aligned to 64, that one call of `encode` works in.
  size_t scratch_bytes() const;

  // tiles: [count, 256] fp32 in ring order. packed: [count, tile_words] 16-bit words as stored.
  // values: [count, 256] codebook values of the walks. A tile's result depends on nothing but the
  // tile, so ranges may be cut anywhere.
  void encode(const float* tiles, int64_t count, uint16_t* packed, float* values,
              void* scratch) const;

 private:
  int tile_words_;
  SearchEntry search_;
  std::unique_ptr<const SearchTables> tables_;
};

// The encoder of the selected instruction set, made at first use and kept (256 KiB, or 512 KiB for
// half rates).
const TileEncoder& tile_encoder(int tile_words, int codebook);

}  // namespace exl3::cpu
