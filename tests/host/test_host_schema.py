"""The committed JSON Schema is the one of the models, and both judge alike."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from exl3_host.errors import RecipeError
from exl3_host.recipe import parse_recipe
from exl3_host.schema import json_schema
from ruamel.yaml import YAML

GPU_RECIPE = """\
schema: exl3-recipe/1
name: moe
summary: MoE 35B total, 3B active
maturity: experimental
model:
  repo: someone/Moe-exl3-4.00bpw
  revision: "89abcdef0123456789abcdef0123456789abcdef"
  file_lock: moe.files.json
  weights_bytes: 19402000000
  bits_per_weight: 4.0
image:
  name: exl3-fleet
  digests:
    linux/amd64: sha256:{digest}
    linux/arm64: sha256:{digest}
  needs: {{driver_min: "580.95", model_classes: [GlmNext], extras: [numactl, ib]}}
serve:
  args: {{enable-prefix-caching: true, max-num-seqs: 64}}
profiles:
  rtx_5090_x2:
    match: {{compute_capability: "12.0", gpus_per_node: 2, nodes: 1, vram_gib_min: 31}}
    parallel: {{tp: 2, expert: false}}
    memory: {{utilization: 0.90, max_model_len: 65536}}
    comm: {{peer_access: verify, custom_all_reduce: verify, shm_gib: 8}}
    pinning: {{mode: auto, smt: keep, reserve_cores_per_node: 2}}
    args: {{speculative-config: {{method: mtp, num_speculative_tokens: 1}}}}
  dgx_spark_x2:
    match: {{compute_capability: "12.1", gpus_per_node: 1, nodes: 2, unified_memory: true}}
    parallel: {{tp: 2, backend: mp}}
    memory:
      {{utilization: 0.80, max_model_len: 65536, kv_cache_dtype: fp8, rank_weights_gib: 82,
       host_reserve_gib: 12, min_kv_tokens: 131072, overhead_gib: 5.5}}
    comm: {{fabric: roce, mtu: 9000, peer_access: disable, custom_all_reduce: disable}}
    pinning: {{mode: none}}
    evidence: {{status: reported, source: somebody, date: "2026-11-02"}}
start:
  attempts: 4
  backoff_s: 15
  retry_on:
    - {{id: launch, pattern: 'InternalError.*ILLEGAL_ADDRESS', why: half of the warm-ups die}}
health:
  ready_timeout_s: 2400
  stall_timeout_s: 600
  smoke: {{prompt: "Reply with ready", max_tokens: 16, expect: "(?i)ready", stream: true}}
calibration: require
secrets: {{hf_token: true, api_key: false}}
""".format(digest="0" * 64)


BAD_IN_DOCUMENT = """\
schema: exl3-recipe/1
name: bad
model: {repo: a/b, revision: main}
serve: {args: {tensor-parallel-size: 2}}
profiles:
  cpu:
    match: {device: cpu}
    parallel: {tp: 1}
    memory: {max_model_len: 2048, kv_cache_gb: 1}
    pinning: {mode: off}
health: {ready_timeout_s: 600, smoke: {max_tokens: 4, prompt: 12.0}}
"""


def plain(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def test_the_committed_schema_is_current(checkout: Path) -> None:
    committed = json.loads((checkout / "recipes/schema/exl3-recipe-1.json").read_text())
    assert committed == json_schema(), (
        "regenerate: scripts/exl3ctl recipe schema > recipes/schema/exl3-recipe-1.json"
    )


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_every_recipe_of_the_checkout_passes_both(checkout: Path) -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    files = sorted((checkout / "recipes").glob("*.yaml"))
    assert files
    for file in files:
        validator.validate(plain(file.read_text()))
        parse_recipe(file.read_text(), file.name, file.stem)


def test_a_recipe_for_gpus_passes_both() -> None:
    jsonschema.Draft202012Validator(json_schema()).validate(plain(GPU_RECIPE))
    recipe = parse_recipe(GPU_RECIPE, "moe.yaml", "moe")
    spark = recipe.profiles["dgx_spark_x2"]
    assert spark.match.unified_memory
    assert spark.memory.kv_cache_dtype == "fp8"
    assert recipe.profiles["rtx_5090_x2"].pinning.smt == "keep"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"89abcdef0123456789abcdef0123456789abcdef"', "main"),
        ("linux/amd64: sha256:" + "0" * 64, "linux/amd64: latest"),
        ("max-num-seqs: 64", "tensor-parallel-size: 2"),
        ("tp: 2, expert", "tp: 2, ep: 1, expert"),
        ("utilization: 0.90", "utilization: 90"),
        ('compute_capability: "12.0"', "compute_capability: 12.0"),
        ("gpus_per_node: 2, ", ""),
        ("peer_access: verify", "peer_access: maybe"),
        ("  revision:", "  path: /x\n  revision:"),
        ("attempts: 4", "attempts: 9"),
        ("calibration: require", "calibration: perhaps"),
        ("secrets:", "secret: 1\nsecrets:"),
    ],
)
def test_both_refuse_the_same(old: str, new: str) -> None:
    assert GPU_RECIPE.count(old) == 1
    text = GPU_RECIPE.replace(old, new)
    validator = jsonschema.Draft202012Validator(json_schema())
    assert not validator.is_valid(plain(text))
    with pytest.raises(RecipeError):
        parse_recipe(text, "moe.yaml", "moe")


def test_the_document_tells_every_key(checkout: Path) -> None:
    text = (checkout / "docs/recipes.md").read_text()
    schema = json_schema()
    objects = [schema, *schema["$defs"].values()]
    keys = {key for one in objects for key in one.get("properties", {})}
    assert len(keys) > 60
    # The keys of image are summed up in one line.
    image = {"name", "digests", "needs", "linux/amd64", "linux/arm64", "plugin", "vllm"}
    image |= {"driver_min", "model_classes", "extras"}
    assert [k for k in sorted(keys - image) if not re.search(rf"\b{re.escape(k)}\b", text)] == []


def test_the_recipe_in_the_document_is_one(checkout: Path) -> None:
    text = (checkout / "docs/recipes.md").read_text()
    example = text.split("```yaml\n")[1].split("```")[0]
    assert parse_recipe(example, "my-model.yaml", "my-model").health.smoke.expect == "(?i)paris"


def test_the_mistakes_in_the_document_are_what_is_printed(checkout: Path) -> None:
    text = (checkout / "docs/recipes.md").read_text()
    printed = text.split("recipe lint bad.yaml\n")[1].split("\n5 errors.")[0]
    with pytest.raises(RecipeError) as caught:
        parse_recipe(BAD_IN_DOCUMENT, "bad.yaml", "bad")
    assert str(caught.value) == printed
