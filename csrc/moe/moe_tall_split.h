// How the rows of an expert fall into parts on the route by warpgroups. Plain C++, host and device.
#pragma once

#include "format/codebook.cuh"
#include "moe/limits.h"

namespace exl3 {

// Where a tile of rows lies: its part's first tile and how many that has. The image of a part
// is [k / 16][rows of the part][16].
struct MoePart {
  int first, tiles;

  static constexpr int kTileBits = 3;
  EXL3_HOST_DEVICE static constexpr MoePart unpack(int packed) {
    return {packed >> kTileBits, packed & ((1 << kTileBits) - 1)};
  }
  EXL3_HOST_DEVICE constexpr int pack() const { return first << kTileBits | tiles; }
};
static_assert(kMoePartTiles < 1 << MoePart::kTileBits);

// The tiles of an expert that has `tiles` are dealt to so many parts, evenly.
EXL3_HOST_DEVICE constexpr int parts_of_expert(int tiles) {
  return (tiles + kMoePartTiles - 1) / kMoePartTiles;
}
// Part `index` of those begins at this one of the expert's tiles.
EXL3_HOST_DEVICE constexpr int part_begin(int tiles, int parts, int index) {
  return tiles * index / parts;
}
EXL3_HOST_DEVICE constexpr int part_of_tile(int tiles, int parts, int tile) {
  return ((tile + 1) * parts - 1) / tiles;
}

}  // namespace exl3
