"""The memory verdict: figures added by hand, refusals with what would fit."""

import json
import struct
from pathlib import Path

import pytest
from exl3_host import facts as host_facts
from exl3_host import fit
from host_files import GIB, two_small_nodes, write_host


def safetensors(path: Path, sizes: dict[str, int]) -> None:
    """A file with a real header and sparse data of the given byte counts."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "I8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + offset)


@pytest.fixture
def facts(tmp_path: Path) -> dict:
    """20 GiB available; node 0 has 6 GiB free, node 1 has 14."""
    return host_facts.collect(write_host(tmp_path / "host", two_small_nodes()))


def request(**changes: object) -> fit.FitRequest:
    values: dict = {"tp": 1, "kv_cache_gib": 1, "max_model_len": 2048, **changes}
    return fit.FitRequest(**values)


def test_sizes_come_from_the_headers(tmp_path: Path) -> None:
    safetensors(tmp_path / "a.safetensors", {"x": 3 * GIB, "y": GIB})
    safetensors(tmp_path / "b.safetensors", {"z": 100})
    config = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = fit.measure(tmp_path)
    assert size.weights_bytes == 4 * GIB + 100
    # 2 (K and V) x 30 layers x 3 heads x 64 numbers x 2 bytes
    assert size.kv_bytes_per_token == 23040
    assert size.notes == ()


def test_a_real_checkpoint(reference_data: Path) -> None:
    folder = reference_data / "tiny" / "tiny-llama-mcg4"
    data = sum(
        file.stat().st_size - 8 - struct.unpack("<Q", file.read_bytes()[:8])[0]
        for file in folder.glob("*.safetensors")
    )
    assert fit.measure(folder).weights_bytes == data > 0


def test_a_broken_header_counts_as_its_file_size(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"\xff" * 1000)
    size = fit.measure(tmp_path)
    assert size.weights_bytes == 1000
    assert "m.safetensors has no safetensors header" in size.notes[0]


def test_no_folder_no_size(tmp_path: Path) -> None:
    assert fit.measure(tmp_path / "none") == fit.ModelSize()


@pytest.mark.parametrize(
    "special",
    [
        {"kv_lora_rank": 512},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"linear_num_value_heads": 8},
    ],
)
def test_attention_that_is_not_plain_is_left_to_vllm(special: dict) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256, **special}
    assert fit.kv_bytes_per_token(config) is None
    assert fit.kv_bytes_per_token({"text_config": config}) is None


def test_it_fits(facts: dict) -> None:
    verdict = fit.check(request(), fit.ModelSize(GIB, 23040, "safetensors headers"), facts)
    # 1 weights + 1 KV + 1.5 server + 1 rank + 0.5 host
    assert (verdict["ok"], verdict["needed_gib"], verdict["available_gib"]) == (True, 5.0, 20.0)
    assert verdict["reasons"] == verdict["would_fit"] == []
    # 2**30 / 23040 = 46603.4
    assert any("46,603 tokens" in line for line in verdict["lines"])


def test_too_little_memory_says_needed_and_available(facts: dict) -> None:
    verdict = fit.check(request(kv_cache_gib=20), fit.ModelSize(2 * GIB), facts)
    assert not verdict["ok"]
    assert verdict["reasons"] == ["25.00 GiB are needed and 20.00 GiB are available"]
    assert verdict["would_fit"][0] == "kv_cache_gib: 15"
    assert verdict["would_fit"][1].startswith("free 5.00 GiB")
    again = fit.check(request(kv_cache_gib=15), fit.ModelSize(2 * GIB), facts)
    assert again["ok"], "what is proposed fits"


def test_ranks_multiply_the_cache_and_share_the_weights(facts: dict) -> None:
    verdict = fit.check(request(tp=2, kv_cache_gib=2), fit.ModelSize(4 * GIB), facts)
    # weights 4 * 1.05, KV 2 * 2, server 1.5 + 2 * 1, host 0.5
    assert verdict["needed_gib"] == pytest.approx(12.2)


def test_weights_larger_than_the_host(facts: dict) -> None:
    verdict = fit.check(request(), fit.ModelSize(40 * GIB), facts)
    assert verdict["needed_gib"] == 44.0
    assert verdict["would_fit"] == [
        "free 24.00 GiB, or use a host with that much more memory",
        "a checkpoint with fewer bits per weight",
    ]


def test_fewer_ranks_are_proposed_when_they_help(facts: dict) -> None:
    verdict = fit.check(request(tp=4), fit.ModelSize(11 * GIB), facts)
    assert not verdict["ok"]
    assert "tp: 1" in verdict["would_fit"]
    assert fit.check(request(tp=1), fit.ModelSize(11 * GIB), facts)["ok"]


def test_what_a_replaced_instance_returns_counts(facts: dict) -> None:
    size = fit.ModelSize(2 * GIB)
    assert not fit.check(request(kv_cache_gib=18), size, facts)["ok"]
    verdict = fit.check(request(kv_cache_gib=18, freed_gib=4.0), size, facts)
    assert verdict["ok"]
    assert verdict["available_gib"] == 24.0


def test_the_node_of_a_rank_is_checked_as_vllm_does(facts: dict) -> None:
    size = fit.ModelSize(GIB)
    assert fit.check(request(kv_cache_gib=7, rank_nodes=(1,)), size, facts)["ok"]
    verdict = fit.check(request(kv_cache_gib=7, rank_nodes=(0,)), size, facts)
    assert verdict["reasons"] == ["memory node 0 has 6.00 GiB available and its KV cache takes 7"]
    assert verdict["would_fit"] == ["kv_cache_gib: 6"]


def test_a_cache_too_small_for_one_request(facts: dict) -> None:
    verdict = fit.check(request(max_model_len=100_000), fit.ModelSize(GIB, 23040), facts)
    assert verdict["reasons"] == ["the KV cache holds 46,603 tokens and max_model_len is 100,000"]
    # 46603 rounded down to 256; 100,000 x 23,040 bytes are 2.1 GiB
    assert verdict["would_fit"] == ["max_model_len: 46592, or kv_cache_gib: 3"]
    wide = request(max_model_len=40_000, kv_element_bytes=4)
    assert not fit.check(wide, fit.ModelSize(GIB, 23040), facts)["ok"]


def test_a_cgroup_limit_is_what_is_available(tmp_path: Path) -> None:
    host = two_small_nodes(
        files={
            "sys/fs/cgroup/cgroup.controllers": "memory",
            "sys/fs/cgroup/memory.max": str(4 * GIB),
            "sys/fs/cgroup/memory.current": str(GIB),
        }
    )
    facts = host_facts.collect(write_host(tmp_path, host))
    verdict = fit.check(request(), fit.ModelSize(GIB), facts)
    assert verdict["reasons"] == ["5.00 GiB are needed and 3.00 GiB are available"]
    assert any("cgroup limit 4.00 GiB, 1.00 in use" in line for line in verdict["lines"])


def test_unknown_memory_is_said_and_not_guessed(facts: dict) -> None:
    facts["memory"] = dict.fromkeys(facts["memory"])
    verdict = fit.check(request(), fit.ModelSize(), facts)
    assert verdict["ok"]
    assert verdict["available_gib"] is None
    assert any("unknown on this host; not checked" in line for line in verdict["lines"])
    assert any("not known before the model lies in the store" in line for line in verdict["lines"])
