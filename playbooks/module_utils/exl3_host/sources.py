"""Where a model comes from and where it lies: the recipe's source, the folder of the store."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from .recipe import LoadedRecipe

SELF_CALIBRATION_ROWS = 64


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces, as bytes: what hashes are made of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def model_source(loaded: LoadedRecipe) -> dict:
    """Where the model comes from, as the plan names it. Paths are absolute."""
    model = loaded.recipe.model
    if model.package is not None:
        return {"kind": "package", **model.package.model_dump()}
    if model.path is not None:
        return {"kind": "path", "path": str(_beside(loaded, model.path))}
    source = {"kind": "hub", "repo": model.repo, "revision": model.revision}
    return {**source, "gated": True} if model.gated else source


def calibration_file(loaded: LoadedRecipe) -> Path | None:
    """The calibration text that the recipe names, as an absolute path, or None."""
    quantize = loaded.recipe.model.quantize
    if quantize is None or quantize.calibration in ("none", "self"):
        return None
    return _beside(loaded, quantize.calibration)


def model_dir(loaded: LoadedRecipe, store: str, calibration_sha256: str | None = None) -> str:
    """The folder that is served: the recipe's own path, or a folder of the store.

    A folder of the store is named by what it holds, so that a changed source or bit-rate is a new
    folder and the old one can go on serving meanwhile.
    """
    source = model_source(loaded)
    quantize = quantization(loaded, calibration_sha256)
    if source["kind"] == "path" and quantize is None:
        return source["path"]
    if quantize is not None:
        # The text counts, not where it lies.
        quantize = {k: v for k, v in quantize.items() if k != "arguments"}
        if calibration_sha256 is not None:
            quantize["calibration"] = None
    key = hashlib.sha256(canonical({"source": source, "quantize": quantize})).hexdigest()
    return f"{store}/models/{loaded.recipe.name}-{key[:12]}"


def quantization(loaded: LoadedRecipe, calibration_sha256: str | None) -> dict | None:
    """What the quantiser is asked for, as the plan names it; None for a finished checkpoint."""
    quantize = loaded.recipe.model.quantize
    if quantize is None:
        return None
    arguments = ["--bits", f"{quantize.bits:g}", "--head-bits", f"{quantize.head_bits:g}"]
    arguments += ["--codebook", quantize.codebook]
    file, rows = calibration_file(loaded), quantize.calibration_rows
    calibration = None
    if file is not None:
        calibration = str(file)
        arguments += ["--calibration", calibration]
        arguments += [] if rows is None else ["--calibration-rows", str(rows)]
    elif quantize.calibration == "self":
        calibration = "self"
        rows = SELF_CALIBRATION_ROWS if rows is None else rows
        arguments += ["--self-calibration", str(rows)]
    return {
        "bits": quantize.bits,
        "head_bits": quantize.head_bits,
        "codebook": quantize.codebook,
        "calibration": calibration,
        "calibration_sha256": calibration_sha256,
        "calibration_rows": rows,
        "arguments": arguments,
    }


def preparation(source: dict, quantize: dict | None) -> str:
    """What has to be done before a start: `none`, `download` or `quantize`."""
    if quantize is not None:
        return "quantize"
    return "download" if source["kind"] == "hub" else "none"


def _beside(loaded: LoadedRecipe, place: str) -> Path:
    path = Path(place).expanduser()
    return path if path.is_absolute() else (loaded.folder / path).resolve()
