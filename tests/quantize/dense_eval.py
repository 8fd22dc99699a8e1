"""Loss of an EXL3 checkpoint without vLLM: dense weights from the numpy oracle, in transformers.

Also a command: `python tests/quantize/dense_eval.py CHECKPOINT GOLDEN.npz`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from exl3_plugin.format import dense_weight
from exl3_plugin.layout import codebook_from_markers

_SUFFIXES = ("trellis", "suh", "svh", "mcg", "mul1", "bias")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every safetensors file in `folder`."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118 - not a mapping
                tensors[name] = content.get_tensor(name)
    return tensors


def dense_state(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint as ordinary float32 weights `[n, k]`, padded to multiples of 128."""
    tensors = read_tensors(folder)
    state = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "trellis":
            markers = {
                key: int(tensors[f"{module}.{key}"])
                for key in ("mcg", "mul1")
                if f"{module}.{key}" in tensors
            }
            weight = dense_weight(
                tensor.numpy(),
                tensors[f"{module}.suh"].numpy(),
                tensors[f"{module}.svh"].numpy(),
                codebook_from_markers(markers),
            )
            state[f"{module}.weight"] = torch.from_numpy(weight.T.astype(np.float32))
        elif suffix not in _SUFFIXES or suffix == "bias":
            state[name] = tensor.float()
    return state


def dense_model(folder: Path) -> torch.nn.Module:
    """The checkpoint as a transformers model in float32; padding is trimmed off."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "exl3"
    config = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = dense_state(folder)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert state.keys() == shapes.keys(), state.keys() ^ shapes.keys()
    trimmed = {
        name: tensor[tuple(slice(size) for size in shapes[name])] for name, tensor in state.items()
    }
    model.load_state_dict(trimmed)
    return model.eval()


@torch.no_grad()
def next_token_loss(model: torch.nn.Module, ids: np.ndarray) -> float:
    """Mean negative log-likelihood of each token after the first, in nats."""
    tokens = torch.from_numpy(ids).long()[None]
    logits = model(tokens).logits[0].float()
    return float(torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:]))


def main() -> None:
    folder, golden = Path(sys.argv[1]), np.load(sys.argv[2])
    model = dense_model(folder)
    prompts = sum(name.startswith("ids") for name in golden.files)
    for prompt in range(prompts):
        loss = next_token_loss(model, golden[f"ids{prompt}"])
        print(
            f"prompt {prompt}: {len(golden[f'ids{prompt}'])} tokens, loss {loss:.4f}, "
            f"reference {float(golden[f'nll{prompt}']):.4f}"
        )


if __name__ == "__main__":
    main()
