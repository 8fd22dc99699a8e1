// How the units of work of one product are dealt to thread blocks, on the host and on the device.
//
// Units run strip by strip, k by k. Position r of G gets the units [U r / G, U (r + 1) / G): a cut
// by shape alone, so the sums of a strip are split at the same places whatever the batch holds. A
// strip that is cut belongs to the position with its first unit, which meets it last in its own
// range; the others meet it first, publish their partial sums early and go on. So the owner hardly
// ever waits, and it adds the parts in the order of k.
#pragma once

#include <cstdint>

#include "format/codebook.cuh"

namespace exl3 {

struct UnitRange {
  int begin, end;
};

EXL3_HOST_DEVICE constexpr int range_begin(int64_t units, int position, int positions) {
  return static_cast<int>(units * position / positions);
}

EXL3_HOST_DEVICE constexpr UnitRange unit_range(int64_t units, int position, int positions) {
  return {range_begin(units, position, positions), range_begin(units, position + 1, positions)};
}

// The last position whose range reaches into units before `end`.
EXL3_HOST_DEVICE constexpr int last_contributor(int64_t units, int position, int positions,
                                                int end) {
  int last = position;
  while (last + 1 < positions && range_begin(units, last + 1, positions) < end) ++last;
  return last;
}

// Units dealt to parts that differ by one at most, the larger ones first. Cheap on the device: one
// division of 32 bits tells whose a unit is.
struct EvenSplit {
  int each, larger;  // units of a part; how many parts have one more

  EXL3_HOST_DEVICE static constexpr EvenSplit of(int units, int parts) {
    return {units / parts, units % parts};
  }
  EXL3_HOST_DEVICE constexpr UnitRange range(int part) const {
    const int begin = part * each + (part < larger ? part : larger);
    return {begin, begin + each + (part < larger ? 1 : 0)};
  }
  EXL3_HOST_DEVICE constexpr int part_of(int unit) const {
    const int in_larger = larger * (each + 1);
    return unit < in_larger ? unit / (each + 1) : larger + (unit - in_larger) / each;
  }
};

}  // namespace exl3
