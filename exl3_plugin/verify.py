"""`python3 -m exl3_plugin.verify DIR --golden FILE.npz`: is what vLLM serves what it should be?

Runs the checkpoint through vLLM, layers, loader and kernels as in service, and compares log
probabilities with those of a reference implementation. Prints one JSON line on stdout; everything
else goes to stderr. Exit code 0: ran, 1: refused, 2: usage.

The golden file holds, for each prompt i: `ids{i}` [T] token ids, `nll{i}` mean next-token loss in
nats, `top_ids{i}` and `top_lp{i}` [T, 16], the best next tokens at each position, best first, and
their log probabilities.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exl3_plugin.checkpoint import read_checkpoint
from exl3_plugin.shards import check_tensor_parallel

CLEAR_NATS = 0.1
SLICE_ROWS = 256


@dataclass(frozen=True)
class Golden:
    """One reference prompt; shapes as in the module's docstring."""

    ids: np.ndarray
    nll: float
    top_ids: np.ndarray
    top_lp: np.ndarray


@dataclass(frozen=True)
class Scored:
    """vLLM's answer to one prompt: log probabilities of the reference's tokens [T, 16], the own
    best token [T], and the mean next-token loss in nats."""

    top_lp: np.ndarray
    best: np.ndarray
    nll: float


class Scorer:
    """Worker extension: keeps the hidden states of a prompt and scores given tokens on them.

    vLLM mixes it into its worker class, in every rank and whatever the executor, so the methods are
    reached by name through `collective_rpc` and logits never leave the workers.
    """

    def exl3_watch(self) -> None:
        """Keep the hidden states of every forward pass from now on."""
        self.exl3_rows = []

        def keep(module, args, kwargs, output):
            positions = kwargs["positions"] if "positions" in kwargs else args[1]
            hidden = output[0] if isinstance(output, tuple) else output
            self.exl3_rows.append(
                (positions.reshape(-1, hidden.shape[0])[0].clone(), hidden.clone())
            )

        self.model_runner.get_model().register_forward_hook(keep, with_kwargs=True)

    def exl3_forget(self) -> None:
        """Forget what was kept so far."""
        self.exl3_rows = []

    def exl3_score(self, top_ids: list[list[int]], ids: list[int]) -> dict | None:
        """Score the prompt just run, then forget it.

        Args:
            top_ids: [T, 16] the reference's best tokens at each position.
            ids: [T] the prompt.

        Returns:
            `top_lp` [T, 16], `best` and `best_lp` [T] and `target_lp` [T - 1], or None on a rank
            that vLLM gathers no logits on.
        """
        import torch

        rows, self.exl3_rows = self.exl3_rows, []
        hidden = _in_order(rows, len(ids))
        wanted = torch.tensor(top_ids, device=hidden.device)
        targets = torch.tensor([*ids[1:], 0], device=hidden.device)
        top_lp, best, best_lp, target_lp = [], [], [], []
        model = self.model_runner.get_model()
        with torch.inference_mode():
            for at in range(0, len(ids), SLICE_ROWS):
                part = slice(at, at + SLICE_ROWS)
                logits = model.compute_logits(hidden[part])
                if logits is None:
                    continue
                lp = logits.float().log_softmax(-1)
                top_lp += lp.gather(1, wanted[part]).tolist()
                target_lp += lp.gather(1, targets[part, None])[:, 0].tolist()
                best += lp.argmax(-1).tolist()
                best_lp += lp.amax(-1).tolist()
        if not best:
            return None
        return {"top_lp": top_lp, "best": best, "best_lp": best_lp, "target_lp": target_lp[:-1]}


def _in_order(rows: list, count: int):
    """Hidden states [count, hidden] from the passes that computed them, padding rows left out."""
    import torch

    out = torch.empty(count, rows[0][1].shape[1], dtype=rows[0][1].dtype, device=rows[0][1].device)
    seen = 0
    for positions, hidden in rows:
        if seen == count or positions[0] != seen:
            continue
        steps = torch.arange(seen, seen + len(positions), device=positions.device)
        run = int((positions == steps).long().cumprod(0).sum())
        run = min(run, count - seen)
        out[seen : seen + run] = hidden[:run]
        seen += run
    if seen != count:
        raise RuntimeError(f"vLLM computed {seen} of {count} positions of the prompt")
    return out


def read_golden(path: Path, prompts: list[int] | None = None) -> list[Golden]:
    """Read the reference prompts; `prompts` picks some by number.

    Raises ValueError where the file is not one, or has no such prompt.
    """
    try:
        with np.load(path) as file:
            arrays = dict(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a golden file: {error}") from error
    found = sorted(int(name[3:]) for name in arrays if name[:3] == "ids" and name[3:].isdigit())
    golden = []
    for i in found if prompts is None else prompts:
        missing = [
            name
            for name in (f"ids{i}", f"nll{i}", f"top_ids{i}", f"top_lp{i}")
            if name not in arrays
        ]
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}; it has prompts {found}")
        golden.append(
            Golden(
                arrays[f"ids{i}"],
                float(arrays[f"nll{i}"]),
                arrays[f"top_ids{i}"],
                arrays[f"top_lp{i}"],
            )
        )
    if not golden:
        raise ValueError(f"{path} holds no prompts (ids0, ids1, ...)")
    return golden


def settle_environment(device: str | None, ranks: int) -> str:
    """Settle the environment that vLLM reads, and the device; the caller's own settings win."""
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    from vllm.platforms import current_platform

    found = current_platform.device_type
    if device not in (None, found):
        raise ValueError(f"--device {device}: this vLLM runs on {found}")
    if ranks == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if found == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        if ranks > 1:
            # vLLM gives every rank a NUMA node of its own and refuses where there are fewer.
            cpus = sorted(os.sched_getaffinity(0))
            share = max(len(cpus) // ranks, 1)
            parts = [cpus[i * share % len(cpus) :][:share] for i in range(ranks)]
            binding = "|".join(",".join(map(str, part)) for part in parts)
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", binding)
    return found


def default_dtype(device: str) -> str:
    """The model dtype that says most about weights: exact where the device can be."""
    return "float32" if device == "cpu" else "float16"


def start(model: str | Path, longest: int, *, dtype: str, ranks: int = 1, **engine):
    """Start vLLM on a checkpoint, with `Scorer` in its workers, eager unless `engine` says more.

    Args:
        longest: tokens of the longest prompt.
        engine: further arguments of `vllm.LLM`, or others than are used here.

    Raises what vLLM raises where it refuses the checkpoint.
    """
    from vllm import LLM

    arguments = {
        "enforce_eager": True,
        "max_num_seqs": 1,
        "max_model_len": longest + 1,
        "max_num_batched_tokens": max(longest + 1, 64),
    }
    llm = LLM(
        str(model),
        dtype=dtype,
        tensor_parallel_size=ranks,
        distributed_executor_backend="uni" if ranks == 1 else "mp",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        worker_extension_cls="exl3_plugin.verify.Scorer",
        **arguments | engine,
    )
    llm.collective_rpc("exl3_watch")
    return llm


def ask(llm, ids: list[int], top_ids: list[list[int]]) -> dict:
    """Run one prompt and score given tokens [T, n] on it; `Scorer.exl3_score` says what returns."""
    from vllm import SamplingParams

    llm.collective_rpc("exl3_forget")
    llm.generate(
        {"prompt_token_ids": ids},
        SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
        use_tqdm=False,
    )
    answers = llm.collective_rpc("exl3_score", args=(top_ids, ids))
    return next(answer for answer in answers if answer is not None)


def score_all(llm, golden: list[Golden]) -> list[Scored]:
    """Every prompt on a started engine."""
    scored = []
    for prompt in golden:
        answer = ask(llm, prompt.ids.tolist(), prompt.top_ids.tolist())
        scored.append(
            Scored(
                np.array(answer["top_lp"]),
                np.array(answer["best"]),
                -float(np.mean(answer["target_lp"])),
            )
        )
    return scored


def score(
    model: str | Path,
    golden: list[Golden],
    *,
    dtype: str | None = None,
    device: str | None = None,
    ranks: int = 1,
    **engine,
) -> list[Scored]:
    """Start vLLM on `model`, run every prompt, stop it; arguments as in `start`.

    Raises what vLLM raises where it refuses the checkpoint.
    """
    found = settle_environment(device, ranks)
    longest = max(len(prompt.ids) for prompt in golden)
    llm = start(model, longest, dtype=dtype or default_dtype(found), ranks=ranks, **engine)
    scored = score_all(llm, golden)
    llm.llm_engine.engine_core.shutdown()
    return scored


def compare(golden: list[Golden], scored: list[Scored]) -> dict[str, float | int | None]:
    """Agreement over all prompts, in the keys of the JSON line; losses weigh every token alike."""
    differences = np.concatenate(
        [np.abs(s.top_lp - g.top_lp).ravel() for g, s in zip(golden, scored)]
    )
    same = np.concatenate([s.best == g.top_ids[:, 0] for g, s in zip(golden, scored)])
    clear = np.concatenate([g.top_lp[:, 0] - g.top_lp[:, 1] > CLEAR_NATS for g in golden])
    tokens = [len(g.ids) - 1 for g in golden]
    return {
        "prompts": len(golden),
        "positions": len(same),
        "top1_agreement": float(same.mean()),
        "top1_agreement_clear": float(same[clear].mean()) if clear.any() else None,
        "max_logprob_diff": float(differences.max()),
        "mean_logprob_diff": float(differences.mean()),
        "nll": float(np.average([s.nll for s in scored], weights=tokens)),
        "nll_reference": float(np.average([g.nll for g in golden], weights=tokens)),
    }


@contextmanager
def only_result_on_stdout():
    """Send file descriptor 1 to stderr, child processes included; yields the real stdout."""
    sys.stdout.flush()
    real = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        yield real
    finally:
        sys.stdout.flush()
        os.dup2(real.fileno(), 1)
        real.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m exl3_plugin.verify",
        description="Run an EXL3 checkpoint through vLLM and compare it with reference outputs.",
    )
    parser.add_argument("model", metavar="DIR", help="checkpoint folder")
    parser.add_argument("--golden", required=True, type=Path, metavar="FILE.npz")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: what vLLM runs on")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="default: float32 on a CPU, float16 on a GPU, whose kernels take no float32",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile and CUDA graphs as in service; default: eager",
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument(
        "--prompt", type=int, action="append", metavar="I", help="only this prompt; repeatable"
    )
    options = parser.parse_args(argv)
    if options.tensor_parallel_size < 1:
        parser.error("--tensor-parallel-size must be at least 1")

    with only_result_on_stdout() as out:
        try:
            golden = read_golden(options.golden, options.prompt)
            check_tensor_parallel(read_checkpoint(options.model), options.tensor_parallel_size)
            scored = score(
                options.model,
                golden,
                device=options.device,
                dtype=options.dtype,
                ranks=options.tensor_parallel_size,
                enforce_eager=not options.compile,
            )
        except Exception as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(json.dumps(compare(golden, scored)), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
