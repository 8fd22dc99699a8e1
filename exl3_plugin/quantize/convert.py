"""A model becomes an EXL3 checkpoint: one linear after the other, safe to kill and to resume."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from exl3_plugin import ops
from exl3_plugin.format import words_from_bits
from exl3_plugin.quantize.allocate import allocate, check_rate, mean_bits
from exl3_plugin.quantize.assemble import assemble, is_complete
from exl3_plugin.quantize.calibration import Calibration, calibration_tokens
from exl3_plugin.quantize.hessian import BlockRunner
from exl3_plugin.quantize.inventory import Inventory, Linear, take_inventory
from exl3_plugin.quantize.ldlq import Encoder, Meter, QuantizeError
from exl3_plugin.quantize.progress import ConversionProgress
from exl3_plugin.quantize.scales import SEARCH_TILES
from exl3_plugin.quantize.source import Source, open_source
from exl3_plugin.quantize.store import PARTIAL, WorkFolder
from exl3_plugin.quantize.tensor import quantize_linear, unrotate

_METHOD = 1
"""Raised when the same settings give other bytes, so that old unfinished work is not mixed in."""

_FP16_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Options:
    """Everything that decides the result, and how to treat what lies in the output folder."""

    bits: float
    codebook: str = "mul1"
    head_bits: float = 6
    calibration: Calibration | None = None
    shard_bytes: int = 4 << 30
    restart: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Result:
    """What a conversion made and what it cost."""

    out: str
    bits: float
    head_bits: float
    modules: int
    modules_resumed: int
    mean_relative_error: float
    bytes: int
    seconds: float
    search_seconds: float
    tiles_searched: int
    tiles_per_second_per_core: float
    threads: int


def convert(
    source: str | Path, out: str | Path, options: Options, progress: ConversionProgress
) -> Result:
    """Quantise the model at `source` into the folder `out`.

    Raises:
        QuantizeError: anything that makes it impossible; `out` is then as usable as it was, and
            finished modules stay in `out`/.partial for the next run.
    """
    began = time.monotonic()
    model = open_source(source)
    out = Path(out).expanduser()
    check_rate(options.head_bits, options.codebook, "--head-bits")
    inventory = take_inventory(model)
    rates = allocate(inventory.decoder, options.bits, options.codebook)
    rates |= {head.name: options.head_bits for head in inventory.heads}
    _check_output(out, model, options)
    settings = {
        "method": _METHOD,
        "source": model.identity(),
        "bits": options.bits,
        "codebook": options.codebook,
        "head_bits": options.head_bits,
        "calibration": options.calibration.identity() if options.calibration else None,
    }
    ops.load()
    work = WorkFolder(out, settings, restart=options.restart)
    try:
        _check_space(out, model, inventory, rates, work)
        run = _Run(model, inventory, rates, options, work, progress)
        resumed = run.begin()
        if options.calibration:
            run.calibrated()
        else:
            run.plain()
        progress.stage("writing the checkpoint")
        if options.calibration:
            tokens = work.tokens()
            shape = {"rows": len(tokens), "columns": tokens.shape[1]}
            settings["calibration"] = settings["calibration"] | shape
        assemble(work, model, inventory, rates, settings, options.shard_bytes)
        work.remove()
    finally:
        work.close()
    return Result(
        out=str(out),
        bits=mean_bits(inventory.decoder, rates),
        head_bits=options.head_bits,
        modules=len(inventory.linears),
        modules_resumed=resumed,
        mean_relative_error=sum(run.errors) / len(run.errors),
        bytes=sum(file.stat().st_size for file in out.glob("*.safetensors")),
        seconds=time.monotonic() - began,
        search_seconds=run.meter.seconds,
        tiles_searched=run.meter.tiles,
        tiles_per_second_per_core=run.meter.tiles_per_second_per_core(),
        threads=torch.get_num_threads(),
    )


class _Run:
    """The modules of one conversion, in order, with what all of them need."""

    def __init__(
        self,
        source: Source,
        inventory: Inventory,
        rates: dict[str, float],
        options: Options,
        work: WorkFolder,
        progress: ConversionProgress,
    ) -> None:
        self.source = source
        self.inventory = inventory
        self.rates = rates
        self.options = options
        self.work = work
        self.progress = progress
        self.meter = Meter(on_tiles=progress.advance)
        self.errors: list[float] = []
        self._cached: tuple[str, torch.Tensor] | None = None

    def begin(self) -> int:
        """Tell the progress how much there is to do; returns how many modules are done already."""
        linears = self.inventory.linears
        finished = [linear for linear in linears if self.work.finished(linear.name)]
        self.progress.begin(sum(map(_work_of, linears)), sum(map(_work_of, finished)))
        if finished:
            self.progress.say(
                f"continuing: {len(finished)} of {len(linears)} modules are done already"
            )
        return len(finished)

    def plain(self) -> None:
        """All modules, without activations."""
        for linear in self.inventory.linears:
            if self.work.finished(linear.name):
                self.errors.append(self.work.load(linear.name)[1])
            else:
                self._quantize(linear, None)

    def calibrated(self) -> None:
        """All modules, layer by layer, each with the second moment of what it receives."""
        self.progress.stage("loading the model for calibration")
        model = self.source.transformers_model()
        tokens = self.work.tokens()
        if tokens is None:
            if self.options.calibration.file is None:
                self.progress.stage("sampling calibration text from the model")
            tokens = calibration_tokens(self.options.calibration, self.source, model)
            self.work.save_tokens(tokens)
        runner = BlockRunner(model, tokens)
        self.progress.say(f"calibrating with {len(tokens)} rows of {tokens.shape[1]} tokens")
        layers = sorted({linear.layer for linear in self.inventory.decoder})
        for layer in layers:
            members = [linear for linear in self.inventory.decoder if linear.layer == layer]
            if layer < runner.count:
                self._layer(runner, layer, members)
            else:
                # A draft head stored behind the last layer: the model does not run it.
                self._members(members, {})
        heads = self.inventory.heads
        unfinished = [head for head in heads if not self.work.finished(head.name)]
        moment = runner.capture_head() if unfinished else None
        self._members(heads, {head.input: moment for head in heads})

    def _layer(self, runner: BlockRunner, layer: int, members: Sequence[Linear]) -> None:
        self.progress.module(f"layer {layer}: activations", 0.0)
        unfinished = [linear for linear in members if not self.work.finished(linear.name)]
        moments = runner.capture(layer, unfinished) if unfinished else {}
        decoded = self._members(members, moments)
        for linear in members:
            runner.replace(layer, linear, decoded[linear.name])
        self.progress.module(f"layer {layer}: running it quantised", 0.0)
        runner.advance(layer)
        runner.release(layer)

    def _members(
        self, members: Sequence[Linear], moments: dict[str, torch.Tensor | None]
    ) -> dict[str, torch.Tensor]:
        """Quantise the modules that are not done; the decoded weight of every one."""
        decoded = {}
        for linear in members:
            if self.work.finished(linear.name):
                tensors, error = self.work.load(linear.name)
                self.errors.append(error)
                decoded[linear.name] = _decode(linear, tensors, self.options.codebook)
            else:
                decoded[linear.name] = self._quantize(linear, moments.get(linear.input))
        return decoded

    def _quantize(self, linear: Linear, moment: torch.Tensor | None) -> torch.Tensor:
        self.progress.module(linear.name, _work_of(linear))
        weight = self._weight(linear)
        encoder = Encoder(self.rates[linear.name], self.options.codebook, self.meter)
        stored, decoded = quantize_linear(weight, moment, encoder, linear.input, linear.name)
        self.work.save(linear.name, stored, self._bias(linear))
        self.errors.append(stored.error)
        self.progress.module_done()
        return decoded

    def _weight(self, linear: Linear) -> torch.Tensor:
        """The weight `[k, n]` in float32.

        Raises:
            QuantizeError: NaN or infinity in it, or no floating-point dtype.
        """
        if self._cached is None or self._cached[0] != linear.tensor:
            self._cached = (linear.tensor, self.source.load_exact(linear.tensor))
        tensor = self._cached[1]
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise QuantizeError(
                f"{linear.tensor} is {tensor.dtype}; the quantiser starts from float32, float16 "
                "or bfloat16"
            )
        if linear.expert is not None:
            tensor = tensor[linear.expert]
        if linear.transposed:
            tensor = tensor.T
        if linear.rows is not None:
            tensor = tensor[slice(*linear.rows)]
        weight = tensor.float()
        bad = int((~torch.isfinite(weight)).sum())
        if bad:
            raise QuantizeError(
                f"{linear.tensor} holds {bad} values that are NaN or infinite; the source is "
                "damaged, nothing can be quantised from it"
            )
        return weight.T.contiguous()

    def _bias(self, linear: Linear) -> torch.Tensor | None:
        """The bias as float16 where it fits, else float32."""
        if linear.bias is None:
            return None
        bias = self.source.load_exact(linear.bias).float()
        if linear.rows is not None:
            bias = bias[slice(*linear.rows)]
        if not bool(torch.isfinite(bias).all()):
            raise QuantizeError(f"{linear.bias} holds NaN or infinity; the source is damaged")
        return bias.half() if float(bias.abs().max()) < _FP16_LARGEST else bias


def _decode(linear: Linear, tensors: dict[str, torch.Tensor], codebook: str) -> torch.Tensor:
    """The weight float32 `[k, n]` of a stored module, in the bits `quantize_linear` returned."""
    inner = ops.reconstruct(tensors["trellis"], codebook)
    core = unrotate(inner)[: linear.k, : linear.n]
    return core * tensors["suh"][: linear.k, None].float() * tensors["svh"][: linear.n].float()


def _work_of(linear: Linear) -> float:
    """Searches that a module needs: its tiles, and the samples of the scale search."""
    return linear.tiles + 4.0 * min(SEARCH_TILES, linear.tiles // 16)


def _check_output(out: Path, source: Source, options: Options) -> None:
    if out.exists() and not out.is_dir():
        raise QuantizeError(f"{out} is a file; OUT is the folder of the new checkpoint")
    if source.path.is_dir() and out.resolve() == source.path.resolve():
        raise QuantizeError(f"OUT and SRC are the same folder {out}; choose another OUT")
    if is_complete(out):
        if not options.overwrite:
            raise QuantizeError(
                f"{out} already holds a model; choose another folder, or pass --overwrite to "
                "replace it once the new one is complete"
            )
    elif out.is_dir() and any(out.iterdir()) and not (out / PARTIAL).exists():
        raise QuantizeError(
            f"{out} is not empty and holds no unfinished conversion; choose an empty or new folder"
        )


def _check_space(
    out: Path,
    source: Source,
    inventory: Inventory,
    rates: dict[str, float],
    work: WorkFolder,
) -> None:
    """Refuse before the first tile what would run out of space hours later."""
    modules = kept = 0
    for linear in inventory.linears:
        size = linear.tiles * words_from_bits(rates[linear.name]) * 2 + 4096
        modules += size
        if work.finished(linear.name):
            kept += size
    plain = 0
    for name in inventory.plain:
        count = 1
        for size in source.shapes[name]:
            count *= size
        plain += 4 * count
    # Modules exist twice for a moment: as finished work and in the new files.
    needed = 2 * modules - kept + plain
    free = shutil.disk_usage(out).free
    if needed > free:
        raise QuantizeError(
            f"{out} needs about {needed / 1e9:.1f} GB for work files and the checkpoint, and "
            f"{free / 1e9:.1f} GB are free"
        )
