// Plays how the route for few tokens deals out work, for many shapes: prints how many, or what is
// wrong.
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "moe/moe_stream_split.h"

using namespace exl3;

namespace {

int wrong(const char* what, const MoeStreamWork& work, int tiles) {
  std::printf("%s: %d steps, %d strips, %d halves, %d positions, %d tiles\n", what, work.steps,
              work.strips, work.halves, work.positions, tiles);
  return 1;
}

int play(const MoeStreamWork& work, int tiles) {
  const MoeShares shares = MoeShares::of(work, tiles);
  const int strips = tiles * work.halves * work.strips;
  // Units found at a place, as the kernel leaves them: by the end of warps, and inside of shares.
  std::map<std::pair<int, int>, std::multiset<int>> partials;
  std::vector<std::multiset<int>> ends(strips);
  for (int position = 0; position < work.positions; ++position) {
    const int begin = shares.begin(position), end = shares.end(position);
    if (begin == end) continue;
    for (int strip = begin / work.steps; strip <= (end - 1) / work.steps; ++strip) {
      if (partials.count({position + strip, 0})) return wrong("one place twice", work, tiles);
      partials[{position + strip, 0}];
    }
    const int of_warp = MoeShares::of_warp(end - begin);
    for (int warp = 0; warp < kStreamWarps; ++warp) {
      const int first = std::min(begin + warp * of_warp, end),
                last = std::min(first + of_warp, end);
      for (int unit = first; unit < last; ++unit) {
        const int strip = unit / work.steps;
        const bool goes_on = last > (strip + 1) * work.steps;
        (goes_on ? ends[strip] : partials[{position + strip, 0}]).insert(unit);
      }
    }
    const int64_t units = int64_t{work.strips} * work.steps;
    if ((end - 1) / units - begin / units + 1 > moe_stream_segments(int64_t{tiles} * work.halves,
                                                                    work.strips, work.steps,
                                                                    work.positions)) {
      return wrong("more matrices than shared memory has room for", work, tiles);
    }
  }
  for (int strip = 0; strip < strips; ++strip) {
    const MoeParts parts = MoeParts::of(work, shares, strip);
    std::multiset<int> found;
    for (int p = parts.first; p < parts.first + parts.count; ++p) {
      const auto at = partials.find({p + strip, 0});
      if (at == partials.end()) return wrong("a place that nobody wrote", work, tiles);
      found.insert(at->second.begin(), at->second.end());
    }
    if (!parts.goes_on && !ends[strip].empty()) return wrong("an end is forgotten", work, tiles);
    if (parts.goes_on && ends[strip].empty()) return wrong("an end is not there", work, tiles);
    found.insert(ends[strip].begin(), ends[strip].end());
    if (static_cast<int>(found.size()) != work.steps || *found.begin() != strip * work.steps ||
        *found.rbegin() != (strip + 1) * work.steps - 1 ||
        std::set<int>(found.begin(), found.end()).size() != found.size()) {
      return wrong("a unit is missing or there twice", work, tiles);
    }
  }
  return 0;
}

}  // namespace

int main() {
  std::mt19937 random(1);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  for (int i = 0; i < 20000; ++i) {
    const int divisor = 1 + below(i % 2 == 0 ? 40 : 70000), n = static_cast<int>(random() >> 1);
    if (Divisor::of(divisor).divide(n) != n / divisor) {
      std::printf("%d / %d is %d\n", n, divisor, Divisor::of(divisor).divide(n));
      return 1;
    }
  }
  int cases = 0;
  for (; cases < 1500; ++cases) {
    const int halves = 1 + below(2);
    const MoeStreamWork work = MoeStreamWork::of(128 * (1 + below(20)), 128 * (1 + below(9)),
                                                 halves, 1 + below(cases % 2 == 0 ? 12 : 200));
    if (play(work, 1 + below(20)) != 0) return 1;
  }
  std::printf("%d\n", cases);
  return 0;
}
