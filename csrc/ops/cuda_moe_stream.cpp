// The routed experts of few tokens on CUDA: three launches.
#include "linear/rates.h"
#include "moe/moe_stream.h"
#include "ops/cuda_moe.h"

namespace exl3::ops {
namespace {

using torch::headeronly::ScalarType;

// Gate and up, or down.
void launch_product(const Call& call, const MoeKind& kind, MoeStreamParams& params,
                    int input_bytes) {
  params.constants = constants_of(kind.codebook);
  const MoeStreamLaunch launch{call.choice.form == 1 ? Form::kFast : Form::kExact, family_of(kind),
                               input_bytes, call.dependent, call.stream};
  check_launch(params.down ? "the experts' down projections" : "the experts' gates",
               with_rate(kind.tile_words / 8, [&](auto rate) {
                 return launch_moe_stream<decltype(rate)::half_bits>(params, launch);
               }));
}

}  // namespace

void run_stream(const Call& call, int64_t first, int64_t tokens, uint8_t* workspace, uint16_t* y) {
  const MoeArguments& a = call.a;
  const MoeChoice& choice = call.choice;
  const MoeStreamWorkspace w = moe_stream_workspace(call.shape, choice, tokens);
  const auto sums = [&](int64_t partials, int64_t ends) -> MoeStreamSums {
    return {reinterpret_cast<float*>(workspace + partials),
            reinterpret_cast<float*>(workspace + ends)};
  };
  const bool wide = a.ids.scalar_type() == ScalarType::Long;
  const int64_t first_pair = first * a.top_k;
  const MoeIds ids{
      static_cast<const uint8_t*>(a.ids.const_data_ptr()) + first_pair * (wide ? 8 : 4),
      wide,
      a.map.has_value() ? static_cast<const int*>(a.map->const_data_ptr()) : nullptr,
      static_cast<int>(tokens * a.top_k),
      static_cast<int>(a.experts),
      static_cast<int>(a.global_experts),
      choice.rows};
  const float* weights = static_cast<const float*>(a.weights.const_data_ptr()) + first_pair;
  const auto* table = static_cast<const int64_t*>(a.table.const_data_ptr());

  MoeStreamParams gate_up{};
  gate_up.ids = ids;
  gate_up.work = MoeStreamWork::of(a.k, a.inner, 2, choice.blocks);
  gate_up.weights = call.w13;
  gate_up.table[0] = table;
  gate_up.table[1] = table + a.experts * 2;
  gate_up.suh = call.w13_suh;
  gate_up.to = sums(w.gate_up_sums, w.gate_up_ends);
  gate_up.input = {static_cast<const uint16_t*>(a.x.const_data_ptr()) + first * a.x_stride,
                   a.x_stride, call.dtype, 0, static_cast<int>(a.k_in)};
  gate_up.pair_weights = call.weight_on_input ? weights : nullptr;
  gate_up.by_slots = Divisor::of(static_cast<uint32_t>(a.top_k));
  launch_product(call, a.kinds[call.products.front().kind], gate_up, w.gate_up_inputs);

  MoeStreamParams down{};
  down.down = true;
  down.ids = ids;
  down.work = MoeStreamWork::of(a.inner, a.n, 1, choice.blocks);
  down.weights = call.w2;
  down.table[0] = table + int64_t{kDown} * a.experts * 2;
  down.suh = call.w2_suh;
  down.to = sums(w.down_sums, w.down_ends);
  down.before = gate_up.work;
  down.from = gate_up.to;
  down.svh = call.w13_svh;
  down.activation = a.activation;
  down.inner_begin = static_cast<int>(a.inner_begin);
  down.inner_end = static_cast<int>(a.inner_begin + a.inner_size);
  launch_product(call, a.kinds[call.products.back().kind], down, w.down_inputs);

  MoeFinishParams finish{};
  finish.ids = ids;
  finish.work = down.work;
  finish.from = down.to;
  finish.svh = call.w2_svh;
  finish.weights = call.weight_on_input ? nullptr : weights;
  finish.out = y + first * a.n_out;
  finish.out_dtype = call.dtype;
  finish.tokens = static_cast<int>(tokens);
  finish.top_k = a.top_k;
  finish.n_out = static_cast<int>(a.n_out);
  check_launch("adding the experts' rows", launch_moe_finish(finish, call.dependent, call.stream));
}

}  // namespace exl3::ops
