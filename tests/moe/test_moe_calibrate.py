"""Which layers of experts are calibrated, which plans are measured, and what counts as right."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import typer
from moe_models import EXPERTS, awkward_moe
from typer.testing import CliRunner

from bench import arms, calibrate, calibrate_experts, choosing, timing
from bench.calibrate_experts import (
    KEY,
    TOKENS,
    ExpertLayer,
    candidates,
    describe,
    differs,
    fitted,
    layers_of,
    parse_experts,
    with_blocks,
)
from exl3_plugin import ops, tuning
from exl3_plugin.experts import MAX_SLOTS, ExpertPlan, ExpertSizes, plan

H200 = ops.Device(90, 132, 232448)
PRO6000 = ops.Device(120, 188, 101376)
QWEN3 = ExpertLayer(ExpertSizes(128, 128, 8, 2048, 768), 4.0, "mcg")
GLM = ExpertLayer(ExpertSizes(288, 288, 8, 4096, 2048), 2.5, "mul1")
GLM_RANK = ExpertLayer(ExpertSizes(36, 288, 8, 4096, 2048), 4.0, "mcg")
STREAM4, TILE16 = ExpertPlan(4, ops.FAST, 132), ExpertPlan(16, ops.EXACT, 264)
TALL = ExpertPlan(256, ops.EXACT, 132)


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()


def built_in(device, tokens, layer):
    return plan(device, tokens, layer.sizes, layer.bits, layer.codebook)


def test_shapes():
    assert parse_experts("128x8:2048x768, 32of128x8:2048x768") == [
        ExpertSizes(experts=128, global_experts=128, slots=8, k=2048, inner=768),
        ExpertSizes(experts=32, global_experts=128, slots=8, k=2048, inner=768),
    ]
    assert parse_experts("") == []
    bad = ("128x8", "128x2048x768x8", "128x8:2048x700", "0x1:128x128", "4x5:128x128",
           "9of8x1:128x128", "32x17:128x128", "0of8x1:128x128", "8x0:128x128")  # fmt: skip
    for text in bad:
        with pytest.raises(ValueError, match="experts '"):
            parse_experts(f"8x2:128x128,{text}")
    assert MAX_SLOTS == 16


def test_layers_have_the_key_of_the_table():
    assert GLM_RANK.key == [4096, 2048, 36, 288, 8, 8, 0]
    assert GLM.key == [4096, 2048, 288, 288, 8, 5, 1]
    assert str(GLM_RANK) == "36of288x8:4096x2048 4 bit mcg"
    assert describe(*GLM.key, 64) == "288x8:4096x2048 2.5 bit mul1, 64 tokens"
    assert set(KEY) < set(tuning.EXPERT_TABLE_FIELDS)


@pytest.mark.parametrize("device", [H200, PRO6000], ids=["H200", "PRO6000"])
@pytest.mark.parametrize("layer", [QWEN3, GLM, GLM_RANK], ids=str)
def test_candidates(device, layer):
    for tokens in TOKENS:
        default = built_in(device, tokens, layer)
        plans = candidates(device, tokens, layer, default)
        case = (tokens, plans)
        assert plans[0] == default and len(set(plans)) == len(plans) <= 9, case
        assert any(one.rows >= 8 for one in plans[1:]) and len(plans) > 1, case
        few = {one.rows for one in plans if 0 < one.rows < 8}
        assert bool(few) == (device is H200 and tokens <= 8), case
        average = tokens * layer.sizes.slots / layer.sizes.global_experts
        assert (TALL in plans) == (device is H200 and average >= 4), case
        assert all(one.form == ops.EXACT or one.rows in (1, 2, 4, 8, 256) for one in plans), case
        for one in plans[1:]:
            assert fitted(device, tokens, layer, one) == one, case
        for one in with_blocks(device, tokens, layer, plans[1]):
            assert one.rows == plans[1].rows and one.blocks != plans[1].blocks, case
            assert fitted(device, tokens, layer, one) == one, case


def test_candidates_around_the_rule():
    """A tile lower and a tile taller than the rule's are among them where there is one."""
    assert {one.rows for one in candidates(H200, 64, QWEN3, TILE16)} == {8, 16, 256}
    assert {one.rows for one in candidates(H200, 256, QWEN3, TILE16)} == {8, 16, 32, 64, 256}
    assert {one.rows for one in candidates(H200, 2048, QWEN3, TALL)} == {32, 64, 128, 256}
    assert {one.rows for one in candidates(PRO6000, 8192, QWEN3, TILE16)} == {16, 64, 128}
    blocks = [one.blocks for one in with_blocks(H200, 64, QWEN3, TILE16)]
    assert blocks == [132, 396]
    assert with_blocks(H200, 8192, QWEN3, TALL) == []
    assert [one.blocks for one in with_blocks(H200, 8, QWEN3, STREAM4)] == [66, 198, 264]
    small = ExpertLayer(ExpertSizes(4, 4, 1, 128, 128), 4.0, "mcg")
    assert {one.blocks for one in candidates(H200, 1, small, TILE16)[1:] if one.rows >= 8} == {8}


def test_a_point_becomes_rows_of_the_table():
    """The fast form has to pay; doubt keeps the built-in plan; finalists are read again."""
    times = {STREAM4: 80.0, TILE16: 60.0, ExpertPlan(8, ops.FAST, 264): 59.0}
    asked = []

    def read(one, replays, prove):
        asked.append((one, replays, prove))
        return {"us": times.get(one, 70.0), "spread": 0.01}

    def more(one):
        assert one == TILE16
        return [one._replace(blocks=132)]

    items = choosing.measure(list(times), STREAM4, more, read)
    measured = [{**QWEN3.fields, "tokens": 16, **item} for item in items]
    assert [item["plan"] for item in items if item["chosen"]] == [list(TILE16)]
    assert [item["plan"] for item in items if item["default"]] == [list(STREAM4)]
    assert [one[0] for one in asked if one[2]] == [*times, TILE16._replace(blocks=132)]
    assert {one[0] for one in asked if not one[2]} == {STREAM4, TILE16, ExpertPlan(8, 1, 264)}
    for item in measured:
        tuning.ExpertMeasurement(**item)
    (row,) = calibrate_experts.overrides(measured)
    assert row.numbers() == [2048, 768, 128, 128, 8, 8, 0, 16, *TILE16]
    assert built_in(H200, 16, QWEN3) != TILE16
    assert calibrate_experts.overrides([]) == []
    (line,) = choosing.gain_lines(measured, (*KEY, "tokens"), describe)[1:]
    assert line == (
        "1.33x  128x8:2048x768 4 bit mcg, 16 tokens: [4, 1, 132] 80.0 us -> [16, 0, 264] 60.0 us"
    )
    assert choosing.measure([STREAM4], STREAM4, more, lambda *_: None) == []


def test_one_wrong_token_is_seen():
    reference = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    rounded = reference.bfloat16()
    assert differs(rounded, reference) < calibrate_experts.CLOSE / 4
    swapped = rounded.clone()
    swapped[[20, 21]] = swapped[[21, 20]]
    assert differs(swapped, rounded) > 1
    rounded[63, 255] = float("nan")
    assert differs(rounded, reference) == float("inf")


class Operators:
    """`torch.ops.exl3` of a machine without a GPU, with the operators that take tables."""

    def __init__(self):
        self.real, self.tables, self.plans = torch.ops.exl3, [], []

    def __getattr__(self, name):
        return getattr(self.real, name)

    def set_moe_table(self, numbers):
        self.tables.append(list(numbers))

    def set_plan_table(self, numbers):
        self.plans.append(list(numbers))


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Calibration with the CPU kernel: choices, proofs and tables are real, times are not."""
    operators = Operators()
    monkeypatch.setattr(torch.ops, "exl3", operators)
    monkeypatch.setattr(calibrate_experts, "LAYER_BYTES", 1)
    timed = []

    def time_rotating(call, copies, ring, replays):
        call(copies - 1)
        timed.append((operators.tables[-1], replays))
        return timing.Reading(100.0 - len(timed), 0.01, 20, replays)

    monkeypatch.setattr(timing, "time_rotating", time_rotating)
    return operators, timed


@pytest.mark.parametrize("experts", [6, 4], ids=["all", "of a rank"])
def test_a_layer_from_words_to_rows(experts, on_a_cpu):
    """Later readings are faster here, so the last finalist is what the profile takes."""
    operators, timed = on_a_cpu
    layer = ExpertLayer(ExpertSizes(experts, 6, 2, 256, 128), 4.0, "mcg")
    calibration = calibrate_experts.Calibration(1e9, H200, "cpu")
    steps = []
    measured = calibration.layer(layer, (1, 24), lambda: steps.append(1))
    assert len(steps) == 2 and not calibration.failures and not calibration.refused
    assert operators.tables[-1] == [], "no row stays"
    for item in measured:
        tuning.ExpertMeasurement(**item)
        default = item["plan"] == list(built_in(H200, item["tokens"], layer))
        assert item["default"] == default
        row = tuning.ExpertOverride(
            **layer.fields, tokens_upto=item["tokens"],
            **ExpertPlan(*item["plan"])._asdict(),
        )  # fmt: skip
        table = [] if default else row.numbers()
        replays = [found for numbers, found in timed if numbers == table]
        assert choosing.SCREEN_REPLAYS in replays, "timed as the row that would bring it about"
    chosen = [item for item in measured if item["chosen"]]
    assert [item["tokens"] for item in chosen] == [1, 24]
    rows = calibrate_experts.overrides(measured)
    assert [(row.tokens_upto, list(row.plan)) for row in rows] == [
        (item["tokens"], item["plan"]) for item in chosen
    ]


@pytest.mark.parametrize("token, reason", [(23, "of the statistical bound"), (9, "differs by")])
def test_a_wrong_plan_ends_the_calibration(token, reason, on_a_cpu, monkeypatch):
    """Off in the last token, or in one that float64 does not look at."""
    operators, _ = on_a_cpu
    run = calibrate_experts.Bank.run

    def broken(self, copy, x, weights, ids):
        y = run(self, copy, x, weights, ids)
        if operators.tables[-1][8:9] == [32]:
            y[token] *= 1.25
        return y

    monkeypatch.setattr(calibrate_experts.Bank, "run", broken)
    layer = ExpertLayer(ExpertSizes(6, 6, 2, 256, 128), 4.0, "mcg")
    with pytest.raises(arms.WrongResult, match=rf"24 tokens, plan \[32, 0, \d+\].*{reason}"):
        calibrate_experts.Calibration(1e9, H200, "cpu").layer(layer, (24,), lambda: None)
    assert operators.tables[-1] == []


def test_a_reading_that_memory_cannot_give_is_told(on_a_cpu):
    layer = ExpertLayer(ExpertSizes(6, 6, 2, 256, 128), 4.0, "mcg")
    calibration = calibrate_experts.Calibration(0.1, H200, "cpu")
    calibration.layer(layer, (24,), lambda: None)
    assert "the weights came from a cache" in calibration.failures[0]


def test_the_program_writes_a_profile_and_goes_on_where_it_stopped(
    on_a_cpu, monkeypatch, tmp_path, capsys
):
    """All of `calibrate.py` but what asks the card: two layers, broken off after the first."""
    operators, timed = on_a_cpu
    key = tuning.Key(device_name="H200", compute_capability="9.0", sms=132, power_limit_w=700,
                     driver_major=580, cuda_runtime="13.0", plugin_version="0.1.0",
                     source_hash="a")  # fmt: skip
    facts = SimpleNamespace(l2_bytes=60 << 20)
    scale = SimpleNamespace(read_gb_s=1e9)
    monkeypatch.setattr(calibrate.devices, "monitor", lambda: None)
    monkeypatch.setattr(calibrate.devices, "device_facts", lambda index, nvml: facts)
    monkeypatch.setattr(calibrate.ruler, "measure", lambda nvml: scale)
    monkeypatch.setattr(calibrate.ruler, "describe", lambda facts, scale: ["a ruler"])
    monkeypatch.setattr(timing, "use_own_stream", lambda: None)
    monkeypatch.setattr(tuning, "current_key", lambda: key)
    monkeypatch.setattr(ops, "cuda_device", lambda: H200)
    real = calibrate_experts.Calibration
    monkeypatch.setattr(calibrate_experts, "Calibration", lambda *a: real(*a, on="cpu"))
    out = tmp_path / "profiles" / "p.json"

    def calibrate_two():
        calibrate.main(out, "none", "4", "mcg", "1", "6x2:256x128,4of6x2:256x128", tokens="1,24")

    layer_of = real.layer

    def stops(self, layer, *rest):
        if layer.sizes.experts == 4:
            raise KeyboardInterrupt
        return layer_of(self, layer, *rest)

    monkeypatch.setattr(real, "layer", stops)
    with pytest.raises(KeyboardInterrupt):
        calibrate_two()
    assert [file.name for file in out.parent.iterdir()] == ["p.json.partial"]
    monkeypatch.setattr(real, "layer", layer_of)
    before = len(timed)
    calibrate_two()
    said = capsys.readouterr().err
    assert "1 layers are measured" in said.replace("\n", " ")
    assert [file.name for file in out.parent.iterdir()] == ["p.json"]
    profile = tuning.load_profile(out)
    assert profile.key == key and profile.overrides == []
    assert {row.experts for row in profile.experts} == {4, 6}
    assert operators.tables[-1] == profile.expert_table() and operators.plans[-1] == []
    again = {tuple(numbers[2:4]) for numbers, _ in timed[before:] if numbers}
    assert again == {(4, 6)}, "what was measured is not measured again"
    assert "4of6x2:256x128 4 bit mcg" in said

    def extend(experts):
        first = len(timed)
        calibrate.main(out, "none", "4", "mcg", "1", experts, tokens="1", extend=True)
        return len(timed) - first

    assert extend("6x2:256x128") == 0 and tuning.load_profile(out) == profile
    assert extend("") == 0, "a model without experts adds nothing"
    assert extend("6x2:256x128,5of6x2:256x128") > 0
    more = tuning.load_profile(out)
    assert {item.experts for item in more.expert_measurements} == {4, 5, 6}
    assert more.expert_measurements[: len(profile.expert_measurements)] == (
        profile.expert_measurements
    )
    monkeypatch.setattr(tuning, "current_key", lambda: key.model_copy(update={"sms": 100}))
    with pytest.raises(typer.Exit) as stopped:
        extend("3of6x2:256x128")
    assert stopped.value.exit_code == 2 and "sms is 100" in capsys.readouterr().err
    assert tuning.load_profile(out) == more


def test_experts_of_a_checkpoint(tmp_path):
    """Every rate of first gates once, columns as a rank holds them, 128-blocks around a cut."""
    awkward_moe().save(tmp_path)
    (whole,) = layers_of(tmp_path, 1, False)
    assert whole == ExpertLayer(ExpertSizes(EXPERTS, EXPERTS, 2, 256, 256), 4.0, "mcg")
    halves = layers_of(tmp_path, 2, False)
    assert [layer.sizes.inner for layer in halves] == [128, 256]
    assert all(layer.sizes[:2] == (EXPERTS, EXPERTS) for layer in halves)
    shared = layers_of(tmp_path, 4, True)
    assert [layer.sizes for layer in shared] == [
        ExpertSizes(1, EXPERTS, 2, 256, 256),
        ExpertSizes(2, EXPERTS, 2, 256, 256),
    ]
    with pytest.raises(ValueError, match="192 columns wide, which 5 ranks cannot share"):
        layers_of(tmp_path, 5, False)
    linears, mixtures = calibrate.layers_to_measure("none", "4", "mcg", "", tmp_path, 1, False)
    assert linears == [] and mixtures == [whole]


def test_experts_of_a_real_checkpoint(reference_data):
    (layer,) = layers_of(reference_data / "tiny" / "tiny-qwen3-moe-mcg4", 1, False)
    assert layer.sizes.experts == layer.sizes.global_experts > layer.sizes.slots
    assert (layer.bits, layer.codebook) == (4.0, "mcg")


def test_every_layer_once_at_rates_that_exist():
    linears, mixtures = calibrate.layers_to_measure(
        "128x256,128x256", "2,2.5", "mcg,mul1", "8x2:128x128,8x2:128x128", None, 1, False
    )
    kinds = [(2.0, "mcg"), (2.0, "mul1"), (2.5, "mul1")]
    assert [(layer.bits, layer.codebook) for layer in linears] == kinds
    assert [(layer.bits, layer.codebook) for layer in mixtures] == kinds
    keys = {tuple(layer.key) for layer in [*linears, *mixtures]}
    assert len(keys) == 6, "the partial file tells them apart"


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--shapes", "none"], "nothing to measure"),
        (["--experts", "8x2"], "expected ExT:HxI, such as 128x8:2048x768"),
        (["--tokens", "0"], "expected positive whole numbers"),
        (["--model", "/nonexistent"], "/nonexistent"),
    ],
)
def test_usage(arguments, reason, tmp_path):
    app = typer.Typer()
    app.command()(calibrate.main)
    done = CliRunner().invoke(app, ["--out", str(tmp_path / "p.json"), *arguments])
    assert done.exit_code == 2 and reason in done.output + done.stderr
    assert list(tmp_path.iterdir()) == []
