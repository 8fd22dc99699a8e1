"""The parts of bench/moe.py that need no GPU."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bench import moe, moe_bank, moe_serving


def test_shapes():
    assert moe_bank.parse_shapes("128x2048x768x8, 8x128x128x1") == [
        moe_bank.Shape(128, 2048, 768, 8),
        moe_bank.Shape(8, 128, 128, 1),
    ]
    for text in ("128x2048x768", "0x128x128x1", "8x100x128x2", "4x128x128x5", "axbxcxd"):
        with pytest.raises(ValueError, match="shape"):
            moe_bank.parse_shapes(text)


def test_plans_and_numbers():
    assert moe.plans_of("auto,8f,64") == [None, [8, 1, 0, 0], [64, 0, 0, 0]]
    with pytest.raises(ValueError, match="plan '24'"):
        moe.plans_of("24")
    assert moe.numbers("1, 8") == [1, 8]
    with pytest.raises(ValueError, match="positive"):
        moe.numbers("0")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--shapes", "1x2"], "shape '1x2'"), (["--dtype", "int8"], "expected bfloat16 or float16")],
)
def test_usage(arguments, reason):
    import typer

    app = typer.Typer()
    app.command()(moe.main)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and reason in done.output + done.stderr


def test_a_random_checkpoint_of_the_real_sizes_is_one(tmp_path, monkeypatch):
    from exl3_plugin.checkpoint import read_checkpoint
    from exl3_plugin.expert_names import check_experts

    small = {"num_experts": 4, "vocab_size": 256, "hidden_size": 256, "moe_intermediate_size": 128,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    monkeypatch.setattr(moe_serving, "CONFIG", moe_serving.CONFIG | small)
    done = CliRunner().invoke(moe_serving.app, ["make", str(tmp_path / "m"), "--layers", "2"])
    assert done.exit_code == 0, done.output
    checkpoint = read_checkpoint(tmp_path / "m")
    check_experts(checkpoint)
    assert checkpoint.warnings == []
    assert sum(m.kind == "exl3" for m in checkpoint.modules.values()) == 2 * (4 + 4 * 3) + 1
