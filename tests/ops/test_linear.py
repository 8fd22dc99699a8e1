"""`exl3::linear` against a float64 oracle, against exllamav3's own outputs, and against itself."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from exl3_plugin import format as exl3
from exl3_plugin import ops
from tests.ops import linear_cases as cases


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()


def test_every_rate_codebook_row_count_and_dtype(capsys):
    result = cases.sweep_rates()
    assert len(result) == 27
    with capsys.disabled():
        print(f"\nexl3::linear on {ops.cpu_isa()}: worst fraction of the bound, all rates")
        for codebook in exl3.CODEBOOKS:
            line = {w: v for (c, w), v in result.items() if c == codebook}
            print(f"  {codebook:6}", " ".join(f"{w / 16:g}b:{v[0]:.2f}" for w, v in line.items()))
    assert max(statistical for statistical, _ in result.values()) <= 1
    assert max(worst for _, worst in result.values()) <= 1


def test_fused_layers_with_cuts_and_bias():
    statistical, worst = cases.sweep_shards()
    assert statistical <= 1 and worst <= 1


def test_bound_notices_a_wrong_weight():
    """One flipped bit of one tile has to break the bound, or the bound proves nothing."""
    rng = np.random.default_rng(5)
    shard = cases.random_shard(rng, 512, 256, "mcg", 64)
    x = torch.from_numpy(rng.standard_normal((3, 512)).astype(np.float32))
    y = cases.run(x, [shard])
    assert cases.Oracle(x, [shard]).fractions(y)[0] <= 1
    shard.trellis[7, 3, 20] ^= 1 << 5
    assert cases.Oracle(x, [shard]).fractions(y)[0] > 3


def test_outputs_of_exllamav3(reference_data):
    data = np.load(reference_data / "matrices" / "matrices.npz")
    names = sorted(key.removesuffix("_trellis") for key in data if key.endswith("_trellis"))
    assert len(names) == 22
    for name in names:
        get = lambda what, name=name: torch.from_numpy(data[f"{name}_{what}"])  # noqa: E731
        codebook = name.split("_")[0]
        y = ops.linear(get("x"), get("trellis"), get("suh"), get("svh"), codebook)
        reference = get("y").double()
        error = (y.double() - reference).norm() / reference.norm()
        assert error <= 5e-4, f"{name}: relative L2 {error:.2e}"
        inner = ops.reconstruct(get("trellis"), codebook)
        assert torch.equal(inner.view(torch.int16), get("w").view(torch.int16)), name


@pytest.mark.parametrize("isa", ["avx512", "avx2", "neon", "portable"])
def test_every_instruction_set(isa, tmp_path):
    """All paths pass the same sweeps, and agree with this process within fp32 rounding."""
    out = tmp_path / "outputs.npz"
    command = [sys.executable, "-m", "tests.ops.linear_cases", "--save", str(out)]
    result = subprocess.run(
        command, env={**os.environ, "EXL3_CPU_ISA": isa}, capture_output=True, text=True
    )
    if result.returncode != 0 and "cannot run here" in result.stderr:
        pytest.skip(f"this processor has no {isa}")
    assert result.returncode == 0, result.stderr
    for line in result.stdout.splitlines():
        used, sweep, statistical, worst = line.split()
        assert used == isa
        assert float(statistical) <= 1 and float(worst) <= 1, (sweep, line)
    saved = np.load(out)
    for codebook, words in cases.RATES:
        rng = np.random.default_rng(words)
        shard = cases.random_shard(rng, 512, 256, codebook, words)
        for m in (1, 5):
            x = torch.from_numpy(rng.standard_normal((m, 512)).astype(np.float32))
            ours = cases.run(x, [shard]).numpy()
            other = saved[f"{codebook}_{words}_{m}"]
            assert np.linalg.norm(ours - other) <= 2e-6 * np.linalg.norm(ours)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_row_does_not_depend_on_its_batch(dtype, monkeypatch):
    """Always, except that many bfloat16 rows take the dense route unless vLLM forbids it."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    rng = np.random.default_rng(3)
    shards = [
        cases.random_shard(rng, 640, 256, "mul1", 56),
        cases.random_shard(rng, 640, 128, "3inst", 96, 64, 64),
    ]
    x = torch.from_numpy(rng.standard_normal((393, 600))).to(dtype)
    whole = cases.run(x, shards)
    for rows in (slice(0, 1), slice(5, 6), slice(191, 194), slice(300, 307), slice(392, 393)):
        assert torch.equal(cases.run(x[rows], shards), whole[rows])
    if dtype == torch.bfloat16:
        monkeypatch.delenv("VLLM_BATCH_INVARIANT")
        assert not torch.equal(cases.run(x, shards), whole)
        assert torch.equal(cases.run(x[:127], shards), whole[:127])


def test_dense_route_over_slices_cuts_and_padding():
    """Wider than one slice, columns and rows cut inside blocks, several shards."""
    rng = np.random.default_rng(12)
    shards = [
        cases.random_shard(rng, 384, 2304, "mul1", 96, 100, 2150),
        cases.random_shard(rng, 384, 128, "3inst", 32, 3, 77),
    ]
    x = torch.from_numpy(rng.standard_normal((2, 70, 200))).bfloat16()
    y = cases.run(x, shards, k_begin=70)
    assert y.shape == (2, 70, 2227)
    statistical, worst = cases.Oracle(x.reshape(140, 200), shards, k_begin=70).fractions(
        y.reshape(140, 2227)
    )
    assert statistical <= 1 and worst <= 1


def test_threads_do_not_change_bits():
    rng = np.random.default_rng(4)
    shard = cases.random_shard(rng, 1024, 1536, "mcg", 48)
    x = torch.from_numpy(rng.standard_normal((9, 1024)).astype(np.float32))
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append((cases.run(x, [shard]), cases.run(x[:1], [shard])))
    finally:
        torch.set_num_threads(threads)
    for many, one in results[1:]:
        assert torch.equal(many, results[0][0]) and torch.equal(one, results[0][1])


def test_shapes_strides_and_zero_columns():
    rng = np.random.default_rng(6)
    shard = cases.random_shard(rng, 256, 256, "mul1", 64)
    shard.svh[100:228] = 0
    x = torch.from_numpy(rng.standard_normal((2, 3, 256)).astype(np.float32))
    y = cases.run(x, [shard])
    assert y.shape == (2, 3, 256)
    assert (y[..., 100:228] == 0).all()
    assert torch.equal(y.reshape(6, 256), cases.run(x.reshape(6, 256), [shard]))
    wide = torch.zeros(6, 300)
    wide[:, 20:276] = x.reshape(6, 256)
    assert torch.equal(cases.run(wide[:, 20:276], [shard]), y.reshape(6, 256))
    assert torch.equal(cases.run(x.reshape(6, 256).t().contiguous().t(), [shard]), y.view(6, 256))
    assert torch.equal(cases.run(x[0, 0], [shard]), y[0, 0])
    assert cases.run(x[:0], [shard]).shape == (0, 3, 256)


def _arguments(rng, dtype=torch.float32, m=3):
    shards = [
        cases.random_shard(rng, 256, 128, "mcg", 64),
        cases.random_shard(rng, 256, 256, "mul1", 40, 0, 200),
    ]
    pieces = [(torch.from_numpy(s.trellis), s.codebook, s.n_begin, s.n_out) for s in shards]
    flat, fields = ops.pack_shards(pieces)
    suh = torch.from_numpy(np.stack([s.suh for s in shards]))
    svh = torch.from_numpy(np.concatenate([s.svh for s in shards]))
    x = torch.from_numpy(rng.standard_normal((m, 250))).to(dtype)
    bias = torch.from_numpy(rng.standard_normal(328)).to(dtype)
    return [x, flat, suh, svh, bias, fields, 6]


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_opcheck(dtype):
    arguments = _arguments(np.random.default_rng(7), dtype)
    torch.library.opcheck(torch.ops.exl3.linear.default, arguments)
    torch.library.opcheck(torch.ops.exl3.linear.default, [*arguments[:4], None, *arguments[5:]])
    trellis = torch.from_numpy(
        cases.random_shard(np.random.default_rng(8), 128, 128, "mcg", 64).trellis
    )
    torch.library.opcheck(torch.ops.exl3.reconstruct.default, [trellis, 1])


def test_compiles_whole():
    x, *rest = _arguments(np.random.default_rng(9))

    def layer(x):
        return torch.nn.functional.silu(torch.ops.exl3.linear(x * 2, *rest)) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (3, 1, 8):
        rows = x[:1].repeat(m, 1)
        torch.testing.assert_close(compiled(rows), layer(rows), rtol=0, atol=0)


def test_wrong_arguments_are_explained():
    rng = np.random.default_rng(10)
    x, flat, suh, svh, bias, fields, k_begin = _arguments(rng)
    linear = torch.ops.exl3.linear

    def refuses(text, *arguments):
        with pytest.raises(RuntimeError, match=text):
            linear(*arguments)

    refuses("float32, bfloat16 or float16", x.double(), flat, suh, svh, bias, fields, k_begin)
    refuses(
        "x covers rows .6, 262. but the weights have 256",
        torch.zeros(1, 256),
        flat,
        suh,
        svh,
        bias,
        fields,
        6,
    )
    refuses(
        "trellis holds .* words, the shards need", x, flat[:-8], suh, svh, bias, fields, k_begin
    )
    refuses("svh holds", x, flat, suh, svh[:-128], bias, fields, k_begin)
    refuses("suh is", x, flat, suh[:1], svh, bias, fields, k_begin)
    refuses("codebook 1 with 40 words", x, flat, suh, svh, bias, [1, 40, *fields[2:]], k_begin)
    refuses("shards holds 9 numbers", x, flat, suh, svh, bias, fields[:-1], k_begin)
    refuses(
        r"wants columns \[0, 300\) of 256", x, flat, suh, svh, bias, [*fields[:-1], 300], k_begin
    )
    refuses("bias must be contiguous with 328", x, flat, suh, svh, bias[:-1], fields, k_begin)
    refuses("suh has scalar type", x, flat, suh.float(), svh, bias, fields, k_begin)
