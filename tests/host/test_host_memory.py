"""KV cost, weights per rank, the GPU verdict and what a start teaches, against figures of others.

Truth: sums done by hand from vLLM's layout, pools that people reported for real models on real
cards, vLLM's own log lines, and tensors that safetensors itself wrote.
"""

import re
from pathlib import Path

import pytest
from exl3_host import fit_gpu, headers, kv, learned
from exl3_host.errors import HostError

GIB = 2**30
# The published configs, as far as memory goes.
QWEN36_35B = {
    "text_config": {
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_size": 2048,
        "full_attention_interval": 4,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
}
GLM53_FLASH = {
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "index_head_dim": 128,
    "index_kpool": 16,
    "linear_num_heads": 64,
    "linear_head_dim": 128,
    "hidden_size": 4096,
}
LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}


@pytest.mark.parametrize(
    ("changes", "tp", "dtype", "each"),
    [
        # 2 (K and V) x 32 layers x 8 heads x 128 x 2 bytes
        ({}, 1, "auto", 131072),
        ({}, 4, "bf16", 32768),
        ({}, 1, "fp8", 65536),
        # More ranks than KV heads: each holds one whole head.
        ({}, 16, "auto", 16384),
        ({"head_dim": 256}, 1, "auto", 262144),
        ({"v_head_dim": 64, "head_dim": 128}, 1, "auto", 98304),
    ],
)
def test_plain_attention_is_exact(changes: dict, tp: int, dtype: str, each: int) -> None:
    cost = kv.cost({**LLAMA_8B, **changes}, tp, dtype)
    assert cost.token == (each, each) and cost.request == (0, 0)
    assert cost.tokens(GIB, 4096) == (GIB // each, GIB // each)
    assert cost.tokens(-1.0, 4096) == (0, 0)


def test_a_latent_row_is_whole_on_every_rank() -> None:
    deepseek = {
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    # 61 x 576 x 2 bytes, whatever tp is; the packed record has 656 bytes.
    assert kv.cost(deepseek, 1).token == kv.cost(deepseek, 8).token == (70272, 70272)
    assert kv.cost(deepseek, 8, "fp8_ds_mla").token == (61 * 656, 61 * 656)


def test_sliding_windows_cost_once_per_request() -> None:
    gemma = {
        **LLAMA_8B,
        "num_hidden_layers": 4,
        "sliding_window": 1024,
        "sliding_window_pattern": 4,
    }
    cost = kv.cost(gemma, max_model_len=32768, batched_tokens=2048)
    # A layer's row is 2 x 8 x 128 x 2 = 4,096 bytes; one layer grows, three hold the window.
    assert cost.token == (4096, 4096) and cost.kinds == {"full": 1, "sliding": 3}
    assert cost.request == (3 * 4096 * 1024, 3 * 4096 * (1024 + 2048 + 256))
    short = kv.cost(gemma, max_model_len=512)
    assert short.request == (3 * 4096 * 512, 3 * 4096 * 512)
    listed = {**gemma, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    del listed["sliding_window_pattern"]
    assert kv.cost(listed, max_model_len=32768, batched_tokens=2048) == cost


def test_hybrid_model_holds_what_was_reported() -> None:
    # Two checkpoints of Qwen3.6-35B-A3B at 8,192 + 1,024 tokens, bf16 cache, one card:
    # 65.44 GiB gave 2.56 million tokens, 51.59 GiB gave 2.02 million.
    cost = kv.cost(QWEN36_35B, max_model_len=9216)
    assert cost.kinds == {"full": 10, "linear": 30}
    assert cost.token[0] == 2 * 10 * 2 * 256 * 2
    for pool, reported in ((65.44, 2_560_000), (51.59, 2_020_000)):
        least, most = cost.tokens(pool * GIB, 9216)
        assert least < reported < most < 1.5 * least


@pytest.mark.parametrize(
    ("tp", "dtype", "length", "pool", "reported"),
    [
        (4, "auto", 131072, 36.0, 1_800_000),
        (4, "fp8", 131072, 36.0, 3_000_000),
        (2, "fp8_ds_mla", 16384, 6.5, 382_000),
    ],
)
def test_latent_hybrid_holds_what_was_reported(tp, dtype, length, pool, reported) -> None:
    cost = kv.cost(GLM53_FLASH, tp, dtype, max_model_len=length, has_draft=True)
    assert cost.kinds == {"latent": 11, "linear": 34}
    least, most = cost.tokens(pool * GIB, length)
    assert least < reported < most


@pytest.mark.parametrize(
    "strange",
    [
        {},
        {"num_hidden_layers": 2, "num_attention_heads": 4, "mamba_d_state": 16},
        {**LLAMA_8B, "layer_types": ["something_new"] * 32},
        {**LLAMA_8B, "layer_types": ["full_attention"] * 3},
        {"num_hidden_layers": 2, "num_attention_heads": 4},
    ],
)
def test_what_is_not_understood_has_no_figure(strange: dict) -> None:
    assert kv.cost(strange) is None


def test_a_real_start_agrees_with_the_formula() -> None:
    log = Path(__file__).with_name("data") / "boot-vllm-0.32.0-cpu.log"
    boot = learned.read_boot(log.read_text())
    assert boot == learned.Boot(524288, "cpu", 256, 1.0, None, "0.32.0")
    # tests/fixtures/tiny-llama-mul1-2.5: 2 layers, 2 KV heads of 64, served in float32.
    tiny = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    cost = kv.cost(tiny, element_bytes=4)
    assert cost.tokens(boot.pool_gib * GIB, 256) == (boot.tokens, boot.tokens)


def vllm_lines() -> dict[str, str]:
    """The format strings of the installed vLLM, so that another release is noticed."""
    import importlib.util

    root = Path(importlib.util.find_spec("vllm").origin).parent
    core = (root / "v1/core/kv_cache_utils.py").read_text()
    worker = (root / "v1/worker/gpu_worker.py").read_text()
    runner = (root / "v1/worker/gpu_model_runner.py").read_text()
    engine = (root / "v1/engine/core.py").read_text()
    tokens = re.search(r'"(%s KV cache size: %s tokens, )"\s*"(Maximum concurrency[^"]*)"', core)
    return {
        "start": re.search(r'"(Initializing a V1 LLM engine [^"]*)"', engine)[1],
        "pool": re.search(r'"(Available KV cache memory: %s GiB)"', worker)[1],
        "weights": re.search(r'"(Model loading took %s GiB memory[^"]*)"', runner)[1],
        "tokens": tokens[1] + tokens[2],
    }


def boot_text(tokens: str, pools: list[str], weights: list[str], version: str = "0.33.0") -> str:
    line = vllm_lines()
    out = [line["start"] % (version, "model='x'")]
    out += [line["weights"] % (w, 12.5) for w in weights] + [line["pool"] % p for p in pools]
    out.append(line["tokens"] % ("GPU", tokens, "131,072", 3.05))
    return "".join(f"(Worker pid=1) INFO 11-30 06:00:00 [x.py:1] {one}\n" for one in out)


def test_the_last_start_of_a_log_counts() -> None:
    first = boot_text("100", ["1.0"], ["2.0"], "0.32.0")
    second = boot_text("400,384", ["30.5", "29.25"], ["44.7", "44.1"])
    boot = learned.read_boot(first + "killed\n" + second)
    assert boot == learned.Boot(400384, "gpu", 131072, 29.25, 44.7, "0.33.0")
    assert learned.read_boot("INFO nothing about a cache") is None
    # A release that prints two lines, and a GB figure.
    old = "Model loading took 10.7374 GB and 3 seconds\nGPU KV cache size: 5,066,556 tokens\n"
    found = learned.read_boot(old)
    assert (found.tokens, round(found.weights_gib, 3)) == (5066556, 10.0)


def plan(folder: str, length: int = 131072, budget: str = "0.9") -> dict:
    argv = ["vllm", "serve", folder, "--tensor-parallel-size", "4", f"--max-model-len={length}"]
    argv += ["--gpu-memory-utilization", budget]
    return {
        "model": {"dir": folder},
        "profile": "rtx_pro_6000_x4",
        "serve": {"argv": argv, "env": {}},
    }


def test_a_start_is_kept_under_its_key(tmp_path: Path) -> None:
    one = plan("/store/models/glm-0123")
    assert learned.learn(tmp_path, one, "no cache here") is None
    assert learned.learn(tmp_path, one, boot_text("400,384", ["30.5"], ["44.7"])).tokens == 400384
    key = learned.key_of(one)
    assert (key["tp"], key["max_model_len"], key["budget"]) == (4, 131072, "0.9")
    assert learned.exact(tmp_path, key)["tokens"] == 400384
    again = learned.read_boot(boot_text("400,384", ["30.5"], ["44.7"]))
    assert learned.record(tmp_path, key, again) is False, "nothing new"
    longer = learned.key_of(plan("/store/models/glm-0123", 262144))
    assert learned.exact(tmp_path, longer) is None
    least, most = learned.cost_of(learned.similar(tmp_path, longer)).token
    assert least < 30.5 * GIB / 400384 < most
    other = learned.key_of(plan("/store/models/another", 262144))
    assert learned.similar(tmp_path, other) is None
    (tmp_path / learned.FILE).write_text('{"schema": "something else"}')
    assert learned.exact(tmp_path, key) is None


def test_a_plan_finds_what_its_own_start_taught(checkout: Path, tmp_path: Path) -> None:
    """The key of a finished plan is the key that fit asks for before there is a plan."""
    from exl3_host import fit_recipe, plan, sources
    from exl3_host.instance import Instance
    from exl3_host.recipe import load_recipe
    from gpu_host import look
    from known_hosts import known_host

    loaded = load_recipe(checkout / "recipes/glm-5.3-flash-exl3-4bpw.yaml")
    facts = {**look(tmp_path / "host", known_host("f01")), "arch": "x86_64"}
    made = plan.make_plan(loaded, facts, Instance("glm", str(tmp_path), "/opt/venv"))
    profile = loaded.recipe.profiles[made["profile"]]
    folder = Path(sources.model_dir(loaded, str(tmp_path)))
    key = fit_recipe.key_of_profile(loaded, made["profile"], profile, folder)
    assert learned.key_of(made) == key
    learned.learn(tmp_path, made, boot_text("1,800,000", ["36.0"], ["44.7"]))
    verdict = fit_recipe.verdict(
        loaded, profile, facts, None, model_dir=folder, store=tmp_path, key=key
    )
    assert verdict["kv_tokens"] == [1_800_000, 1_800_000]
    assert any("44.70 GiB per rank (as loaded on" in line for line in verdict["lines"])
    # Twice the context: the same weights, and about the same bytes per token.
    longer = fit_recipe.key_of_profile(loaded, made["profile"], profile, folder, 262144)
    other = fit_recipe.verdict(
        loaded, profile, facts, None, model_dir=folder, store=tmp_path, key=longer,
        max_model_len=262144,
    )  # fmt: skip
    least, most = other["kv_tokens"]
    assert least < 1_800_000 < most < 1.5 * least


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "sharded"),
        ("lm_head.trellis", "sharded"),
        ("model.layers.0.self_attn.q_proj.trellis", "sharded"),
        ("model.layers.0.self_attn.k_proj.suh", "kv"),
        ("model.layers.0.input_layernorm.weight", "replicated"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "replicated"),
        ("model.layers.3.self_attn.indexer.wk.weight", "replicated"),
        ("model.layers.3.self_attn.q_b_proj.trellis", "sharded"),
        ("model.layers.3.mlp.gate.weight", "replicated"),
        ("model.layers.3.mlp.gate_proj.trellis", "sharded"),
        ("model.layers.3.mlp.experts.17.down_proj.trellis", "expert"),
        ("model.layers.0.linear_attn.in_proj_qkv.trellis", "linear"),
        ("model.visual.blocks.0.attn.qkv.weight", "vision"),
        ("mtp.layers.0.self_attn.q_proj.trellis", "draft"),
    ],
)
def test_tensors_by_name(name: str, kind: str) -> None:
    assert headers.classify(name) == kind


def test_weights_per_rank_by_hand() -> None:
    weights = headers.weigh(
        [
            ("model.layers.0.self_attn.q_proj.trellis", 800),
            ("model.layers.0.self_attn.k_proj.trellis", 80),
            ("model.layers.0.input_layernorm.weight", 10),
            ("model.layers.1.self_attn.q_proj.trellis", 4000),
            ("visual.merger.weight", 40),
        ],
        draft_layer=1,
    )
    assert weights.total == 4930 and weights.classes["draft"] == 4000
    config = {"num_key_value_heads": 2}
    # Four ranks: 800/4, the two KV heads halve 80, the norm is whole; vision 40/4 or whole.
    least, most = weights.per_rank(config, 4)
    assert least == 200 + 40 + 10 + 10
    assert most == pytest.approx((200 + 40 + 10) * 1.01 + 40 + 4000)
    assert weights.per_rank(config, 4, has_draft=True)[0] == least + 1000


def test_a_latent_hybrid_by_its_published_sizes() -> None:
    """GLM-5.3-Flash, routed experts alone at 4 bits: 80.72 GiB a rank were reported at TP 2."""
    layers, hidden, experts, inner = 45, 4096, 288, 2048
    moe = (layers - 3) * experts * 3 * hidden * inner // 2
    linear = 34 * 4 * hidden * 64 * 128 * 2
    latent_down = 11 * hidden * (1536 + 512) * 2
    # 164 GB in all; what is not named above (heads, shared experts, embeddings) is divided.
    rest = 164_000_000_000 - moe - linear - latent_down
    assert rest > 0
    weights = headers.Weights(
        {"expert": moe, "linear": linear, "replicated": latent_down, "sharded": rest}
    )
    least, most = weights.per_rank(GLM53_FLASH, 2)
    assert least / GIB < 80.72 < most / GIB
    assert most / least < 1.08


def test_real_headers(tmp_path: Path) -> None:
    import numpy
    from safetensors.numpy import save_file

    save_file(
        {
            "model.embed_tokens.weight": numpy.zeros((16, 8), numpy.float16),
            "model.norm.weight": numpy.zeros(8, numpy.float32),
        },
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    found = headers.weigh_folder(tmp_path, {})
    assert found.classes["sharded"] == 256 and found.classes["replicated"] == 32
    assert headers.weigh_folder(tmp_path / "none", {}) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(HostError, match=r"model\.safetensors has no safetensors header"):
        headers.weigh_folder(tmp_path, {})
    with pytest.raises(HostError, match="broken safetensors header"):
        headers.parse_header(b'{"x": {"dtype": "F16"}}', "here")


def ask(**changes) -> dict:
    values = {
        "tp": 1,
        "utilization": 0.9,
        "max_model_len": 32768,
        "total_gib": 100.0,
        "weights": (60.0, 62.0),
        "weights_source": "test",
        "overhead_gib": 5.0,
        "cost": kv.cost(LLAMA_8B),
    }
    return fit_gpu.check(fit_gpu.GpuRequest(**{**values, **changes}))


def test_the_budget_is_split() -> None:
    verdict = ask()
    # 90 - 62 - 5.75 and 90 - 60 - 4.25 GiB; 131,072 bytes a token are 8,192 tokens a GiB.
    assert verdict["ok"] and verdict["reasons"] == verdict["would_fit"] == []
    assert verdict["kv_tokens"] == [int(22.25 * 8192), int(25.75 * 8192)]
    assert any("22.25 to 25.75 GiB" in line for line in verdict["lines"])


def test_no_room_for_the_cache() -> None:
    verdict = ask(weights=(88.0, 90.0))
    assert verdict["reasons"] == [
        "weights and vLLM take 92.25 GiB per rank and 90.00 GiB are there: nothing is left for the "
        "KV cache"
    ]
    # 0.93 leaves 0.75 GiB, which is 6,144 tokens; 32,768 need 4 GiB.
    assert "tp: 2, on 2 such GPUs" in verdict["would_fit"]
    assert "a checkpoint with fewer bits per weight: 90% of this one's size" in " ".join(
        verdict["would_fit"]
    )


def test_two_ranks_of_a_model_that_was_reported_not_to_start() -> None:
    """GLM-5.3-Flash at TP 2: no cache blocks at 0.90; with 0.97 and a 16k context it served."""
    glm = {
        "tp": 2,
        "total_gib": 95.59,
        "weights": (80.72, 80.72),
        "overhead_gib": 5.5,
        "cost": kv.cost(GLM53_FLASH, 2, "fp8_ds_mla", max_model_len=16384),
        "kv_dtype": "fp8_ds_mla",
        "max_model_len": 16384,
    }
    refused = ask(**glm, utilization=0.90, min_kv_tokens=200_000)
    assert not refused["ok"] and "min_kv_tokens is 200,000" in refused["reasons"][0]
    served = ask(**glm, utilization=0.97, min_kv_tokens=200_000)
    assert served["ok"]
    assert served["kv_tokens"][0] < 382_000 < served["kv_tokens"][1]


def test_a_context_that_is_too_long_says_what_would_fit() -> None:
    verdict = ask(max_model_len=262144, min_kv_tokens=262144)
    assert verdict["reasons"] == [
        "the KV cache holds at most 210,944 tokens and max_model_len is 262,144"
    ]
    assert verdict["would_fit"][:2] == [
        "max_model_len: 131072 and a lower min_kv_tokens",
        "kv_cache_dtype: fp8",
    ]
    assert ask(max_model_len=131072)["ok"]
    assert ask(max_model_len=262144, cost=kv.cost(LLAMA_8B, kv_dtype="fp8"))["ok"]


def test_what_may_not_fit_is_a_warning() -> None:
    verdict = ask(min_kv_tokens=200_000)
    assert verdict["ok"]
    assert any(
        "may hold only 182,272 tokens, min_kv_tokens is 200,000" in x for x in verdict["lines"]
    )


def test_unified_memory_is_shared_with_the_host() -> None:
    # A GB10: 121.69 GiB, of which a user found about 102 available; 0.87 could not be reached.
    spark = {"total_gib": 121.69, "unified": True, "available_gib": 102.0, "weights": (20.0, 20.0)}
    verdict = ask(**spark, utilization=0.87)
    assert verdict["reasons"] == ["vLLM would take 105.87 GiB and 102.00 GiB are to be had"]
    assert verdict["would_fit"][0] == "utilization: 0.83"
    assert ask(**spark, utilization=0.83)["ok"]
    kept = ask(**spark, utilization=0.83, reserve_gib=12.0)
    assert kept["reasons"] == [
        "vLLM would take 101.00 GiB and 90.00 GiB are to be had with 12 GiB for the host"
    ]
    assert kept["would_fit"][0] == "utilization: 0.73"


def test_a_server_that_is_replaced_returns_its_share(checkout: Path, tmp_path: Path) -> None:
    """A GB10 whose 0.75 is held by the running server: 102 GiB were free before it started."""
    from exl3_host import fit_recipe
    from exl3_host.recipe import load_recipe

    loaded = load_recipe(checkout / "recipes/glm-5.3-flash-exl3-4bpw.yaml")
    profile = loaded.recipe.profiles["dgx_spark_x2"]
    total, free = int(121.69 * GIB), int((102 - 0.75 * 121.69) * GIB)
    facts = {
        "gpus": [{"compute_capability": "12.1", "memory_bytes": None, "uuid": "GPU-0"}],
        "memory": {"total_bytes": total, "available_bytes": free},
    }
    refused = fit_recipe.verdict(loaded, profile, facts, None)
    assert not refused["ok"] and "are to be had with 10 GiB for the host" in refused["reasons"][0]
    assert fit_recipe.verdict(loaded, profile, facts, None, freed_gib=5.0)["ok"]


def test_what_was_learned_replaces_the_estimate() -> None:
    verdict = ask(cost=None, learned_tokens=123_456, learned_from="learned from a start")
    assert verdict["ok"] and verdict["kv_tokens"] == [123_456, 123_456]
    short = ask(cost=None, learned_tokens=30_000)
    assert short["reasons"] == [
        "the KV cache holds at most 30,000 tokens and max_model_len is 32,768"
    ]
    # 30,000 tokens took 25.75 GiB: 32,768 take 28.13, which 0.93 of 100 GiB leave (28.75).
    assert short["would_fit"][:3] == [
        "max_model_len: 16384",
        "kv_cache_dtype: fp8",
        "utilization: 0.93",
    ]


def test_nothing_is_claimed_about_an_unknown_architecture() -> None:
    verdict = ask(cost=None)
    assert verdict["ok"] and verdict["kv_tokens"] is None
    assert any("not understood" in line for line in verdict["lines"])
    assert not ask(cost=None, weights=(95.0, 95.0))["ok"]


def test_every_proposal_was_tried() -> None:
    """Whatever is proposed is accepted when it is done."""
    for weights in (70.0, 82.0, 86.0, 95.0):
        for proposal in ask(weights=(weights, weights), max_model_len=131072)["would_fit"]:
            key, _, value = proposal.partition(": ")
            if key == "max_model_len":
                assert ask(weights=(weights, weights), max_model_len=int(value.split()[0]))["ok"]
            elif key == "utilization":
                again = ask(
                    weights=(weights, weights), max_model_len=131072, utilization=float(value)
                )
                assert again["ok"]
