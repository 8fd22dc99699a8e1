// Where the weights of a tile lie: rates, windows of the ring, tile order, decoding of one tile.
//
// A tile is a ring of 256 * bits bits, kept in 32-bit words of which the most significant bit comes
// first: exactly the stored int16 words read as little-endian uint32. Step i of the walk adds its
// bits to the ring, and the state of step i is the window of 16 ring bits that ends with them; the
// first windows reach back over the end of the ring.
//
// Eight consecutive steps belong to one lane of a warp: `Rate` says where a lane's run of bits ends
// and how far before that each of its windows ends.
#pragma once

#include <bit>
#include <cstdint>

#include "codebook.cuh"

namespace exl3 {

static_assert(std::endian::native == std::endian::little,
              "stored int16 words are read two at a time as little-endian uint32");

inline constexpr int kTile = 16;                    // side of a tile
inline constexpr int kTileWeights = kTile * kTile;  // steps of its walk
inline constexpr int kLanes = 32;
inline constexpr int kLaneWeights = kTileWeights / kLanes;
inline constexpr int kBlock = 128;  // Hadamard block; k and n are multiples of it
inline constexpr int kStateBits = 16;

// `kHalfBits` is twice the bits per weight, so that 1.5 bits is the whole number 3.
constexpr bool is_legal_rate(int half_bits) {
  const bool whole = half_bits % 2 == 0 && half_bits >= 2 && half_bits <= 16;
  return whole || half_bits == 3 || half_bits == 5 || half_bits == 7;
}

// Whether tiles of so many 16-bit words exist with a codebook (its kIndex): half rates only with
// mul1.
constexpr bool is_legal_tile(int64_t tile_words, int64_t codebook) {
  if (codebook < 0 || codebook > CodebookMul1::kIndex) return false;
  if (tile_words < 0 || tile_words > 128 || tile_words % 8 != 0) return false;
  const int half_bits = static_cast<int>(tile_words / 8);
  return is_legal_rate(half_bits) && (half_bits % 2 == 0 || codebook == CodebookMul1::kIndex);
}

template <int kHalfBits>
struct Rate {
  static_assert(is_legal_rate(kHalfBits), "bits per weight are 1 to 8, 1.5, 2.5 or 3.5");

  static constexpr bool is_half = kHalfBits % 2 != 0;
  static constexpr int floor_bits = kHalfBits / 2;
  static constexpr int words32 = 4 * kHalfBits;  // 32-bit words of a tile
  static constexpr int words16 = 8 * kHalfBits;  // last dimension of the stored trellis
  static constexpr int ring_bits = 32 * words32;
  static constexpr int lane_bits = 4 * kHalfBits;  // ring bits that one lane adds

  // Bits that step i adds: at half rates the odd steps add one more.
  EXL3_HOST_DEVICE static constexpr int step_bits(int i) {
    return floor_bits + (is_half && i % 2 != 0 ? 1 : 0);
  }
  // Ring position just after the bits of step i.
  EXL3_HOST_DEVICE static constexpr int step_end(int i) {
    return (i + 1) * floor_bits + (is_half ? (i + 1) / 2 : 0);
  }
  // Ring position just after the last bit of a lane's run.
  EXL3_HOST_DEVICE static constexpr int lane_end(int lane) { return lane_bits * (lane + 1); }

  // Bits between the end of window j of a lane (0 to 7) and the end of the lane's run.
  EXL3_HOST_DEVICE static constexpr int window_offset(int j) { return lane_bits - step_end(j); }

  // Bits of all eight windows of a lane together.
  static constexpr int span = lane_bits - floor_bits + kStateBits;

  // Word that holds the last bit of a lane's run, and the bits of that word behind it.
  EXL3_HOST_DEVICE static constexpr int lane_word(int lane) { return (lane_end(lane) - 1) / 32; }
  EXL3_HOST_DEVICE static constexpr int lane_shift(int lane) {
    return 31 - (lane_end(lane) - 1) % 32;
  }
  EXL3_HOST_DEVICE static constexpr int words_of_lane(int lane) {
    return (lane_shift(lane) + span + 31) / 32;
  }
  static constexpr int most_words_of_a_lane() {
    int most = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (words_of_lane(lane) > most) most = words_of_lane(lane);
    }
    return most;
  }
  static constexpr int lane_words = most_words_of_a_lane();  // 2 or 3

  static_assert(step_end(kTileWeights - 1) == ring_bits, "the steps must fill the ring");
  static_assert(lane_end(kLanes - 1) == ring_bits, "the lanes must fill the ring");
  static_assert(step_end(kLaneWeights - 1) == lane_bits && kLaneWeights % 2 == 0,
                "every lane must see the same pattern of step lengths");
  static_assert(window_offset(kLaneWeights - 1) == 0 && window_offset(0) + kStateBits == span,
                "the run must begin with window 0 and end with window 7");
  static_assert(lane_words == 2 || lane_words == 3, "LaneRun holds two or three words");
  static_assert(words32 >= lane_words, "a run must not meet itself around the ring");
};

// The state of the step at a ring position, from the words of its tile. Any position, any order.
template <int kHalfBits>
EXL3_HOST_DEVICE constexpr uint32_t window(const uint32_t* words, int position) {
  using R = Rate<kHalfBits>;
  const int end = R::step_end(position);
  const int begin = end >= kStateBits ? end - kStateBits : end - kStateBits + R::ring_bits;
  const int first = begin / 32;
  const int second = first + 1 == R::words32 ? 0 : first + 1;
  const uint64_t pair = static_cast<uint64_t>(words[first]) << 32 | words[second];
  return static_cast<uint32_t>(pair >> (48 - begin % 32)) & 0xFFFFu;
}

// The bits of one lane's eight windows, shifted so that the run ends at bit 0 of `low`.
struct LaneRun {
  uint64_t low;   // the last 64 bits
  uint32_t high;  // the 32 bits before them, as far as the rate needs any
};

template <int kHalfBits>
EXL3_HOST_DEVICE constexpr LaneRun lane_run(const uint32_t* words, int lane) {
  using R = Rate<kHalfBits>;
  const int last = R::lane_word(lane);
  const int shift = R::lane_shift(lane);
  const auto word = [&](int back) {
    const int index = last - back;
    return words[index < 0 ? index + R::words32 : index];
  };
  const uint64_t pair = static_cast<uint64_t>(word(1)) << 32 | word(0);
  LaneRun run{pair >> shift, 0};
  if constexpr (R::lane_words == 3) {
    const uint32_t third = word(2);
    // Two shifts, because one by 64 would be undefined when nothing has to be shifted out.
    run.low |= (static_cast<uint64_t>(third) << 32) << (32 - shift);
    run.high = third >> shift;
  }
  return run;
}

// State of window j (0 to 7) of a run.
template <int kHalfBits>
EXL3_HOST_DEVICE constexpr uint32_t window_of_run(const LaneRun& run, int j) {
  const int offset = Rate<kHalfBits>::window_offset(j);
  uint64_t bits = run.low >> offset;
  if (offset + kStateBits > 64) bits |= static_cast<uint64_t>(run.high) << (64 - offset);
  return static_cast<uint32_t>(bits) & 0xFFFFu;
}

// Tile order: with lane = position / 8 and j = position % 8, a ring position is the element that
// this lane holds in register order of two m16n8k16 B operands. Rows count inputs (k).
EXL3_HOST_DEVICE constexpr int tile_row(int position) {
  const int lane = position / kLaneWeights;
  return 2 * (lane & 3) + (position & 1) + 8 * ((position >> 1) & 1);
}
EXL3_HOST_DEVICE constexpr int tile_column(int position) {
  return position / (4 * kLaneWeights) + 8 * ((position >> 2) & 1);
}
EXL3_HOST_DEVICE constexpr int tile_element(int position) {
  return kTile * tile_row(position) + tile_column(position);
}

constexpr bool tile_order_is_a_permutation() {
  bool seen[kTileWeights] = {};
  for (int position = 0; position < kTileWeights; ++position) seen[tile_element(position)] = true;
  for (const bool hit : seen) {
    if (!hit) return false;
  }
  return true;
}
static_assert(tile_order_is_a_permutation(), "every element must be stored once");

// Decodes one tile: `words` are its Rate::words32 words, `out` its 16x16 values, row major.
template <class Codebook, int kHalfBits>
EXL3_HOST_DEVICE constexpr void decode_tile(const uint32_t* words, float* out) {
  static_assert(!Rate<kHalfBits>::is_half || Codebook::kHasHalfRates,
                "half rates exist only with mul1");
  for (int lane = 0; lane < kLanes; ++lane) {
    const LaneRun run = lane_run<kHalfBits>(words, lane);
    for (int j = 0; j < kLaneWeights; ++j) {
      out[tile_element(kLaneWeights * lane + j)] =
          Codebook::value(window_of_run<kHalfBits>(run, j));
    }
  }
}

}  // namespace exl3
