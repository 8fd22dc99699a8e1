#include "moe/choice.h"

#include <algorithm>
#include <optional>

#include "linear/gemm_limits.h"
#include "linear/stream_limits.h"
#include "moe/limits.h"
#include "moe/moe_stream_limits.h"

namespace exl3 {
namespace {

// Tile height by the rows that an expert gets on average, all experts of the model counted, also
// those of other ranks. An expert with a few rows more than a tile decodes its weights twice, so
// tiles are taller than the average.
struct Step {
  double below;
  int rows;
};
constexpr Step kLadder[] = {{6, 8}, {12, 16}, {24, 32}, {160, 64}};

constexpr int64_t kChunkTokens = 4096;
constexpr int64_t kChunkBytes = int64_t{1} << 30;  // of images and rows, roughly

// The route for few tokens leaves some multiprocessors idle up to so many pairs of token and
// expert, where then each has whole strips. On an H200, 288 experts of 4096 x 2048: 64.7
// against 66.8 us for 8 pairs, 109.1 against 110.5 for 16. With parts of strips it does not pay:
// 128 experts of 2048 x 768: 25.2 both, 37.0 against 34.4.
constexpr int64_t kMoeEvenPairs = 16;

// The route by warpgroups: from so many rows an expert on average. Below, decoding is what takes
// the time, and lower tiles decode faster. On an H200, 128 experts of 2048 x 768: 341 against 354
// us with 12 rows, 338 against 253 with 8.
constexpr double kTallAverage = 12;
constexpr int64_t kTallTokens = 16384;
constexpr int64_t kTallBytes = int64_t{5} << 29;  // of images and rows of a call, roughly
// Rows of slots that the L2 holds are kept in fp32.
constexpr int64_t kLongRowBytes = int64_t{64} << 20;

int rows_of_tile(double average) {
  for (const Step& step : kLadder) {
    if (average < step.below) return step.rows;
  }
  return 128;
}

// Tokens that go through at once where `most` can: in equal parts.
int64_t equal_chunk(int64_t tokens, int64_t most) {
  const int64_t chunks = std::max<int64_t>(1, (tokens + most - 1) / most);
  return std::max<int64_t>(1, (tokens + chunks - 1) / chunks);
}

// Tokens that go through tiles at once: as many as the bytes of their rows allow. A row costs two
// images of k, one of inner, and n sums; padding doubles it at the worst.
int64_t tile_chunk(const MoeShape& shape) {
  const int64_t token_bytes =
      int64_t{shape.top_k} * (4 * 2 * shape.k + 2 * 2 * shape.inner + 4 * shape.n);
  const int64_t most =
      std::clamp<int64_t>(kChunkBytes / token_bytes / 256 * 256, 256, kChunkTokens);
  return equal_chunk(shape.tokens, most);
}

// Parts of a workspace, one after the other, each at a multiple of 256 bytes.
struct Parts {
  int64_t end = 0;

  int64_t take(int64_t bytes) {
    const int64_t begin = end;
    end += (bytes + 255) / 256 * 256;
    return begin;
  }
};

// Thread blocks of the route for few tokens.
int stream_blocks(const DeviceFacts& device, const MoeShape& shape) {
  const int64_t pairs = std::max<int64_t>(1, shape.tokens * shape.top_k);
  const int64_t gate_up = 2 * shape.inner / 128 * pairs, down = shape.n / 128 * pairs;  // strips
  const int even = stream_positions(device.multiprocessors, down);
  const bool whole = pairs <= kMoeEvenPairs && gate_up % even == 0 && down % even == 0;
  return whole ? even : device.multiprocessors;
}

// Tiles of the route for few tokens: as tall as their inputs fit into shared memory, since an
// expert with more rows is decoded again. 0 where that would be the rule, or nothing fits.
int rows_of_stream(const DeviceFacts& device, const MoeShape& shape, int blocks) {
  if (shape.tokens * shape.top_k > kMoeStreamPairs) return 0;
  const int64_t wanted = std::min<int64_t>(shape.tokens, kMoeStreamRows);
  int rows = kMoeStreamRows;
  while (rows / 2 >= wanted) rows /= 2;
  while (rows > 0 && !moe_stream_runs(device, shape, rows, blocks)) rows /= 2;
  const int64_t pairs = shape.tokens * shape.top_k;
  return rows >= wanted || 2 * pairs <= rows * shape.global_experts ? rows : 0;
}

// By warpgroups: as many tokens at once as the bytes of their rows allow.
MoeChoice tall_choice(const DeviceFacts& device, const MoeShape& shape, bool exact) {
  const int64_t of_slot = 4 * shape.k + 2 * shape.inner;  // of images
  const int64_t of_token = shape.top_k * (of_slot + 4 * shape.n);
  const int64_t most = std::clamp<int64_t>(kTallBytes / of_token, 256, kTallTokens);
  const int64_t chunk = equal_chunk(shape.tokens, most);
  const bool many = chunk * shape.top_k * shape.n * 4 > kLongRowBytes;
  return {kMoeTall, !exact && shape.bfloat16 && many ? 1 : 0, device.multiprocessors, chunk, false};
}

// A thread block takes whole strips of a part, so there must be enough of them: one for each
// multiprocessor, or half of that where tiles take twice as long. On an H200, 128 experts of 2048 x
// 768: 354 against 527 us with 32 rows an expert, 470 against 814 with 64, 612 against 1,327 with
// 128.
bool tall_fills(const DeviceFacts& device, const MoeShape& shape, double average) {
  const double parts = std::max(1.0, average / kMoePartRows);
  const double items = static_cast<double>(shape.experts * (shape.inner / 128)) * parts;
  return items >= device.multiprocessors * (average < 64 ? 1.0 : 0.5);
}

bool matches(const MoeOverride& entry, const MoeShape& shape) {
  const auto is = [](int64_t wanted, int64_t found) { return wanted == 0 || wanted == found; };
  return is(entry.k, shape.k) && is(entry.inner, shape.inner) && is(entry.experts, shape.experts) &&
         is(entry.global_experts, shape.global_experts) && is(entry.top_k, shape.top_k) &&
         is(entry.half_bits, shape.half_bits) &&
         (entry.family < 0 || entry.family == shape.family) && shape.tokens <= entry.tokens_upto;
}

// What an override asks for, made complete; nothing where it cannot serve this call.
std::optional<MoeChoice> complete(const DeviceFacts& device, const MoeShape& shape, bool exact,
                                  const MoeOverride& entry) {
  if (!is_moe_plan(entry.rows, entry.form)) return std::nullopt;
  if (is_moe_tall(entry.rows)) {
    if (!moe_tall_runs(device, shape) || (entry.form == 1 && !shape.bfloat16)) return std::nullopt;
    MoeChoice choice = tall_choice(device, shape, exact);
    choice.form = exact ? 0 : entry.form;
    if (entry.blocks > 0) choice.blocks = std::min(entry.blocks, device.multiprocessors);
    return choice;
  }
  const int form = exact ? 0 : entry.form;
  if (is_moe_stream(entry.rows)) {
    const int blocks = entry.blocks > 0 ? entry.blocks : stream_blocks(device, shape);
    const bool few = shape.tokens * shape.top_k <= kMoeStreamPairs;
    if (!few || !moe_stream_runs(device, shape, entry.rows, blocks)) return std::nullopt;
    return MoeChoice{entry.rows, form, blocks, std::max<int64_t>(1, shape.tokens), false};
  }
  // More blocks than gate and up have work items would only cost workspace.
  const int64_t chunk = tile_chunk(shape);
  const int64_t items = most_tiles(shape, std::min(shape.tokens, chunk), entry.rows) *
                        (shape.inner / 128) * (shape.k / kUnitInputs);
  const int64_t asked = entry.blocks > 0 ? entry.blocks : moe_tile_blocks(device, entry.rows);
  const auto blocks = static_cast<int>(std::clamp<int64_t>(asked, 1, std::max<int64_t>(1, items)));
  return MoeChoice{entry.rows, form, blocks, chunk, false};
}

}  // namespace

int moe_tile_blocks(const DeviceFacts& device, int rows) {
  return device.multiprocessors * gemm_blocks_of_sm(rows, device.shared_bytes);
}

bool moe_tall_runs(const DeviceFacts& device, const MoeShape& shape) {
  return device.architecture == 90 && shape.joined;
}

bool moe_stream_runs(const DeviceFacts& device, const MoeShape& shape, int rows, int blocks) {
  const bool legal = rows == 1 || rows == 2 || rows == 4;
  if (!legal || blocks < 1 || device.architecture != 90 || !shape.two_products) return false;
  const int64_t tokens = std::min<int64_t>(shape.tokens, kMoeStreamPairs / shape.top_k);
  const MoeStreamWorkspace w =
      moe_stream_workspace(shape, {rows, 0, blocks, tokens, false}, tokens);
  return kStreamRingBytes + std::max(w.gate_up_inputs, w.down_inputs) + kMoeRouteBytes <=
         device.shared_bytes;
}

int64_t most_tiles(const MoeShape& shape, int64_t tokens, int rows) {
  const int64_t pairs = tokens * shape.top_k;
  return std::min(pairs, pairs / rows + std::min(shape.experts, pairs));
}

MoeChoice choose_moe(const DeviceFacts& device, const MoeShape& shape, const PlanOptions& options,
                     std::span<const MoeOverride> overrides) {
  if (!options.batch_invariant) {
    for (const MoeOverride& entry : overrides) {
      if (!matches(entry, shape)) continue;
      if (const auto choice = complete(device, shape, options.exact, entry)) return *choice;
    }
  }
  const int64_t chunk = tile_chunk(shape);
  const int64_t tokens = std::min(shape.tokens, chunk);
  const double average = static_cast<double>(tokens * shape.top_k) /
                         static_cast<double>(std::max<int64_t>(1, shape.global_experts));
  const bool fast = device.architecture == 90 && !options.exact && !options.batch_invariant;
  if (!options.batch_invariant) {
    const int blocks = stream_blocks(device, shape);
    if (const int rows = rows_of_stream(device, shape, blocks); rows > 0) {
      return {rows, fast ? 1 : 0, blocks, std::max<int64_t>(1, shape.tokens), false};
    }
  }
  if (!options.batch_invariant && moe_tall_runs(device, shape) && average >= kTallAverage &&
      tall_fills(device, shape, average)) {
    return tall_choice(device, shape, options.exact);
  }
  MoeChoice choice{};
  choice.chunk = chunk;
  if (options.batch_invariant) {
    // Tiles of 32 and 64 rows have the same groups of warps, hence one order of additions.
    choice.rows = average < 24 ? 32 : 64;
    choice.whole_strips = true;
  } else {
    choice.rows = rows_of_tile(average);
  }
  choice.form = fast && choice.rows == kFastRows ? 1 : 0;
  choice.blocks = moe_tile_blocks(device, choice.rows);
  return choice;
}

MoeWorkspace moe_workspace(const MoeShape& shape, const MoeChoice& choice, int64_t tokens,
                           int lists, int launches, bool paired) {
  const int64_t tiles = most_tiles(shape, tokens, choice.rows), rows = tiles * choice.rows;
  MoeWorkspace w{};
  Parts parts;
  w.tiles = parts.take(4);
  w.counts = parts.take(4 * shape.experts);
  w.tile_expert = parts.take(4 * tiles);
  w.row_pair = parts.take(4 * rows);
  w.lists = parts.take(16 * tiles * lists);
  w.list_counts = parts.take(4 * int64_t{lists});
  w.of_blocks = parts.take(4 * shape.experts * moe_plan_blocks(tokens * shape.top_k));
  w.flags = parts.take(4 * int64_t{launches} * choice.blocks);
  w.image = parts.take(2 * tiles * image_bytes(shape.k, choice.rows));
  w.block_sums = parts.take(choice.form == 0 ? 0 : 2 * rows * (shape.k / 128) * 4);
  w.next_image = parts.take(tiles * image_bytes(shape.inner, choice.rows));
  w.next_sums = parts.take(choice.form == 0 ? 0 : rows * (shape.inner / 128) * 4);
  w.gate_up = parts.take(paired ? 0 : rows * 2 * shape.inner * 4);
  w.partials = parts.take((paired ? 3 : 1) * int64_t{choice.blocks} * partial_bytes(choice.rows));
  w.out = parts.take(tokens * shape.top_k * shape.n * 4);
  w.total = parts.end;
  return w;
}

MoeTallWorkspace moe_tall_workspace(const MoeShape& shape, const MoeChoice& choice, int64_t tokens,
                                    int lists, int launches) {
  const int64_t tiles = most_tiles(shape, tokens, kMoeTallTile);
  MoeTallWorkspace w{};
  Parts parts;
  w.tiles = parts.take(4);
  w.counts = parts.take(4 * shape.experts);
  w.tile_expert = parts.take(4 * tiles);
  w.row_pair = parts.take(4 * tiles * kMoeTallTile);
  w.tile_part = parts.take(4 * tiles);
  w.lists = parts.take(16 * tiles * lists);
  w.list_counts = parts.take(4 * int64_t{lists});
  w.of_blocks = parts.take(4 * shape.experts * moe_plan_blocks(tokens * shape.top_k));
  w.taken = parts.take(4 * int64_t{launches});
  w.image = parts.take(2 * tiles * image_bytes(shape.k, kMoeTallTile));
  w.next_image = parts.take(tiles * image_bytes(shape.inner, kMoeTallTile));
  w.aside = parts.take(choice.blocks * partial_bytes(kMoePartRows));
  w.out = parts.take(tokens * shape.top_k * shape.n * (choice.form == 0 ? 4 : 2));
  w.total = parts.end;
  return w;
}

MoeStreamWorkspace moe_stream_workspace(const MoeShape& shape, const MoeChoice& choice,
                                        int64_t tokens) {
  const int64_t tiles = most_tiles(shape, tokens, choice.rows);
  const int64_t inner = shape.inner / 128, outer = shape.n / 128;
  const int64_t row_bytes = choice.rows * partial_bytes(1);
  MoeStreamWorkspace w{};
  Parts parts;
  w.gate_up_sums = parts.take((choice.blocks + tiles * 2 * inner) * row_bytes);
  w.gate_up_ends = parts.take(tiles * 2 * inner * row_bytes);
  w.down_sums = parts.take((choice.blocks + tiles * outer) * row_bytes);
  w.down_ends = parts.take(tiles * outer * row_bytes);
  w.total = parts.end;
  const auto inputs = [&](int64_t halves, int64_t k, int64_t strips) {
    return static_cast<int>(std::min<int64_t>(
        moe_stream_input_bytes(tiles, halves, k, strips, choice.blocks, choice.rows), 1 << 30));
  };
  w.gate_up_inputs = inputs(2, shape.k, inner);
  w.down_inputs = inputs(1, shape.inner, outer);
  return w;
}

}  // namespace exl3
