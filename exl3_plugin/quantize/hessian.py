"""Second moments of the inputs of every linear, decoder layer by decoder layer.

A layer is run with its original weights to see what its linears receive; once they are quantised
it is run again with what they became, so that later layers see what they will see when serving.
Everything is float32 on the CPU; only one layer at a time is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from exl3_plugin.quantize.inventory import Linear
from exl3_plugin.quantize.ldlq import QuantizeError


class _Recorder(nn.Module):
    """Stands in for a decoder layer: notes how it is called and passes its input on."""

    def __init__(self, layer: nn.Module, calls: list) -> None:
        super().__init__()
        self._layer = [layer]
        self._calls = calls

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._layer[0], name)

    def forward(self, hidden_states, *arguments, **keywords):
        self._calls.append((hidden_states, arguments, keywords))
        return hidden_states


class BlockRunner:
    """Runs a transformers model one decoder layer at a time over fixed rows of tokens.

    Args:
        model: a causal language model on the CPU, any floating dtype.
        tokens: int64 `[rows, columns]`.
    """

    def __init__(self, model: nn.Module, tokens: torch.Tensor) -> None:
        self._model = model
        self._layers = _find_layers(model)
        self.count = len(self._layers)
        for child in self._others():
            child.float()
        self.calls, self.hidden = self._record(tokens)

    def _others(self) -> Iterable[nn.Module]:
        """Every leaf module outside the decoder layers."""
        inside = {id(module) for module in self._layers.modules()}
        for module in self._model.modules():
            if id(module) not in inside and not list(module.children()):
                yield module

    @torch.no_grad()
    def _record(self, tokens: torch.Tensor) -> tuple[list, list[torch.Tensor]]:
        """Keyword arguments of every layer, and the input of the first for every row."""
        originals = list(self._layers)
        calls: list = []
        hidden = []
        for index, layer in enumerate(originals):
            self._layers[index] = _Recorder(layer, calls)
        try:
            for row in tokens:
                calls.clear()
                self._model(row[None], use_cache=False)
                hidden.append(calls[0][0])
        except Exception as error:
            raise QuantizeError(
                f"calibration cannot drive {type(self._model).__name__} layer by layer ({error}); "
                "convert without calibration"
            ) from error
        finally:
            for index, layer in enumerate(originals):
                self._layers[index] = layer
        # Masks and positions are those of one row; every row has the same length.
        return [call[1:] for call in calls], hidden

    def layer(self, index: int) -> nn.Module:
        """Decoder layer `index`, converted to float32 in place."""
        return self._layers[index].float()

    def release(self, index: int) -> None:
        """Drop the weights of a layer that is no longer needed."""
        self._layers[index].to("meta")

    @torch.no_grad()
    def advance(self, index: int) -> None:
        """Replace the hidden states by what layer `index`, as it is now, makes of them."""
        layer = self.layer(index)
        arguments, keywords = self.calls[index]
        for row, hidden in enumerate(self.hidden):
            self.hidden[row] = _tensor(layer(hidden, *arguments, **keywords))

    @torch.no_grad()
    def capture(self, index: int, linears: Sequence[Linear]) -> dict[str, torch.Tensor]:
        """Second moments float64 `[k, k]` by `Linear.input`, with the layer's current weights.

        A linear that transformers computes inside a larger module (stacked experts) has none.
        """
        layer = self.layer(index)
        prefix = f"layers.{index}."
        watched: dict[str, nn.Module] = {}
        modules = dict(layer.named_modules())
        for linear in linears:
            # The module that holds the source tensor: a fused tensor is one module here.
            inner = linear.tensor.removesuffix(".weight").rpartition(prefix)[2]
            module = modules.get(inner)
            if linear.expert is None and isinstance(module, nn.Linear):
                watched.setdefault(linear.input, module)
        moments = {key: _Moment(module.in_features) for key, module in watched.items()}
        handles = [
            module.register_forward_pre_hook(moments[key].see) for key, module in watched.items()
        ]
        arguments, keywords = self.calls[index]
        try:
            for hidden in self.hidden:
                layer(hidden, *arguments, **keywords)
        finally:
            for handle in handles:
                handle.remove()
        return {key: moment.mean() for key, moment in moments.items() if moment.count}

    @torch.no_grad()
    def capture_head(self) -> torch.Tensor | None:
        """Second moment of what the output head receives after the last layer."""
        head = self._model.get_output_embeddings()
        norm = _final_norm(self._model, self._layers)
        if head is None or norm is None:
            return None
        moment = _Moment(head.weight.shape[1])
        for hidden in self.hidden:
            moment.see(None, (norm(hidden),))
        return moment.mean()

    @torch.no_grad()
    def replace(self, index: int, linear: Linear, weight: torch.Tensor) -> None:
        """Put a quantised weight float32 `[k, n]` where the model computes with it.

        Stacked experts are left as they are where transformers stores them otherwise.
        """
        inner = linear.tensor.rpartition(f"layers.{index}.")[2]
        parameter = dict(self.layer(index).named_parameters()).get(inner)
        if parameter is None:
            return
        target = parameter if linear.expert is None else parameter[linear.expert]
        if linear.transposed:
            target = target.T
        begin, end = linear.rows or (0, target.shape[0])
        target[begin:end] = weight.T


class _Moment:
    """Sum of `x^T x` over all tokens seen; tokens with non-finite activations are left out."""

    def __init__(self, size: int) -> None:
        self.sum = torch.zeros(size, size, dtype=torch.float64)
        self.count = 0

    def see(self, _module, arguments) -> None:
        x = arguments[0].reshape(-1, len(self.sum)).float()
        finite = torch.isfinite(x).all(-1)
        x = x if bool(finite.all()) else x[finite]
        self.sum += x.T @ x
        self.count += len(x)

    def mean(self) -> torch.Tensor:
        return self.sum / max(1, self.count)


def _find_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers of the language model."""
    config = model.config.get_text_config()
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "layers"
        if is_list and len(module) == config.num_hidden_layers and "visual" not in name:
            return module
    raise QuantizeError(
        f"{type(model).__name__} has no list of {config.num_hidden_layers} decoder layers; "
        "convert without calibration"
    )


def _final_norm(model: nn.Module, layers: nn.ModuleList) -> nn.Module | None:
    """The norm behind the last decoder layer."""
    for module in model.modules():
        if any(child is layers for child in module.children()):
            return getattr(module, "norm", None) or getattr(module, "final_layernorm", None)
    return None


def _tensor(output) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
