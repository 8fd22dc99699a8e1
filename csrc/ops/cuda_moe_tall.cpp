// The routed experts of many tokens on CUDA: products by warpgroups, on sm_90.
#include <algorithm>

#include "linear/rates.h"
#include "moe/moe_tall.h"
#include "ops/cuda_moe.h"

namespace exl3::ops {

void run_tall(const Call& call, int64_t first, int64_t tokens, uint8_t* workspace, uint16_t* y) {
  const MoeArguments& a = call.a;
  // Kernels of many rows last a hundred times as long as a launch, and those that wait for them
  // take places of blocks that could run: 0.4 % of a call of 8,192 tokens.
  const bool short_rows = call.choice.form == 1, dependent = call.dependent && !short_rows;
  const auto launches = static_cast<int>(call.products.size());
  const MoeTallWorkspace w =
      moe_tall_workspace(call.shape, call.choice, tokens, call.lists, launches);
  const auto tiles = static_cast<int>(most_tiles(call.shape, tokens, kMoeTallTile));
  const auto ints = [&](int64_t offset) { return reinterpret_cast<int*>(workspace + offset); };
  const auto floats = [&](int64_t offset) { return reinterpret_cast<float*>(workspace + offset); };
  const MoeRouting routing{ints(w.tiles),       ints(w.counts),
                           ints(w.tile_expert), ints(w.row_pair),
                           ints(w.tile_part),   reinterpret_cast<MoeTile*>(workspace + w.lists),
                           ints(w.list_counts)};
  MoePlanParams plan = plan_of(call, first, tokens, routing, ints(w.of_blocks));
  plan.flags = reinterpret_cast<uint32_t*>(ints(w.taken));
  plan.flag_count = launches;
  plan.rows = kMoeTallTile;
  plan.most_tiles = tiles;
  check_launch("the plan of the experts", launch_moe_plan(plan, dependent, call.stream));

  MoeTallGatherParams gather{};
  gather.x = static_cast<const uint16_t*>(a.x.const_data_ptr()) + first * a.x_stride;
  gather.x_stride = a.x_stride;
  gather.x_dtype = call.dtype;
  gather.weights = call.weight_on_input
                       ? static_cast<const float*>(a.weights.const_data_ptr()) + first * a.top_k
                       : nullptr;
  gather.suh = call.w13_suh;
  gather.routing = routing;
  gather.image = workspace + w.image;
  gather.image_bytes = tiles * image_bytes(a.k, kMoeTallTile);
  gather.k = static_cast<int>(a.k);
  gather.k_in = static_cast<int>(a.k_in);
  gather.by_slots = Divisor::of(static_cast<uint32_t>(a.top_k));
  gather.blocks =
      static_cast<int>(std::min<int64_t>(int64_t{tiles} * (a.k / 128), 3 * call.multiprocessors));
  check_launch("gathering the experts' rows",
               launch_moe_tall_gather(gather, dependent, call.stream));

  const auto* table = static_cast<const int64_t*>(a.table.const_data_ptr());
  for (int index = 0; index < launches; ++index) {
    const Product& product = call.products[index];
    const MoeKind& kind = a.kinds[product.kind];
    const bool down = product.projection == kDown;
    MoeTallParams gemm{};
    gemm.pair = !down;
    gemm.weights = down ? call.w2 : call.w13;
    for (int half = 0; half < (down ? 1 : 2); ++half) {
      gemm.table[half] = table + (product.projection + half) * a.experts * 2;
      gemm.svh[half] = down ? call.w2_svh : call.w13_svh + half * a.inner;
      gemm.image[half] =
          down ? workspace + w.next_image : workspace + w.image + half * gather.image_bytes;
    }
    gemm.svh_stride = down ? a.n : 2 * a.inner;
    const int list = call.lists == 1 ? 0 : index;
    gemm.list = routing.lists + int64_t{list} * tiles;
    gemm.list_count = routing.list_counts + list;
    gemm.counts = routing.counts;
    gemm.row_pair = routing.row_pair;
    gemm.k = static_cast<int>(down ? a.inner : a.k);
    gemm.strips = static_cast<int>((down ? a.n : a.inner) / 128);
    gemm.next_image = workspace + w.next_image;
    gemm.next_suh = call.w2_suh;
    const Gate gate = gate_of(a.activation);
    gemm.slope = gate.slope;
    gemm.cubic = gate.cubic;
    gemm.beta = a.activation.beta;
    gemm.limit = a.activation.limit;
    gemm.inner_begin = static_cast<int>(a.inner_begin);
    gemm.inner_end = static_cast<int>(a.inner_begin + a.inner_size);
    gemm.aside = floats(w.aside);
    gemm.out = workspace + w.out;
    gemm.short_rows = short_rows;
    gemm.out_stride = a.n;
    gemm.taken = plan.flags + index;
    gemm.blocks = call.choice.blocks;
    gemm.constants = constants_of(kind.codebook);
    const MoeTallLaunch launch{family_of(kind), dependent, call.stream};
    check_launch("a product of the experts", with_rate(kind.tile_words / 8, [&](auto rate) {
                   return launch_moe_tall<decltype(rate)::half_bits>(gemm, launch);
                 }));
  }

  MoeCombineParams combine = combine_of(call, first, tokens, y);
  combine.rows = workspace + w.out;
  combine.short_rows = short_rows;
  check_launch("adding the experts' rows", launch_moe_combine(combine, dependent, call.stream));
}

}  // namespace exl3::ops
