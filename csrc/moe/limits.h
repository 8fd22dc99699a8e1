// Sizes up to which the routed experts are supported. Plain C++.
#pragma once

namespace exl3 {

inline constexpr int kMaxExperts = 512;  // on one device
inline constexpr int kMaxSlots = 16;     // experts of one token
inline constexpr int kMaxLists = 64;     // products of one call: kinds of gate, up and down

// The route by warpgroups: rows of a tile, to which an expert's are padded, and tiles of a part.
inline constexpr int kMoeTallTile = 64, kMoePartTiles = 4;
inline constexpr int kMoePartRows = kMoeTallTile * kMoePartTiles;

}  // namespace exl3
