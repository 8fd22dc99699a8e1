"""Wrong arguments on CUDA: an error that says what was found and expected, never a crash."""

import re

import pytest
import torch

from exl3_plugin import ops
from tests.gpu import cases

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("gpu")]

NAMES = ("x", "trellis", "suh", "svh", "bias", "shards", "k_begin")


def arguments(dtype=torch.bfloat16) -> dict:
    specs = [("mcg", 64, 128), ("mul1", 40, 256, 0, 200)]
    layer = cases.make_layer(1, 256, specs, bias=torch.float32)
    x = cases.activations(2, 3, 250, dtype)
    values = (x, layer.flat, layer.suh, layer.svh, layer.bias, layer.fields, 6)
    return dict(zip(NAMES, values))


def shifted(tensor):
    """The same numbers two bytes further on."""
    whole = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype, device=tensor.device)
    whole[1 : 1 + tensor.numel()] = tensor
    return whole[1 : 1 + tensor.numel()]


def changed_field(index, value):
    return lambda fields: [*fields[:index], value, *fields[index + 1 :]]


REFUSED = {
    "x float32": ("x", lambda t: t.float(), ["x", "bfloat16", "float16"]),
    "x float64": ("x", lambda t: t.double(), ["x", "bfloat16", "float16"]),
    "x on the CPU": ("x", lambda t: t.cpu(), ["x", "CUDA|cuda"]),
    "x without dimensions": ("x", lambda t: t[0, 0], ["x", "dimension"]),
    "x too wide": ("x", lambda t: t.new_zeros(3, 256), ["262", "256"]),
    "trellis int32": ("trellis", lambda t: t.view(torch.int32), ["trellis"]),
    "trellis on the CPU": ("trellis", lambda t: t.cpu(), ["trellis", "CUDA|cuda"]),
    "trellis not contiguous": ("trellis", lambda t: t.repeat(2)[::2], ["trellis", "contiguous"]),
    "trellis not flat": ("trellis", lambda t: t.view(2, -1), ["trellis", "dimension"]),
    "trellis not aligned": ("trellis", shifted, ["trellis", "align|multiple of 16|16 bytes"]),
    "trellis short": ("trellis", lambda t: t[:-8], ["trellis", "18424", "18432"]),
    "suh not aligned": (
        "suh",
        lambda t: torch.cat([t.new_zeros(4), t.flatten()])[4:].view_as(t),
        ["suh", "16 bytes"],
    ),
    "suh float32": ("suh", lambda t: t.float(), ["suh"]),
    "suh on the CPU": ("suh", lambda t: t.cpu(), ["suh", "CUDA|cuda"]),
    "suh of one shard": ("suh", lambda t: t[:1], ["suh", r"\b1\b", r"\b2\b"]),
    "suh flat": ("suh", lambda t: t.flatten(), ["suh", "dimension"]),
    "svh short": ("svh", lambda t: t[:-128], ["svh", "256", "384"]),
    "svh bfloat16": ("svh", lambda t: t.bfloat16(), ["svh"]),
    "bias short": ("bias", lambda t: t[:-1], ["bias", "327", "328"]),
    "bias on the CPU": ("bias", lambda t: t.cpu(), ["bias"]),
    "bias integers": ("bias", lambda t: t.int(), ["bias"]),
    "shards cut off": ("shards", lambda f: f[:-1], ["shards", r"\b9\b", r"\b5\b"]),
    "no shards": ("shards", lambda f: [], ["shards", r"\b0\b", r"\b5\b"]),
    "half rate with mcg": ("shards", changed_field(1, 40), ["codebook 1", "40"]),
    "no such codebook": ("shards", changed_field(0, 3), ["codebook 3"]),
    "no such rate": ("shards", changed_field(1, 72), ["72"]),
    "columns no block": ("shards", changed_field(2, 120), ["120", "128"]),
    "too many columns": ("shards", changed_field(9, 300), ["300", "256"]),
    "columns before the first": ("shards", changed_field(3, -1), ["-1"]),
    "rows before the first": ("k_begin", lambda k: -1, ["-1", "256"]),
    "rows past the last": ("k_begin", lambda k: 7, ["257", "256"]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_linear_refuses(what):
    name, change, texts = REFUSED[what]
    values = arguments()
    values[name] = change(values[name])
    for op, extra in ((torch.ops.exl3.linear, []), (torch.ops.exl3.linear_with, [[0, 8, 0, 0]])):
        with pytest.raises(RuntimeError) as caught:
            op(*values.values(), *extra)
        message = str(caught.value).split("Exception raised from")[0]
        assert "exl3::linear" in message
        missing = [text for text in texts if not re.search(text, message)]
        assert not missing, f"{what}: no {missing} in {message!r}"


@pytest.mark.parametrize(
    "plan,texts",
    [
        ([0, 8, 0], ["3"]),
        ([2, 8, 0, 0], ["2"]),
        ([0, 12, 0, 0], ["12", "8"]),
        ([0, 32, 1, 0], ["32", "8|16"]),
        ([0, 8, 2, 0], ["2"]),
        ([0, 8, 0, -1], ["-1"]),
    ],
)
def test_plans_that_do_not_exist(plan, texts):
    with pytest.raises(RuntimeError) as caught:
        torch.ops.exl3.linear_with(*arguments().values(), plan)
    message = str(caught.value).split("Exception raised from")[0]
    assert all(re.search(text, message) for text in texts), message


def test_other_ops_refuse():
    layer = cases.make_layer(3, 128, [("mcg", 64, 128)])
    stored = torch.from_numpy(layer.shards[0].trellis).cuda()
    for trellis, codebook in ((stored, 5), (stored[..., :40], 1), (stored.flatten(), 1)):
        with pytest.raises(RuntimeError, match="exl3::reconstruct"):
            torch.ops.exl3.reconstruct(trellis, codebook)
    with pytest.raises(RuntimeError, match="nonsense"):
        torch.ops.exl3.set_option("nonsense", 1)
    with pytest.raises(RuntimeError, match=r"\b3\b.*\b9\b|\b9\b.*\b3\b"):
        torch.ops.exl3.set_plan_table([1, 2, 3])
    with pytest.raises(RuntimeError, match=r"exl3::set_plan_table.*is none"):
        torch.ops.exl3.set_plan_table([0, 0, 0, -1, 16, 0, 0, 0, 0])
    odd = torch.cat([stored.new_zeros(1), stored.flatten()])[1:].view_as(stored)
    with pytest.raises(RuntimeError, match="4 bytes"):
        torch.ops.exl3.reconstruct(odd, 1)
    arguments = (layer.flat, layer.suh, layer.svh, layer.fields)
    with pytest.raises(RuntimeError, match="129"):
        torch.ops.exl3.dense_weight(*arguments, 1, 128, True)


@pytest.mark.parametrize("name", ["rows8", "dense"])
def test_no_inputs_give_the_bias(name):
    """x of width zero, in three dimensions: every sum is empty."""
    layer = cases.make_layer(4, 128, [("mcg", 64, 128)], bias=torch.float32)
    x = torch.empty(2, 3, 0, device="cuda", dtype=torch.bfloat16)
    y = layer.run(x, cases.PLANS[name])
    assert y.shape == (2, 3, 128)
    assert torch.equal(y, layer.bias.bfloat16().expand(2, 3, 128))


def test_the_device_works_after_refusals():
    values = arguments()
    with pytest.raises(RuntimeError):
        torch.ops.exl3.linear(values["x"].float(), *list(values.values())[1:])
    assert torch.isfinite(torch.ops.exl3.linear(*values.values())).all()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_opcheck(dtype):
    values = list(arguments(dtype).values())
    torch.library.opcheck(torch.ops.exl3.linear.default, values)
    torch.library.opcheck(torch.ops.exl3.linear.default, [*values[:4], None, *values[5:]])
    torch.library.opcheck(torch.ops.exl3.linear_with.default, [*values, [0, 16, 0, 0]])
    _, trellis, suh, svh, _, shards, k_begin = values
    weight = [trellis, suh, svh, shards, k_begin, 250, dtype == torch.bfloat16]
    torch.library.opcheck(torch.ops.exl3.dense_weight.default, weight)
    stored = ops.from_strips(trellis[: 128 * 64], 256, 128)
    torch.library.opcheck(torch.ops.exl3.reconstruct.default, [stored, 1])


def test_compiles_whole():
    x, *rest = arguments().values()

    def layer(x):
        return torch.nn.functional.silu(torch.ops.exl3.linear(x * 2, *rest)) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (3, 1, 8, 200):
        rows = x[:1].repeat(m, 1)
        torch.testing.assert_close(compiled(rows), layer(rows), rtol=0, atol=0)


def test_python_face():
    """`ops.linear` and `ops.reconstruct` take tensors as stored and reorder them themselves."""
    layer = cases.make_layer(4, 256, [("mul1", 64, 128)])
    stored = torch.from_numpy(layer.shards[0].trellis).cuda()
    x = cases.activations(5, 4, 256, torch.float16)
    y = ops.linear(x, stored, layer.suh[0], layer.svh, "mul1")
    assert cases.same_bits(y, layer.run(x))
    assert torch.equal(ops.reconstruct(stored, "mul1").double(), layer.weights[0].exact)
    device = ops.cuda_device()
    assert device.capability >= 80 and device.multiprocessors > 0
    plan = ops.plan(device, 4, 256, 128, 4, "mul1")
    assert cases.same_bits(layer.run(x, plan), y)
