"""A few seconds of every kernel on tiny shapes, to run under compute-sanitizer.

    compute-sanitizer --tool memcheck python3 -m tests.gpu.sanitize
    (likewise racecheck, initcheck, synccheck; --dense also runs the matrix library's kernels)

Torch's caching allocator is off, so that every output and workspace is an allocation of its own
and a step over its end is one over the end of an allocation. Results are compared with the CPU
kernels, so the script also fails on what is wrong but clean.
"""

import argparse
import os
import sys
import time

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from exl3_plugin import ops
from tests.gpu import cases
from tests.gpu.fused_layers import gated_linear, norm_linear
from tests.ops import fused_cases


def check(layer: cases.Layer, reference: cases.Layer, x: torch.Tensor, plan) -> float:
    """Relative L2 error of one call against the CPU kernels in float32."""
    y = layer.run(x, plan).cpu().double()
    expected = reference.run(x.cpu().float()).double()
    return float((y - expected).norm() / expected.norm().clamp(min=1e-300))


def check_fused(layer: cases.Layer, reference: cases.Layer, k_in: int, m: int, dtype) -> float:
    """The same for a norm and an activation inside, both results of the former included."""
    norm = fused_cases.norm_inputs(1, m, k_in, dtype, dtype)
    both = fused_cases.gated_inputs(2, m, k_in, dtype)
    expected = [*norm_linear(reference, *norm), gated_linear(reference, both)]
    on_device = [t.cuda() for t in norm]
    found = [*norm_linear(layer, *on_device), gated_linear(layer, both.cuda())]
    errors = [
        (y.cpu().double() - e.double()).norm() / e.double().norm().clamp(min=1e-300)
        for y, e in zip(found, expected)
    ]
    return float(max(errors))


def main() -> int:
    """Runs the cases; 1 if a result is off by more than rounding explains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dense", action="store_true", help="also torch's own product")
    parser.add_argument("--rates", type=int, default=len(cases.RATES), help="how many rates")
    arguments = parser.parse_args()
    ops.require_cuda()
    start, calls, worst = time.monotonic(), 0, 0.0
    specs = [(128, [(*rate, 128)], 0) for rate in cases.RATES[: arguments.rates]]
    specs.append((384, [("mcg", 64, 256, 3, 201), ("mul1", 40, 128), ("3inst", 96, 128)], 70))
    # Long enough that every ring is filled more than once.
    specs.append((2048, [("mul1", 64, 128), ("mul1", 64, 128)], 0))
    for number, (k, spec, k_begin) in enumerate(specs):
        bias = (None, torch.float32, torch.bfloat16, torch.float16)[number % 4]
        layer, reference = (
            cases.make_layer(number, k, spec, device, bias, k_begin) for device in ("cuda", "cpu")
        )
        dtype = cases.DTYPES[number % 2]
        for name, plan in cases.PLANS.items():
            if plan.kernel == ops.DENSE and not arguments.dense:
                continue
            blocks = (0,) if k == 128 or plan.kernel == ops.DENSE else (0, 3)
            for m in (1, plan.rows + 1) if k == 128 else (3, 2 * plan.rows + 3):
                x = cases.activations(m, m, k - k_begin, dtype)
                for count in blocks:
                    error = check(layer, reference, x, plan._replace(blocks=count))
                    calls += 1
                    worst = max(worst, error)
                    if not error <= 1e-2:
                        print(f"WRONG: {name} {spec} m={m} blocks={count}: relative {error:.2e}")
                        return 1
        if ops.cuda_device().capability == 90:
            x = cases.activations(1, 1, k - k_begin, dtype)
            for form, count in ((ops.EXACT, 0), (ops.FAST, 0), (ops.EXACT, 1)):
                error = check(layer, reference, x, ops.Plan(ops.STREAM, 1, form, count))
                calls += 1
                worst = max(worst, error)
                if not error <= 1e-2:
                    print(f"WRONG: one row, form {form} {spec}: relative {error:.2e}")
                    return 1
        for m in (1, 3, 20):
            error = check_fused(layer, reference, (k - k_begin) // 8 * 8, m, dtype)
            calls += 2
            worst = max(worst, error)
            if not error <= 1e-2:
                print(f"WRONG: norm or activation inside {spec} m={m}: relative {error:.2e}")
                return 1
        stored = torch.from_numpy(layer.shards[0].trellis)
        codebook = layer.shards[0].codebook
        decoded = ops.reconstruct(stored.cuda(), codebook).cpu()
        if not torch.equal(decoded, ops.reconstruct(stored, codebook)):
            print(f"WRONG: reconstruct {spec}")
            return 1
        # The rebuilt weight without the library that multiplies with it.
        weight = torch.ops.exl3.dense_weight(
            layer.flat, layer.suh, layer.svh, layer.fields, k_begin, k - k_begin, True
        ).cpu()
        product = torch.eye(k - k_begin) @ weight.float().T
        if reference.bias is not None:
            product = product + reference.bias.float()
        error = float((reference.run(torch.eye(k - k_begin)) - product).norm() / product.norm())
        calls += 2
        if not error <= 1e-2:
            print(f"WRONG: dense_weight {spec}: relative {error:.2e}")
            return 1
    torch.cuda.synchronize()
    print(f"{calls} calls, largest relative error {worst:.1e}, {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
