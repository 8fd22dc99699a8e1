"""Reading checkpoints: what exllamav3 wrote is understood, what is broken is refused by name."""

import json
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import Editable, Stored, marker, read_tensors, stored, write_tensors
from safetensors import safe_open

from exl3_plugin.checkpoint import CheckpointError, read_checkpoint
from exl3_plugin.format import MARKERS

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="session")
def fixtures(checkout: Path) -> Path:
    return checkout / "tests" / "fixtures"


def copy_of(source: Path, target: Path) -> Editable:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("golden*", "tokenizer*"))
    config = json.loads((target / "config.json").read_text())
    return Editable(target, read_tensors(target / "model.safetensors"), config)


@pytest.fixture
def mul1(fixtures: Path, tmp_path: Path) -> Editable:
    """Copy of a checkpoint at 2.5 bits with a 4-bit head, codebook mul1."""
    return copy_of(fixtures / "tiny-llama-mul1-2.5", tmp_path / "model")


@pytest.fixture
def plain3(fixtures: Path, tmp_path: Path) -> Editable:
    """Copy of a checkpoint at 3, 4 and 5 bits, codebook 3inst."""
    return copy_of(fixtures / "tiny-llama-3inst-3.3", tmp_path / "model")


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    return str(caught.value)


# What exllamav3 wrote


def check_against_own_map(path: Path) -> None:
    """exllamav3 wrote what it stored into quantization_config.json; the headers must agree."""
    checkpoint = read_checkpoint(path)
    storage = json.loads((path / "quantization_config.json").read_text())["tensor_storage"]
    assert set(checkpoint.modules) == set(storage)
    for name, entry in storage.items():
        module, listed = checkpoint.modules[name], entry["stored_tensors"]
        assert {t.name for t in module.tensors.values()} == set(listed)
        for tensor in module.tensors.values():
            assert list(tensor.shape) == listed[tensor.name]["shape"]
            assert tensor.nbytes == listed[tensor.name]["n_bytes"]
        assert module.nbytes == sum(tensor["n_bytes"] for tensor in listed.values())
        if entry.get("quant_format") == "exl3":
            assert (module.kind, module.bits) == ("exl3", entry["bits_per_weight"])
            found = {m for m in MARKERS if f"{m}_multiplier" in entry}
            assert found == {module.codebook} - {"3inst"}
            assert (module.k_true, module.n_true) == (module.k, module.n)
            assert len(module.tensors["suh"].shape) == 1 and not module.legacy_signs
            assert module.tensors["suh"].shape == (module.k,)
            assert module.tensors["svh"].shape == (module.n,)
        else:
            assert (module.kind, module.bits, module.codebook) == ("plain", None, None)
    assert checkpoint.warnings == []
    assert checkpoint.nbytes == sum(module.nbytes for module in checkpoint.modules.values())


@pytest.mark.parametrize("name", ["tiny-llama-mul1-2.5", "tiny-llama-3inst-3.3"])
def test_fixture_as_exllamav3_listed_it(fixtures, name):
    check_against_own_map(fixtures / name)


def test_reference_checkpoints_as_exllamav3_listed_them(reference_data, smollm2):
    tiny = sorted((reference_data / "tiny").iterdir())
    assert len(tiny) == 5
    for path in [*tiny, smollm2]:
        check_against_own_map(path)


def test_offsets_point_at_the_data(fixtures):
    path = fixtures / "tiny-llama-mul1-2.5"
    checkpoint = read_checkpoint(path)
    with safe_open(path / "model.safetensors", "np") as reference:
        assert set(checkpoint.tensors) == set(reference.keys())
        for name in (f"{Q_PROJ}.trellis", "lm_head.svh", "lm_head.mul1"):
            tensor = checkpoint.tensors[name]
            with (path / tensor.file).open("rb") as file:
                file.seek(tensor.offset)
                assert file.read(tensor.nbytes) == reference.get_tensor(name).tobytes()


def test_legacy_signs_and_tolerated_forms(plain3):
    """Signs packed in words, a marker of shape [1] and an unsigned trellis are read."""
    packed = np.zeros(16, np.int16)
    for old, new in (("suh", "su"), ("svh", "sv")):
        del plain3.tensors[f"{Q_PROJ}.{old}"]
        plain3.tensors[f"{Q_PROJ}.{new}"] = stored("I16", packed)
    plain3.tensors[f"{Q_PROJ}.mcg"] = marker(MARKERS["mcg"], (1,))
    plain3.tensors[f"{Q_PROJ}.trellis"].dtype = "U16"
    module = read_checkpoint(plain3.save()).modules[Q_PROJ]
    assert module.legacy_signs and module.codebook == "mcg" and (module.k, module.n) == (256, 256)


def test_codebooks_may_differ_between_modules(mul1):
    for suffix in ("trellis", "suh", "svh"):
        mul1.tensors[f"extra.up.{suffix}"] = mul1.tensors[f"lm_head.{suffix}"]
    modules = read_checkpoint(mul1.save()).modules
    assert (modules["extra.up"].codebook, modules["lm_head"].codebook) == ("3inst", "mul1")


def test_quantised_embedding(mul1):
    del mul1.tensors["model.embed_tokens.weight"]
    mul1.tensors["model.embed_tokens.trellis"] = stored("I16", np.zeros((512, 65), np.int16))
    mul1.tensors["model.embed_tokens.signs"] = stored("F16", np.ones((1, 256), np.float16))
    module = read_checkpoint(mul1.save()).modules["model.embed_tokens"]
    assert (module.kind, module.bits, module.codebook) == ("embedding", 4.0, "mul1")
    assert (module.k, module.n, module.k_true, module.n_true) == (256, 512, 256, 512)
    del mul1.tensors["model.embed_tokens.signs"]
    assert "n-gram table, which is not supported" in refusal(mul1.save())


def test_modules_that_the_map_omits(mul1):
    """Draft heads and vision towers are in the files but not in quantization_config.json."""
    for suffix in ("trellis", "suh", "svh", "mul1"):
        mul1.tensors[f"mtp.fc.{suffix}"] = mul1.tensors[f"{Q_PROJ}.{suffix}"]
    checkpoint = read_checkpoint(mul1.save())
    assert checkpoint.modules["mtp.fc"].bits == 2.5
    assert checkpoint.modules["mtp.fc"].k_true is None
    assert [w for w in checkpoint.warnings if "omits" in w and "mtp.fc" in w]


def test_map_that_lists_what_is_gone(mul1):
    del mul1.tensors["model.norm.weight"]
    warnings = read_checkpoint(mul1.save()).warnings
    assert ["model.norm.weight" in warning for warning in warnings] == [True]


def test_padding_is_seen_from_the_config(mul1):
    mul1.config["intermediate_size"] = 600
    mul1.config["vocab_size"] = 500
    del mul1.tensors["model.embed_tokens.weight"]
    modules = read_checkpoint(mul1.save()).modules
    down, head = modules["model.layers.1.mlp.down_proj"], modules["lm_head"]
    assert (down.k, down.k_true, down.n, down.n_true) == (640, 600, 256, 256)
    assert (head.n, head.n_true) == (512, 500)


def test_nested_text_config(mul1):
    keys = ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "vocab_size")
    mul1.config["text_config"] = {key: mul1.config.pop(key) for key in keys}
    assert read_checkpoint(mul1.save()).modules[Q_PROJ].n_true == 256


# Shards and their index


def test_shards(mul1):
    checkpoint = read_checkpoint(mul1.save(shards=3, index=True))
    assert len(checkpoint.files) == 3 and checkpoint.warnings == []
    assert len(checkpoint.modules) == 21


def test_missing_shard_that_the_index_names(mul1):
    path = mul1.save(shards=3, index=True)
    lost = path / "model-00002-of-00003.safetensors"
    held = list(read_tensors(lost))
    lost.unlink()
    message = refusal(path)
    assert "model-00002-of-00003.safetensors is missing" in message
    assert held[0] in message and f"and {len(held) - 3} more" in message


def test_missing_shard_without_an_index(mul1):
    path = mul1.save(shards=3)
    (path / "model-00003-of-00003.safetensors").unlink()
    message = refusal(path)
    assert "shard model-00003-of-00003.safetensors is missing" in message


def test_missing_file_with_a_free_name(mul1):
    path = mul1.save()
    mul1.write_index(
        {**dict.fromkeys(mul1.tensors, "model.safetensors"), "head.weight": "b.safetensors"}
    )
    assert re.search(r"shard b\.safetensors is missing.*head\.weight", refusal(path))


def test_stale_index_is_a_warning(mul1):
    """An index of the unquantised model: other files, `.weight` names, a module less."""
    names = {f"{tensor.rpartition('.')[0]}.weight" for tensor in mul1.tensors}
    path = mul1.save()
    mul1.write_index(dict.fromkeys(names - {"lm_head.weight"}, "model-00001-of-00002.safetensors"))
    checkpoint = read_checkpoint(path)
    assert checkpoint.modules["lm_head"].bits == 4
    assert [w for w in checkpoint.warnings if "stale" in w and "lm_head.suh" in w]


def test_unreadable_index_is_a_warning(mul1):
    path = mul1.save()
    (path / "model.safetensors.index.json").write_text("{")
    assert any("index is ignored" in warning for warning in read_checkpoint(path).warnings)


def test_one_tensor_in_two_files(mul1):
    path = mul1.save()
    write_tensors(path / "old.safetensors", {"lm_head.svh": mul1.tensors["lm_head.svh"]})
    message = refusal(path)
    assert "lm_head.svh is both in model.safetensors and in old.safetensors" in message


# Damaged files


def test_truncated_file(mul1):
    path = mul1.save()
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    message = refusal(path)
    assert (
        f"is truncated: {len(content) - 100} bytes, its header describes {len(content)}" in message
    )
    assert list(mul1.tensors)[-1] in message

    file.write_bytes(content[:500])
    assert "is truncated: 500 bytes, but its header alone ends at" in refusal(path)
    file.write_bytes(content[:5])
    assert "is truncated: 5 bytes" in refusal(path)
    file.write_bytes(content + b"\0")
    assert "its header describes only" in refusal(path)


def test_files_that_are_something_else(mul1):
    path = mul1.save()
    file = path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "Git LFS pointer" in refusal(path)
    file.write_bytes(b"\xff" * 64)
    assert "is no safetensors file: it announces a header of" in refusal(path)
    file.write_bytes(b"\x08" + bytes(7) + b"not json")
    assert "its header is damaged" in refusal(path)


def test_header_that_contradicts_itself(mul1):
    mul1.tensors["model.norm.weight"] = Stored("F16", (256,), bytes(500))
    assert "model.norm.weight, F16 [256], has 500 bytes, expected 512" in refusal(mul1.save())


@pytest.mark.parametrize("second", [(2, 6), (6, 10)])
def test_tensors_that_overlap_or_leave_a_gap(mul1, second):
    path = mul1.save()
    ranges = {"one": (0, 4), "two": second}
    header = {
        name: {"dtype": "U8", "shape": [4], "data_offsets": place} for name, place in ranges.items()
    }
    text = json.dumps(header).encode()
    start = 8 + len(text)
    (path / "more.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(second[1]))
    message = refusal(path)
    assert f"tensor two begins at byte {start + second[0]}, expected {start + 4}" in message


# Tensors that are no legal layer


def test_illegal_width(mul1):
    tensor = mul1.tensors[f"{Q_PROJ}.trellis"]
    mul1.tensors[f"{Q_PROJ}.trellis"] = Stored("I16", (16, 16, 72), bytes(16 * 16 * 72 * 2))
    assert tensor.shape == (16, 16, 40)
    message = refusal(mul1.save())
    assert f"{Q_PROJ} (in model.safetensors): trellis has 72 words per tile" in message
    assert "legal are 16, 24, 32, 40" in message


def test_both_markers(mul1):
    mul1.tensors[f"{Q_PROJ}.mcg"] = marker(MARKERS["mcg"])
    assert f"{Q_PROJ} (in model.safetensors): both codebook markers" in refusal(mul1.save())


def test_foreign_constant(mul1):
    mul1.tensors["lm_head.mul1"] = marker(0x83DCD12F)
    assert re.search("lm_head .*holds 0x83DCD12F, expected 0x83DCD12D", refusal(mul1.save()))


def test_half_rate_without_mul1(mul1):
    del mul1.tensors[f"{Q_PROJ}.mul1"]
    assert re.search(f"{Q_PROJ} .*2.5 bits .*half rates exist only with mul1", refusal(mul1.save()))


def test_many_bad_modules_are_named_and_counted(mul1):
    for name in [name for name in mul1.tensors if name.endswith(".mul1")]:
        del mul1.tensors[name]
    message = refusal(mul1.save())
    assert message.count("half rates") == 5 and "and 9 more modules" in message


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("intermediate_size", 700, r"down_proj .*stored k is 640, but config.json means 700"),
        ("hidden_size", 384, r"stored k is 256, but config.json means 384"),
        ("num_attention_heads", 7, r"q_proj .*stored n is 256, but config.json means 448 or 896"),
        ("num_key_value_heads", 4, r"k_proj .*stored n is 128, but config.json means 256"),
        ("vocab_size", 1000, r"embed_tokens .*stored n is 512, but config.json means 1000"),
    ],
)
def test_sizes_that_contradict_the_config(mul1, key, value, message):
    mul1.config[key] = value
    text = refusal(mul1.save())
    assert re.search(message, text) and "different models" in text


def test_leftovers_and_cut_layers(mul1):
    whole = dict(mul1.tensors)
    layer = {s: whole[f"{Q_PROJ}.{s}"] for s in ("trellis", "suh", "svh", "mul1")}

    def refused_with(**changes: Stored) -> str:
        mul1.tensors = {**whole, **changes}
        return refusal(mul1.save())

    assert "pre-release file" in refused_with(**{f"{Q_PROJ}.scale": marker(1)})
    assert "both a trellis and a plain weight" in refused_with(**{f"{Q_PROJ}.weight": layer["suh"]})
    for part, message in (
        ("experts.0.up_proj.rank0", "cut for one rank of tensor parallelism are not supported"),
        ("mlp.gate_proj.slice.1", "layers cut into slices are not supported"),
    ):
        name = f"model.layers.0.{part}"
        text = refused_with(**{f"{name}.{suffix}": t for suffix, t in layer.items()})
        assert f"{name} (in model.safetensors)" in text and message in text
    mul1.tensors = {k: v for k, v in whole.items() if k != f"{Q_PROJ}.trellis"}
    assert f"{Q_PROJ} (in model.safetensors): mul1, suh, svh without a trellis" in refusal(
        mul1.save()
    )


# Folders and their JSON files


def test_folder_that_is_not_there(tmp_path):
    assert f"folder {tmp_path / 'nothing'} is not there" in refusal(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    assert "is a file, expected the folder of a checkpoint" in refusal(tmp_path / "file")


def test_folder_without_safetensors(tmp_path):
    assert "is empty, expected an EXL3 checkpoint" in refusal(tmp_path)
    (tmp_path / "model.gguf").write_text("")
    assert "no *.safetensors file (it holds model.gguf)" in refusal(tmp_path)


def test_config_that_is_missing_or_broken(mul1):
    config = mul1.save() / "config.json"
    config.write_text('{"hidden_size": 25')
    assert "config.json is not JSON" in refusal(mul1.path)
    config.write_text("[]")
    assert "holds a JSON list, expected an object" in refusal(mul1.path)
    config.unlink()
    assert "has no config.json; copy it from" in refusal(mul1.path)


@pytest.mark.parametrize("key", ["rotation_layout", "tiers", "tier_bitmaps"])
def test_variants_that_decode_differently(mul1, key):
    mul1.config["quantization_config"][key] = {"a": 1}
    assert f"config.json has {key}: a variant of EXL3" in refusal(mul1.save())
    del mul1.config["quantization_config"][key]
    mul1.config["quantization_config"]["remark"] = "unknown keys are ignored"
    path = mul1.save()
    assert read_checkpoint(path).modules
    listed = json.loads((path / "quantization_config.json").read_text())
    (path / "quantization_config.json").write_text(json.dumps({**listed, key: True}))
    assert f"quantization_config.json has {key}" in refusal(path)


def test_json_hints_may_be_absent_or_wrong(mul1):
    mul1.config["quantization_config"]["quant_method"] = "modelopt"
    path = mul1.save()
    (path / "quantization_config.json").write_text("{")
    warnings = "\n".join(read_checkpoint(path).warnings)
    assert "'modelopt' although modules are EXL3" in warnings and "is not JSON" in warnings
    del mul1.config["quantization_config"]
    (path / "quantization_config.json").unlink()
    assert ["no quantization_config" in w for w in read_checkpoint(mul1.save()).warnings] == [True]
