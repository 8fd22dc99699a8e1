"""The grid of `bench/linear.py`: what is asked for, what is run, what is compared."""

import os
import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from bench import arms, calibrate, linear, peers, report, ruler
from bench.arms import Kernel
from exl3_plugin import ops


def test_shapes_rates_rows_and_options_are_read():
    assert linear.parse_shapes("5120x12288, 4096X2048") == [(5120, 12288), (4096, 2048)]
    assert linear.parse_bits("4,2.5") == [4.0, 2.5]
    assert linear.parse_numbers("1, 16") == [1, 16]
    assert linear.parse_options(["dependent_launch=0"]) == {"dependent_launch": False}
    assert linear.parse_names("none", arms.KERNELS, "kernel") == []
    assert linear.parse_dtype("float16") is torch.float16


@pytest.mark.parametrize(
    "parse, text",
    [
        (linear.parse_shapes, "5120"),
        (linear.parse_shapes, "5120x100"),
        (linear.parse_shapes, "0x128"),
        (linear.parse_bits, "4.5"),
        (linear.parse_bits, "four"),
        (linear.parse_numbers, "0"),
        (linear.parse_numbers, "1,-2"),
        (linear.parse_dtype, "float32"),
        (lambda text: linear.parse_options([text]), "exact=1"),
        (lambda text: linear.parse_options([text]), "batch_invariant=2"),
        (lambda text: linear.parse_names(text, arms.KERNELS, "kernel"), "auto,12"),
        (peers.parse, "exllamav2"),
    ],
)
def test_what_means_nothing_is_refused(parse, text):
    with pytest.raises(ValueError):
        parse(text)


def test_every_kernel_runs_in_the_forms_it_has():
    names = ["dense", "64", "8", "auto"]
    kernels = linear.kernels_to_run(names, ["exact", "fast"])
    assert kernels == [
        Kernel("auto", "exact"),
        Kernel("auto", "fast"),
        Kernel("8", "exact"),
        Kernel("8", "fast"),
        Kernel("64", "exact"),
        Kernel("dense", "exact"),
    ]
    assert Kernel("auto", "fast").plan is None
    assert Kernel("8", "fast").plan == ops.Plan(ops.GEMM, 8, ops.FAST, 0)
    assert Kernel("dense", "exact").plan.kernel == ops.DENSE


def test_points_that_say_nothing_new_are_left_out():
    assert Kernel("auto", "fast").applies(8) and not Kernel("auto", "fast").applies(9)
    assert not Kernel("8", "exact").applies(2048) and Kernel("128", "exact").applies(2048)
    assert not Kernel("dense", "exact").applies(1) and Kernel("dense", "exact").applies(8192)
    assert all(Kernel("auto", "exact").applies(m) for m in (1, 17, 8192))


def test_limits_follow_the_kernel_and_the_type():
    gemm, dense = ops.Plan(ops.GEMM, 8, 0, 0), ops.Plan(ops.DENSE, 0, 0, 0)
    assert arms.limit_for(gemm, torch.bfloat16) < arms.limit_for(dense, torch.bfloat16)
    assert arms.limit_for(gemm, torch.float16) < arms.limit_for(gemm, torch.bfloat16)


def test_ratios_are_above_one_where_ours_is_faster():
    compared = {"torch": {"us": 30.0}, "exllamav3": {"us": 45.0}, "marlin": {"paths": {}}}
    found = linear.with_ratios({"us": 15.0, "peers": compared})
    assert found["ratios"] == {"torch": 2.0, "exllamav3": 3.0}
    assert "ratios" not in linear.with_ratios({"problem": "wrong", "peers": compared})


def test_activations_hold_every_rotation():
    shapes, rows, l2 = [(512, 256), (1024, 128)], [1, 8, 300], 1 << 20
    elements = linear.activation_elements(shapes, rows, l2)
    made = arms.Activations(elements, "cpu")
    for k, n in shapes:
        for m in rows:
            for bits in (1, 8):
                copies = linear.timing.copies_needed(k * n * bits // 8, l2)
                count = linear.timing.ring_size(2 * m * k, l2, copies)
                views = made.views(m, k, count, torch.bfloat16)
                assert [tuple(view.shape) for view in views] == [(m, k)] * count
                assert len({view.data_ptr() for view in views}) == count


def paths_of(codebook, bits, rows):
    bank = linear.generate.random_bank(128, 128, bits, codebook, 1, "cpu")
    return [path.name for path in peers.exllamav3_paths(None, bank, rows)]


def test_exllamav3_is_driven_as_it_drives_itself():
    assert paths_of("mcg", 4, 1) == ["gemm", "gemv"]
    assert paths_of("3inst", 3, 1) == ["gemm"], "its GEMV kernels know 3inst at 4 bits alone"
    assert paths_of("mcg", 6, 8) == ["gemm"]
    assert paths_of("mcg", 4, 144) == ["gemm", "rebuild rotated", "rebuild original"]
    assert paths_of("mcg", 4, 145) == ["rebuild rotated", "rebuild original"]
    assert [peers.exllamav3_own_choice(m) for m in (144, 145, 1023, 1024)] == [
        "gemm",
        "rebuild rotated",
        "rebuild rotated",
        "rebuild original",
    ]
    for rows in (1, 64, 144, 145, 2048):
        assert peers.exllamav3_own_choice(rows) in paths_of("mcg", 4, rows)


def test_a_peer_that_is_not_here_is_named_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("EXL3_PEERS", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = peers.find(["exllamav3", "torch"])
    assert found.names() == ["torch"]
    assert "exllamav3_ext" in found.absent["exllamav3"]
    (tmp_path / "exllamav3_ext.py").write_text("exl3_gemm = None\n")
    assert peers.find(["exllamav3"]).names() == ["exllamav3"]
    sys.modules.pop("exllamav3_ext")


def run(function, *arguments):
    """A script's command line in this process."""
    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    "function, arguments, words",
    [
        (linear.main, ["--shapes", "5120x100"], "multiples of 128"),
        (linear.main, ["--bits", "4.5"], "4.5 bits do not exist"),
        (linear.main, ["--option", "exact=1"], "expected batch_invariant or dependent_launch"),
        (calibrate.main, ["--out", "x.json", "--codebooks", "3inst"], "unknown codebook"),
        (report.main, ["absent.jsonl"], "absent.jsonl"),
        (report.main, [__file__, "--metrics", "joy"], "test_linear_bench.py:1"),
    ],
)
def test_usage_errors_exit_with_two(function, arguments, words):
    result = run(function, *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("function", [linear.main, ruler.main, calibrate.main])
def test_without_a_gpu_the_reason_is_said(function, tmp_path):
    arguments = ["--out", str(tmp_path / "p.json")] if function is calibrate.main else []
    result = run(function, *arguments)
    assert result.exit_code == 2, result.output
    assert "CUDA" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["linear", "ruler", "calibrate", "report"])
def test_scripts_start_from_anywhere(script, checkout, tmp_path):
    """Outside the checkout and without PYTHONPATH, as a person calls them."""
    result = subprocess.run(
        [sys.executable, str(checkout / "bench" / f"{script}.py"), "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout
