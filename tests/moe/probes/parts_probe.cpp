// Deals tiles of rows to parts as the route by warpgroups does, for many experts: prints how many,
// or what is wrong.
#include <algorithm>
#include <cstdio>

#include "moe/moe_tall_split.h"

using namespace exl3;

namespace {

int wrong(const char* what, int tiles) {
  std::printf("%s: %d tiles\n", what, tiles);
  return 1;
}

int play(int tiles) {
  const int parts = parts_of_expert(tiles);
  int next = 0, least = kMoePartTiles, most = 0;
  for (int part = 0; part < parts; ++part) {
    const int begin = part_begin(tiles, parts, part), end = part_begin(tiles, parts, part + 1);
    if (begin != next) return wrong("a tile in two parts or none", tiles);
    for (int tile = begin; tile < end; ++tile) {
      if (part_of_tile(tiles, parts, tile) != part) return wrong("not the part of its tile", tiles);
    }
    const MoePart packed = MoePart::unpack(MoePart{1000 * tiles + begin, end - begin}.pack());
    if (packed.first != 1000 * tiles + begin || packed.tiles != end - begin) {
      return wrong("lost in packing", tiles);
    }
    least = std::min(least, end - begin), most = std::max(most, end - begin);
    next = end;
  }
  if (next != tiles) return wrong("tiles left", tiles);
  if (most > kMoePartTiles || (tiles > 0 && least < 1)) return wrong("a part too large", tiles);
  if (tiles > 0 && most - least > 1) return wrong("uneven parts", tiles);
  return 0;
}

}  // namespace

int main() {
  int count = 0;
  for (int tiles = 0; tiles < 2100; ++tiles, ++count) {
    if (play(tiles) != 0) return 1;
  }
  std::printf("%d\n", count);
}
