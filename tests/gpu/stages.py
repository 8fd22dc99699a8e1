"""Run as a program: what serving on a GPU must show beyond single checkpoints (`serving.py`).

    python tests/gpu/stages.py STAGE [--model DIR] [--ranks N] [--budget SECONDS] [--work DIR]
                                    [--compile] [--cases NAME,..]

graphs    64 prompts of unlike lengths are answered at once, eagerly and through captured graphs,
          with VLLM_BATCH_INVARIANT=1: every token must be the same. Inductor stays off, since its
          fused kernels round elsewhere; a third run, as served, is compared without a verdict.
          Also, loaded bytes against the checkpoint's.
families  tiny checkpoints of every family in tests/plugin/families.py against their dense twins,
          eager, or with --compile as served; --cases NAME,NAME,.. for some of them, so that
          several processes can share the work
mtp       a tiny Qwen3.5 speculates with a draft whose linears are EXL3: the greedy texts must be
          those without it, but for ties, and the draft must be right as often as its dense twin

stdout: one JSON line a result, at once; exit code 1 where one is wrong. Nothing begins after the
budget. Every stage is a run of its own, since vLLM reads its environment once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "plugin")]

from serving import (  # noqa: E402
    FIXTURES,
    MEAN_DIFFERENCE,
    SAME_BEST,
    clean_up,
    mode_arguments,
    settle_environment,
)

PROMPTS, NEW_TOKENS = 64, 32
TIES = {"float16": (0.02, PROMPTS // 4), "bfloat16": (0.05, PROMPTS // 2)}
"""By type: two tokens closer than so many nats may change places, in so many texts at most. One row
and three go through other kernels, and bfloat16 has logits in steps of 1/64 below 4, 1/32 below 8.
How often that meets a tie is a matter of the processor: 19 of 64 texts on one without bfloat16
instructions."""

NO_FLOAT16 = ("gemma2", "gemma3", "gemma3-wrapper", "glm4")
"""Families that vLLM refuses to run in float16, whose range their activations exceed."""


def random_prompts(vocabulary: int, count: int = PROMPTS, seed: int = 0) -> list[list[int]]:
    """Prompts of 3 to 40 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocabulary, 3 + i % 38).tolist() for i in range(count)]


def greedy(llm, prompts: list[list[int]], logprobs: int | None = None) -> list:
    """All answers, asked for at once: vLLM's completions."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0.0, detokenize=False, ignore_eos=True,
        logprobs=logprobs,
    )  # fmt: skip
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    return [output.outputs[0] for output in llm.generate(asked, sampling, use_tqdm=False)]


GRAPH_MODES = {
    "eager": {"enforce_eager": True},
    "captured": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}},
    "served": {},
}
"""What tells the runs of `graphs` apart, as arguments of the engine."""


def start(model: Path, dtype: str, ranks: int = 1, **engine):
    """vLLM on a checkpoint, in this process where there is one rank."""
    from vllm import LLM

    return LLM(
        str(model),
        dtype=dtype,
        tensor_parallel_size=ranks,
        distributed_executor_backend="uni" if ranks == 1 else "mp",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=128,
        max_num_seqs=PROMPTS,
        max_num_batched_tokens=2048,
        disable_log_stats=False,
        **engine,
    )


def loaded_share(model: Path, report: Path, ranks: int) -> dict:
    """Bytes that the ranks hold of the modules that the plugin was asked for, and the stored ones.

    Norms, and embeddings that vLLM does not name, belong to no module of the report; they are left
    out on both sides.
    """
    from exl3_plugin.checkpoint import read_checkpoint

    files = [report] if ranks == 1 else [Path(f"{report}.rank{i}") for i in range(ranks)]
    found = [json.loads(file.read_text()) for file in files]
    named = [m for part in found for m in part["modules"] if m["module"]]
    loaded = sum(m["bytes"] for m in named)
    names = {name for m in named for name in m["module"].split(", ")}
    modules = read_checkpoint(model).modules
    stored = sum(module.nbytes for name, module in modules.items() if name in names)
    return {"loaded_bytes": loaded, "stored_bytes": stored, "loaded_share": loaded / stored}


def graphs(options) -> Iterator[dict]:
    """Eager against captured."""
    from exl3_plugin.checkpoint import read_checkpoint

    model = options.model or FIXTURES / "tiny-llama-mul1-2.5"
    config = read_checkpoint(model).config
    prompts = random_prompts((config.get("text_config") or config)["vocab_size"])
    texts, report = {}, Path(tempfile.mkdtemp()) / "report.json"
    os.environ["EXL3_LOAD_REPORT"] = str(report)
    for mode, given in GRAPH_MODES.items():
        began = time.perf_counter()
        llm = start(model, "bfloat16", options.ranks, **given | options.memory)
        texts[mode] = [list(answer.token_ids) for answer in greedy(llm, prompts)]
        again = [list(answer.token_ids) for answer in greedy(llm, prompts[::-1])][::-1]
        llm.llm_engine.engine_core.shutdown()
        clean_up()
        yield {
            "case": f"{model.name} {mode}: the same in another order",
            "ok": again == texts[mode],
            "seconds": round(time.perf_counter() - began, 1),
        }
    tokens = {token for text in texts["eager"] for token in text}
    for mode in ("captured", "served"):
        same = sum(a == b for a, b in zip(texts["eager"], texts[mode]))
        yield {
            "case": f"{model.name}: {mode} against eager",
            "ok": mode == "served" or (same == PROMPTS and len(tokens) > 8),
            "equal_texts": same,
            "prompts": PROMPTS,
            "different_tokens": len(tokens),
        }
    share = loaded_share(model, report, options.ranks)
    # Every rank holds the embedding's and head's padding, and cuts inside 128-blocks, twice.
    yield {"case": f"{model.name}: loaded bytes", "ok": share["loaded_share"] < 1.02} | share


def families(options) -> Iterator[dict]:
    """Every family against its twin."""
    from families import FAMILIES, build

    from exl3_plugin import verify

    wanted = options.cases.split(",") if options.cases else list(FAMILIES)
    unknown = sorted(set(wanted) - set(FAMILIES))
    if unknown:
        raise ValueError(f"--cases {', '.join(unknown)}: there are {', '.join(FAMILIES)}")
    mode = mode_arguments(options.device, options.compile)
    for name in wanted:
        if options.over():
            yield {"case": name, "skipped": "the budget is spent"}
            continue
        family = FAMILIES[name]
        engine = family.engine | options.memory | mode
        dtype = "bfloat16" if name in NO_FLOAT16 else options.half
        try:
            folder = build(name, options.work)
            golden = verify.read_golden(folder / "golden.npz")
            scored = verify.score(folder / "model", golden, dtype=dtype, **engine)
            if family.apart:
                # vLLM's own answer of the dense twin becomes what is compared with.
                clean_up()
                dense = verify.score(folder / "twin", golden, dtype=dtype, **engine)
                golden = [replace(g, top_lp=d.top_lp, nll=d.nll) for g, d in zip(golden, dense)]
            result = verify.compare(golden, scored)
            if family.apart:
                same = [s.best == d.best for s, d in zip(scored, dense)]
                result["top1_agreement_clear"] = float(np.concatenate(same).mean())
            ok = (
                result["mean_logprob_diff"] < MEAN_DIFFERENCE[dtype]
                and result["top1_agreement_clear"] >= SAME_BEST[dtype]
            )
            yield {"case": name, "dtype": dtype, "compiled": options.compile, "ok": ok} | result
        except Exception as error:
            traceback.print_exc()
            yield {"case": name, "ok": False, "error": f"{type(error).__name__}: {error}"[:1000]}
        clean_up()


def first_difference(one: list[int], two: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(one, two)) if a != b), None)


def gap_at(answer, place: int) -> float:
    """Nats between the two best tokens of an answer at one place."""
    best = sorted((p.logprob for p in answer.logprobs[place].values()), reverse=True)
    return best[0] - best[1]


def drafts(llm) -> dict[str, int]:
    """How many tokens were drafted and accepted so far."""
    wanted = {
        "vllm:spec_decode_num_draft_tokens": "drafted",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
    }
    return {wanted[m.name]: m.value for m in llm.get_metrics() if m.name in wanted}


def mtp(options) -> Iterator[dict]:
    """With the draft, without it, and with its dense twin."""
    from families import FAMILIES, build, with_plain_draft

    folder = build("qwen3.5-mtp", options.work)
    model, plain = folder / "model", with_plain_draft(folder / "model", folder / "plain-draft")
    prompts = random_prompts(250)
    engine = FAMILIES["qwen3.5-mtp"].engine | options.memory
    speculating = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    answers, counts = {}, {}
    for name, path, extra in (
        ("alone", model, {}),
        ("exl3 draft", model, speculating),
        ("plain draft", plain, speculating),
    ):
        llm = start(path, options.half, **engine | extra, enforce_eager=options.eager)
        answers[name] = greedy(llm, prompts, 2 if name == "alone" else None)
        counts[name] = drafts(llm)
        llm.llm_engine.engine_core.shutdown()
        clean_up()
    places = [
        first_difference(list(a.token_ids), list(b.token_ids))
        for a, b in zip(answers["alone"], answers["exl3 draft"])
    ]
    gaps = [gap_at(a, p) for a, p in zip(answers["alone"], places) if p is not None]
    tie, most = TIES[options.half]
    accepted = {n: c["accepted"] / c["drafted"] for n, c in counts.items() if c.get("drafted")}
    yield {
        "case": "greedy texts with and without the draft",
        "ok": len(gaps) <= most and all(gap < tie for gap in gaps),
        "equal_texts": places.count(None),
        "prompts": PROMPTS,
        "gaps_where_not": [round(gap, 4) for gap in gaps],
    }
    ours, dense = (accepted.get(name, 0.0) for name in ("exl3 draft", "plain draft"))
    yield {
        "case": "drafted tokens accepted",
        "ok": ours > 0.2 and abs(ours - dense) < 0.05,
        "exl3_draft": round(ours, 4),
        "plain_draft": round(dense, 4),
        "counts": counts,
    }


STAGES = {"graphs": graphs, "families": families, "mtp": mtp}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--model", type=Path, help="graphs: a checkpoint; default: a fixture")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS")
    parser.add_argument("--compile", action="store_true", help="families: with captured graphs")
    parser.add_argument("--cases", metavar="NAME,..", help="families: these; default: all")
    parser.add_argument("--eager", action="store_true", help="mtp: without captured graphs")
    parser.add_argument("--work", type=Path, help="where checkpoints are made; default: a new one")
    options = parser.parse_args()
    options.work = options.work or Path(tempfile.mkdtemp(prefix="stages-"))
    began, failed = time.perf_counter(), 0
    options.over = lambda: time.perf_counter() - began > options.budget
    if options.stage == "graphs":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"

    from exl3_plugin.verify import only_result_on_stdout

    with only_result_on_stdout() as out:
        options.device = settle_environment(options.ranks)
        options.half = "bfloat16" if options.device == "cpu" else "float16"
        options.memory = {}
        if options.device == "cuda":
            options.memory["gpu_memory_utilization"] = 0.3
            if importlib.util.find_spec("flashinfer") is None:
                # The one backend of gated delta rules that Hopper can do without it.
                options.memory["additional_config"] = {"gdn_prefill_backend": "triton"}
        try:
            for line in STAGES[options.stage](options):
                failed += not line.get("ok", True)
                line = {"stage": options.stage, "at_s": round(time.perf_counter() - began)} | line
                print(json.dumps(line), file=out, flush=True)
        except Exception as error:
            traceback.print_exc()
            failed += 1
            said = {
                "stage": options.stage,
                "ok": False,
                "error": f"{type(error).__name__}: {error}",
            }
            print(json.dumps(said)[:3000], file=out, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
