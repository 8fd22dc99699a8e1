"""A few seconds of every kernel of the routed experts, to run under compute-sanitizer.

    compute-sanitizer --tool memcheck python3 -m tests.gpu.moe_sanitize
    (likewise racecheck, initcheck, synccheck)

Torch's caching allocator is off, so that every output and workspace is an allocation of its own.
Results are compared with the CPU kernels, so what is wrong but clean fails as well.
"""

import argparse
import os
import sys
import time

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from exl3_plugin import experts, ops
from tests.gpu import moe_layers
from tests.moe import moe_cases


def main() -> int:
    """Runs the cases; 1 if a result is off by more than rounding explains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=int, default=len(moe_cases.RATES), help="how many rates")
    parser.add_argument("--plans", default=",".join(moe_layers.PLANS), help="names of plans")
    parser.add_argument("--short", action="store_true", help="one layer, two calls a plan")
    arguments = parser.parse_args()
    ops.require_cuda()
    start, calls, worst = time.monotonic(), 0, 0.0
    rates = moe_cases.RATES[: arguments.rates]
    layers = [(4, 128, 128, 128, kind) for kind in rates]
    layers.append((5, 256, 256, 384, lambda e, p: moe_cases.RATES[(3 * e + p) % 27]))
    layers.append((3, 1024, 256, 128, moe_cases.RATES[-1]))
    if arguments.short:
        layers = layers[-1:]
    for number, (count, k, inner, n, kinds) in enumerate(layers):
        stored = moe_cases.layer(number, count, k, inner, n, kinds)
        cut = (3, inner - 5)
        ours, reference = (experts.pack(stored, d, cut, n - 3) for d in ("cuda", "cpu"))
        held = moe_layers.Layer(ours, None)
        dtype = moe_layers.DTYPES[number % 2]
        for name in arguments.plans.split(","):
            plan = moe_layers.PLANS[name]
            if not held.takes(plan, dtype):
                continue
            sizes = (1, 19) if k == 128 else (3,) if arguments.short else (3, 2 * plan[0] + 3)
            for m in sizes:
                weights, ids = moe_cases.routing([number, m], m, 2, count)
                ids[m // 2, 0] = -1
                x = moe_cases.activations(m, m, k, dtype)
                expected = reference.run(x.float(), weights, ids).double()
                for blocks in (0,) if k == 128 else (0, 3):
                    forced = [*plan[:2], blocks, 0]
                    got = held.run(x.cuda(), weights.cuda(), ids.cuda(), forced).cpu().double()
                    error = float((got - expected).norm() / expected.norm().clamp(min=1e-300))
                    calls += 1
                    worst = max(worst, error)
                    if not error <= 1e-2:
                        print(f"WRONG: {name} layer {number} m={m} blocks={blocks}: {error:.2e}")
                        return 1
    torch.cuda.synchronize()
    print(f"{calls} calls, largest relative error {worst:.1e}, {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
