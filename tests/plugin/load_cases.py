"""Run as a program: loads checkpoints with vLLM's own loader, without an engine, in one process.

stdin: a JSON list of {model, args (of vLLM), env, spoil, reload, permute, flips}; on stdout, one
JSON line a case: `error` (None where it loaded), `log` (what the plugin logged), `parameters`
(name -> [dtype, elements]), `bytes` of all parameters, and `grown_bytes`, by how much loading made
the process's own memory grow (file-mapped pages of the checkpoint are not counted: the kernel may
drop them at any time). `spoil` names a layer in which one word is changed once the self-test has
its truth. `reload` makes strips of every trellis, as on a GPU, has vLLM reload the weights in
place, and fails where a parameter is then another one or holds anything else. `permute` names a
stored tensor whose first axis Llama's class turns round, `flips` times, before it hands it on.
"""

import gc
import json
import logging
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from exl3_plugin import loading, verify


def load_all(cases: list[dict]) -> list[dict]:
    """Run this file on some cases, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(cases, default=str),
        capture_output=True,
        text=True,
        timeout=600,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(cases), done.stderr[-4000:]
    return results


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def load(case: dict) -> dict:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    kept = Kept()
    logger = logging.getLogger("vllm.exl3")
    found = {"error": None, "log": kept.lines, "parameters": {}, "bytes": 0, "grown_bytes": 0}
    try:
        os.environ.update(case.get("env", {}))
        arguments = EngineArgs(
            case["model"],
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=64,
            **case.get("args", {}),
        )
        config = arguments.create_engine_config()
        logger.addHandler(kept)
        with set_current_vllm_config(config), changed(case):
            one_rank()
            before = anonymous_bytes()
            loader = get_model_loader(config.load_config)
            model = loader.load_model(vllm_config=config, model_config=config.model_config)
            if case.get("reload"):
                check_reload(config, model)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    else:
        found["grown_bytes"] = anonymous_bytes() - before
        storages = {}
        for name, tensor in model.named_parameters():
            found["parameters"][name] = [str(tensor.dtype), tensor.numel()]
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        found["bytes"] = sum(storages.values())
    logger.removeHandler(kept)
    for name in case.get("env", {}):
        del os.environ[name]
    return found


@contextmanager
def changed(case: dict):
    """What happens between reading a layer and multiplying with it, as the case wants it."""

    def to_kernel_order(layer):
        if case.get("reload"):
            loading.reorder(layer)
        if layer is spoilt:
            layer.trellis.data[0] ^= 1 << 9

    def finish(layer, prefix):
        nonlocal spoilt
        original(layer, prefix)
        spoilt = layer if prefix == case.get("spoil") else spoilt

    from vllm.model_executor.models.llama import LlamaForCausalLM

    def load_weights(self, weights):
        def turned():
            for name, tensor in weights:
                for _ in range(case.get("flips", 1) if name == case.get("permute") else 0):
                    tensor = tensor.flip(0)
                yield name, tensor

        return load(self, turned())

    spoilt, original, load = None, loading.finish, LlamaForCausalLM.load_weights
    with (
        mock.patch.multiple(loading, to_kernel_order=to_kernel_order, finish=finish),
        mock.patch.object(LlamaForCausalLM, "load_weights", load_weights),
    ):
        yield


def check_reload(config, model) -> None:
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    before = {name: (p, p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    for name, (parameter, _, _) in before.items():
        if name.endswith((".trellis", ".suh", ".svh")):
            parameter.data.zero_()
    reload_weights(config, model, None, None, True)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    for name, (parameter, address, value) in before.items():
        assert after[name] is parameter and parameter.data_ptr() == address, name
        assert parameter.equal(value), name


def anonymous_bytes() -> int:
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/self/status has no RssAnon")


def one_rank() -> None:
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        model_parallel_is_initialized,
    )
    from vllm.utils.network_utils import get_open_port

    if not model_parallel_is_initialized():
        method = f"tcp://127.0.0.1:{get_open_port()}"
        init_distributed_environment(1, 0, method, 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    cases = json.load(sys.stdin)
    with verify.only_result_on_stdout() as out:
        verify.settle_environment(None, 1)
        if not torch.accelerator.is_available():
            torch.accelerator.empty_cache = lambda: None  # as vLLM's own CPU worker does
        for case in cases:
            print(json.dumps(load(case)), file=out, flush=True)


if __name__ == "__main__":
    main()
