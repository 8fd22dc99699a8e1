"""Cuts, spans and replication: every rank's share of a layer, put together, is the whole layer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plugin_models import exl3_linear, plain_linear

from exl3_plugin import loading
from exl3_plugin.linear import Exl3LinearMethod
from exl3_plugin.report import LoadRecord
from exl3_plugin.shards import (
    Cut,
    Member,
    ShardingError,
    check_tensor_parallel,
    covering,
    lay_out,
    lay_out_head,
)

ROWS = 5


def as_module(name, stored):
    """What checkpoint.Module says of a stored linear."""
    tensors = {s: SimpleNamespace(name=f"{name}.{s}", shape=t.shape) for s, t in
               stored.tensors.items()}  # fmt: skip
    if "trellis" not in stored.tensors:
        n, k = stored.tensors["weight"].shape
        return SimpleNamespace(
            name=name, kind="plain", k=k, n=n, k_true=None, n_true=None, tensors=tensors
        )
    shape = stored.tensors["trellis"].shape
    codebook = next((c for c in ("mcg", "mul1") if c in stored.tensors), "3inst")
    k, n = 16 * shape[0], 16 * shape[1]
    return SimpleNamespace(
        name=name, kind="exl3", k=k, n=n, k_true=None, n_true=None, codebook=codebook,
        tensors=tensors,
    )  # fmt: skip


def config() -> SimpleNamespace:
    """As much of an Exl3Config as the methods use."""
    return SimpleNamespace(record=LoadRecord(None, None, self_test=False))


def run_rank(stored, shard_ids, x, *, sizes, k, k_rank, rank, tp, replicas=None, dtype=None):
    """Build one rank's layer as vLLM does, load it, apply it to this rank's part of x."""
    modules = [as_module(f"layer.{i}", one) for i, one in enumerate(stored)]
    layout = lay_out(
        "layer",
        [loading.member(module) for module in modules],
        partition_sizes=sizes,
        input_size=k,
        input_size_per_rank=k_rank,
        tp_rank=rank,
        tp_size=tp,
        replicas=replicas,
    )
    layer = torch.nn.Module()
    loading.create_parameters(layer, layout, modules, torch.float32)
    for one, shard in zip(stored, shard_ids):
        for suffix, tensor in one.tensors.items():
            param = getattr(layer, suffix)
            param.weight_loader(param, torch.from_numpy(np.asarray(tensor)), shard)
    loading.finish(layer, "layer")
    start = rank * k_rank if k_rank != k else 0
    method = Exl3LinearMethod(config(), "layer", modules)
    part = torch.from_numpy(x[:, start : start + k_rank]).to(dtype or torch.float32)
    return method.apply(layer, part).double().numpy(), layer


def close(found, expected, tolerance=2e-5):
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < tolerance, error


@pytest.mark.parametrize("tp", [1, 2, 4, 5, 8])
def test_columns_of_all_ranks_make_the_whole_layer(tp):
    rng = np.random.default_rng(tp)
    gate, up = (exl3_linear(rng, 256, 640, c, b) for c, b in (("mul1", 2.5), ("3inst", 4)))
    x = rng.standard_normal((ROWS, 256))
    outs = [
        run_rank([gate, up], [0, 1], x, sizes=[640 // tp] * 2, k=256, k_rank=256, rank=r, tp=tp)[0]
        for r in range(tp)
    ]
    width = 640 // tp
    close(np.concatenate([o[:, :width] for o in outs], 1), x @ gate.dense)
    close(np.concatenate([o[:, width:] for o in outs], 1), x @ up.dense)


@pytest.mark.parametrize("tp", [1, 2, 4, 5, 10])
def test_rows_of_all_ranks_sum_to_the_whole_layer(tp):
    rng = np.random.default_rng(tp)
    down = exl3_linear(rng, 640, 192, "mcg", 3)
    x = rng.standard_normal((ROWS, 640))
    outs = [
        run_rank([down], [None], x, sizes=[192], k=640, k_rank=640 // tp, rank=r, tp=tp,
                 replicas=[tp])[0]
        for r in range(tp)
    ]  # fmt: skip
    close(sum(outs), x @ down.dense)


def test_a_rank_holds_the_covering_blocks_only():
    rng = np.random.default_rng(0)
    down = exl3_linear(rng, 640, 256, "mcg", 4)
    x = rng.standard_normal((1, 640))
    _, layer = run_rank([down], [None], x, sizes=[256], k=640, k_rank=320, rank=0, tp=2)
    assert layer.trellis.numel() == 384 // 16 * 256 // 16 * 64  # rows 0..384 of 640
    assert layer.suh.shape == (1, 384)


@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 2), (2, 1), (4, 2), (4, 1), (8, 2)])
def test_key_value_heads_are_cut_or_shared(tp, kv_heads):
    rng = np.random.default_rng(tp)
    q = exl3_linear(rng, 128, 8 * 64, "mul1", 4)
    k = exl3_linear(rng, 128, kv_heads * 64, "mcg", 6)
    v = plain_linear(rng, 128, kv_heads * 64)
    x = rng.standard_normal((ROWS, 128))
    shared = max(tp // kv_heads, 1)
    own = max(kv_heads // tp, 1) * 64
    sizes = [8 * 64 // tp, own, own]
    for rank in range(tp):
        out, _ = run_rank([q, k, v], ["q", "k", "v"], x, sizes=sizes, k=128, k_rank=128, rank=rank,
                          tp=tp, replicas=[1, shared, shared])  # fmt: skip
        first_q, first = rank * sizes[0], rank // shared * own
        expected = [
            (x @ q.dense)[:, first_q : first_q + sizes[0]],
            (x @ k.dense)[:, first : first + own],
            (x @ v.dense)[:, first : first + own],
        ]
        close(out, np.concatenate(expected, 1))


def test_a_qkv_layer_says_how_many_ranks_share_a_head():
    """Two heads of 64 on four ranks: by stored width alone, ranks 2 and 3 would get head 0."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    rng = np.random.default_rng(11)
    stored = [exl3_linear(rng, 128, n, "mul1", 4) for n in (512, 128, 128)]
    modules = [as_module(f"layer.{name}", one) for name, one in zip("qkv", stored)]
    starts = []
    for rank in range(4):
        layer = QKVParallelLinear.__new__(QKVParallelLinear)
        torch.nn.Module.__init__(layer)
        layer.tp_rank, layer.tp_size, layer.num_kv_head_replicas = rank, 4, 2
        method = Exl3LinearMethod(config(), "layer", modules)
        method.create_weights(layer, 128, [128, 64, 64], 128, 1024, torch.float32)
        starts.append([s.columns.first + s.columns.begin for s in layer.exl3.layout.segments])
    assert starts == [[0, 0, 0], [128, 0, 0], [256, 64, 64], [384, 64, 64]]


def test_replicated_members_of_a_sharded_layer_are_whole_on_every_rank():
    """Latent projections fused with a sharded gate: the stored width shows which is which."""
    rng = np.random.default_rng(3)
    latent, gate = exl3_linear(rng, 128, 192, "mul1", 4), exl3_linear(rng, 128, 512, "mul1", 4)
    x = rng.standard_normal((ROWS, 128))
    for rank in range(2):
        out, _ = run_rank([latent, gate], [0, 1], x, sizes=[192, 256], k=128, k_rank=128, rank=rank,
                          tp=2)  # fmt: skip
        gated = (x @ gate.dense)[:, 256 * rank : 256 * (rank + 1)]
        close(out, np.concatenate([x @ latent.dense, gated], 1))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stored_fused_tensor_covers_several_outputs(tp):
    """Qwen3.5's in_proj_qkv is one stored tensor, but three of the four outputs of in_proj_qkvz."""
    rng = np.random.default_rng(4)
    qkv, z = exl3_linear(rng, 128, 256 + 256 + 512, "mcg", 3), exl3_linear(rng, 128, 512, "mcg", 4)
    x = rng.standard_normal((ROWS, 128))
    sizes = [256 // tp, 256 // tp, 512 // tp, 512 // tp]
    for rank in range(tp):
        out, layer = run_rank([qkv, z], [(0, 1, 2), 3], x, sizes=sizes, k=128, k_rank=128,
                              rank=rank, tp=tp)  # fmt: skip
        full, columns, at = x @ qkv.dense, [], 0
        for whole, size in zip((256, 256, 512), sizes):
            columns.append(full[:, at + rank * size : at + (rank + 1) * size])
            at += whole
        columns.append((x @ z.dense)[:, rank * sizes[3] : (rank + 1) * sizes[3]])
        close(out, np.concatenate(columns, 1))
        # Neighbouring columns of one tensor are one piece: uncut, each tensor is decoded once.
        assert len(layer.exl3.shards) // 5 == (2 if tp == 1 else 4)


def test_legacy_signs_and_padding():
    rng = np.random.default_rng(5)
    old = exl3_linear(rng, 200, 72, "3inst", 2, legacy=True)
    x = rng.standard_normal((ROWS, 200))
    out, layer = run_rank([old], [None], x, sizes=[72], k=200, k_rank=200, rank=0, tp=1)
    assert out.shape == (ROWS, 72)
    close(out, x @ old.dense)
    assert sorted(name for name, _ in layer.named_parameters()) == ["suh", "svh", "trellis"]


@pytest.mark.parametrize("vocab", [384, 512, 300])
def test_head_ranks_make_the_whole_vocabulary(vocab):
    rng = np.random.default_rng(vocab)
    head = exl3_linear(rng, 128, vocab, "mul1", 6)
    module = as_module("lm_head", head)
    x = rng.standard_normal((ROWS, 128))
    padded = -(-vocab // 256) * 256
    outs = []
    for rank in range(2):
        layout = lay_out_head("lm_head", loading.member(module), vocab_start=rank * padded // 2,
                              columns=padded // 2, input_size=128, vocab=vocab)  # fmt: skip
        layer = torch.nn.Module()
        loading.create_parameters(layer, layout, [module], torch.float32)
        for suffix, tensor in head.tensors.items():
            param = getattr(layer, suffix)
            param.weight_loader(param, torch.from_numpy(np.asarray(tensor)))
        loading.finish(layer, "lm_head")
        part = torch.from_numpy(x).float()
        outs.append(Exl3LinearMethod(config(), "lm_head", [module]).apply(layer, part))
    logits = torch.cat(outs, 1).double().numpy()
    close(logits[:, :vocab], x @ head.dense)
    stored = -(-vocab // 128) * 128
    assert (logits[:, stored:] == 0).all()


def test_mla_can_ask_for_the_dense_weight():
    """vLLM's MLA finds `kv_b_proj` by an attribute `qweight` and multiplies with an identity."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        get_and_maybe_dequant_weights,
    )

    rng = np.random.default_rng(9)
    stored = exl3_linear(rng, 256, 192, "mcg", 5)
    _, layer = run_rank([stored], [None], rng.standard_normal((1, 256)), sizes=[192], k=256,
                        k_rank=256, rank=0, tp=1)  # fmt: skip
    assert layer.qweight.device == layer.trellis.device and not hasattr(layer, "weight")
    layer.quant_method = Exl3LinearMethod(config(), "layer", layer.exl3.modules)
    layer.input_size_per_partition = 256
    close(get_and_maybe_dequant_weights(layer).double().numpy(), stored.dense.T)


def test_vllm_layers_of_every_kind(tmp_path):
    """Built by vLLM's own classes: what they tell a quantisation method is enough to cut by."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.model_executor.layers import linear

    from exl3_plugin.config import Exl3Config

    rng = np.random.default_rng(10)
    sizes = {"one": (192, 320), "down": (320, 192), "q_proj": (192, 256), "k_proj": (192, 64),
             "v_proj": (192, 64), "gate_proj": (192, 320), "up_proj": (192, 320)}  # fmt: skip
    stored = {name: exl3_linear(rng, k, n, "mul1", 4) for name, (k, n) in sizes.items()}
    config = Exl3Config()
    config.checkpoint = SimpleNamespace(
        config={}, path=tmp_path, modules={name: as_module(name, s) for name, s in stored.items()}
    )
    config.aliases = {name: name for name in stored}
    x = rng.standard_normal((ROWS, 320))
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        arguments = {"bias": False, "quant_config": config, "return_bias": False}
        layers = {
            ("one",): linear.ReplicatedLinear(192, 320, prefix="one", **arguments),
            ("one", "again"): linear.ColumnParallelLinear(192, 320, prefix="one", **arguments),
            ("down",): linear.RowParallelLinear(320, 192, prefix="down", **arguments),
            ("q_proj", "k_proj", "v_proj"): linear.QKVParallelLinear(
                192, 64, 4, 1, prefix="qkv_proj", **arguments
            ),
            ("gate_proj", "up_proj"): linear.MergedColumnParallelLinear(
                192, [320, 320], prefix="gate_up_proj", **arguments
            ),
        }
    for names, layer in layers.items():
        members = [name for name in names if name in stored]
        shards = ("q", "k", "v") if len(members) == 3 else (0, 1) if len(members) == 2 else (None,)
        for name, shard in zip(members, shards):
            for suffix, tensor in stored[name].tensors.items():
                param = getattr(layer, suffix)
                param.weight_loader(param, torch.from_numpy(np.asarray(tensor)), shard)
        layer.quant_method.process_weights_after_loading(layer)
        k = stored[members[0]].dense.shape[0]
        out = layer(torch.from_numpy(x[:, :k]).float()).double().numpy()
        close(out, np.concatenate([x[:, :k] @ stored[name].dense for name in members], 1))
    destroy_model_parallel()
    destroy_distributed_environment()


def test_apply_compiles_without_graph_breaks():
    rng = np.random.default_rng(6)
    members = [exl3_linear(rng, 128, 128, "mul1", 4), plain_linear(rng, 128, 64)]
    x = rng.standard_normal((ROWS, 128))
    eager, layer = run_rank(members, [0, 1], x, sizes=[128, 64], k=128, k_rank=128, rank=0, tp=1)
    method = Exl3LinearMethod(config(), "layer", layer.exl3.modules)
    compiled = torch.compile(method.apply, fullgraph=True, backend="eager", dynamic=True)
    out = compiled(layer, torch.from_numpy(x).float()).double().numpy()
    assert (out == eager).all()


def test_covering():
    assert covering(0, 64) == Cut(0, 128, 0, 64)
    assert covering(64, 64) == Cut(0, 128, 64, 64)
    assert covering(320, 320) == Cut(256, 640, 64, 320)
    assert covering(128, 256) == Cut(128, 384, 0, 256)


def test_sizes_that_contradict_the_model_are_named():
    member = Member("model.layers.3.mlp.down_proj", "exl3", k=640, n=256, words=64)
    facts = {"partition_sizes": [256], "tp_rank": 0, "tp_size": 1}
    with pytest.raises(ShardingError, match=r"layers\.3\.mlp\.down_proj stores 640 input rows"):
        lay_out("down", [member], input_size=512, input_size_per_rank=512, **facts)
    facts["partition_sizes"] = [512]
    with pytest.raises(ShardingError, match=r"stores 256 output columns.*expects 512"):
        lay_out("down", [member], input_size=640, input_size_per_rank=640, **facts)


def test_a_tensor_that_was_not_loaded_is_named():
    rng = np.random.default_rng(7)
    stored = exl3_linear(rng, 128, 128, "mul1", 4)
    del stored.tensors["svh"]
    module = as_module("model.layers.0.mlp.down_proj", stored)
    module.tensors["svh"] = SimpleNamespace(name=f"{module.name}.svh", shape=(128,))
    layout = lay_out("down", [loading.member(module)], partition_sizes=[128], input_size=128,
                     input_size_per_rank=128, tp_rank=0, tp_size=1)  # fmt: skip
    layer = torch.nn.Module()
    loading.create_parameters(layer, layout, [module], torch.float32)
    for suffix, tensor in stored.tensors.items():
        param = getattr(layer, suffix)
        param.weight_loader(param, torch.from_numpy(np.asarray(tensor)))
    with pytest.raises(
        loading.LoadError, match=r"not loaded: model\.layers\.0\.mlp\.down_proj\.svh"
    ):
        loading.finish(layer, "down")


def test_a_tensor_of_another_shape_is_refused():
    rng = np.random.default_rng(8)
    stored = exl3_linear(rng, 128, 128, "mul1", 4)
    _, layer = run_rank([stored], [None], rng.standard_normal((1, 128)), sizes=[128], k=128,
                        k_rank=128, rank=0, tp=1)  # fmt: skip
    with pytest.raises(loading.LoadError, match=r"passed \[256\], the checkpoint holds \[128\]"):
        layer.suh.weight_loader(layer.suh, torch.zeros(256, dtype=torch.float16))


def checkpoint_of(heads, kv_heads, wide):
    names = {
        "model.layers.0.self_attn.q_proj": (256, heads * 64),
        "model.layers.0.self_attn.k_proj": (256, kv_heads * 64),
        "model.layers.0.mlp.gate_proj": (256, wide),
        "model.layers.0.mlp.down_proj": (wide, 256),
        "mtp.layers.0.mlp.down_proj": (7, 256),
    }
    modules = {
        name: SimpleNamespace(kind="exl3", k=k, n=n, k_true=k, n_true=n)
        for name, (k, n) in names.items()
    }
    config = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return SimpleNamespace(config=config, modules=modules)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tensor_parallel_sizes_that_divide_pass(tp):
    check_tensor_parallel(checkpoint_of(8, 2, 640), tp)


def test_a_tensor_parallel_size_that_cannot_work_names_tensor_size_and_what_would():
    with pytest.raises(ShardingError) as error:
        check_tensor_parallel(checkpoint_of(8, 2, 321 * 2), 4)
    text = str(error.value)
    assert text.startswith("model.layers.0.mlp.gate_proj: 642 output columns")
    assert "among 4 ranks" in text and text.endswith("checkpoint: 1, 2")
    with pytest.raises(ShardingError, match=r"q_proj: 8 attention heads.* 3 ranks"):
        check_tensor_parallel(checkpoint_of(8, 2, 640), 3)
