"""`python -m exl3_plugin.quantize SRC OUT --bits 4`, also reached as `exl3ctl quantize`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from exl3_plugin.format import CODEBOOKS

Codebook = Enum("Codebook", {name: name for name in CODEBOOKS}, type=str)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def quantize(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="Hugging Face folder or GGUF file.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the EXL3 checkpoint.")],
    bits: Annotated[
        float, typer.Option(help="Average bits per weight of the decoder, 1 to 8.", min=1, max=8)
    ],
    codebook: Annotated[
        Codebook, typer.Option(help="mul1 has half rates; 3inst and mcg are older.")
    ] = Codebook.mul1,
    head_bits: Annotated[
        float, typer.Option(help="Bits per weight of the output head.", min=1, max=8)
    ] = 6,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="UTF-8 text to calibrate with.")
    ] = None,
    self_calibration: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Calibrate with N rows sampled from the model."),
    ] = None,
    calibration_rows: Annotated[
        int, typer.Option(min=1, help="Rows taken from the calibration text, at most.")
    ] = 64,
    calibration_columns: Annotated[
        int | None,
        typer.Option(min=16, help="Tokens of one row: 1024 by default, 512 when sampled."),
    ] = None,
    shard_gib: Annotated[float, typer.Option(min=0.0001, help="Size limit of one file.")] = 4.0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; as many as torch finds by default.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away unfinished work in OUT.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the model in OUT once the new is complete.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Quantise a model to EXL3.

    Without calibration every input channel counts the same; good at 5 bits and more. Below that
    give a text, or let the model write its own. A killed conversion continues with the same
    command. Exit codes: 0 done, 1 refused, 2 usage, 130 interrupted.
    """
    if calibration is not None and self_calibration is not None:
        raise typer.BadParameter("--calibration and --self-calibration exclude each other")
    # Threads that wait for a batch sleep: on a busy machine spinning took most of the CPU time.
    # Read when torch loads, which is late so that --help and usage errors do not wait for it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from exl3_plugin.ops import LibraryError
    from exl3_plugin.quantize.calibration import Calibration
    from exl3_plugin.quantize.convert import Options, convert
    from exl3_plugin.quantize.ldlq import QuantizeError
    from exl3_plugin.quantize.progress import ConversionProgress

    if threads is not None:
        torch.set_num_threads(threads)
    with_text = None
    if calibration is not None:
        with_text = Calibration(calibration, calibration_rows, calibration_columns or 1024)
    elif self_calibration is not None:
        # The time of sampling grows with the square of the length.
        with_text = Calibration(None, self_calibration, calibration_columns or 512)
    options = Options(
        bits=bits,
        codebook=codebook.value,
        head_bits=head_bits,
        calibration=with_text,
        shard_bytes=int(shard_gib * (1 << 30)),
        restart=restart,
        overwrite=overwrite,
    )
    console = Console(stderr=True)
    try:
        with ConversionProgress(console) as progress:
            result = convert(source, out, options, progress)
    except (QuantizeError, LibraryError) as error:
        console.print(
            f"quantize: {error}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("interrupted; the same command continues where it stopped")
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(asdict(result)))
        return
    print(
        f"{result.out}: {result.modules} modules, {result.bits:.2f} bits per weight, head "
        f"{result.head_bits:g}, {result.bytes / 1e6:.1f} MB, mean relative error "
        f"{result.mean_relative_error:.5f}"
    )
    print(
        f"{result.seconds:.0f} s, of which {result.search_seconds:.0f} s of trellis search: "
        f"{result.tiles_searched} tiles, {result.tiles_per_second_per_core:.0f} tiles per second "
        f"per core on {result.threads} threads"
    )


def main() -> None:
    """Console entry."""
    app()
