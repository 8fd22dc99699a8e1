"""Token rows that the model is calibrated with: cut from a text, or sampled from the model."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from exl3_plugin.quantize.ldlq import QuantizeError
from exl3_plugin.quantize.source import Source

_SAMPLED_AT_ONCE = 64


@dataclass(frozen=True)
class Calibration:
    """What to calibrate with.

    Attributes:
        file: a UTF-8 text, or None for text sampled from the model itself.
        rows: how many rows of tokens at most.
        columns: tokens of one row.
    """

    file: Path | None
    rows: int
    columns: int

    def identity(self) -> dict:
        """What makes one calibration equal to another: the text itself, not its path."""
        content = asdict(self) | {"file": None}
        if self.file is not None:
            content["file_sha256"] = hashlib.sha256(_read(self.file).encode()).hexdigest()
        return content


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise QuantizeError(f"calibration text {file} does not exist") from None
    except (UnicodeDecodeError, OSError) as error:
        raise QuantizeError(f"calibration text {file} cannot be read: {error}") from error


def calibration_tokens(
    calibration: Calibration, source: Source, model: torch.nn.Module
) -> torch.Tensor:
    """Token ids int64 `[rows, columns]`.

    Raises:
        QuantizeError: the text is too short for one row, or cannot be read.
    """
    if calibration.file is None:
        return _sampled(calibration, model)
    # Special tokens are plain text here: a calibration file holds prose, not conversations.
    ids = source.tokenizer()(_read(calibration.file), add_special_tokens=False, verbose=False)
    tokens = torch.tensor(ids["input_ids"], dtype=torch.int64)
    available = len(tokens) // calibration.columns
    if available == 0:
        raise QuantizeError(
            f"calibration text {calibration.file} has {len(tokens)} tokens, fewer than one row of "
            f"{calibration.columns}; give more text or a smaller --calibration-columns"
        )
    rows = tokens[: available * calibration.columns].reshape(available, calibration.columns)
    if available > calibration.rows:
        # Evenly over the text, so that a long file is not represented by its beginning.
        rows = rows[torch.arange(calibration.rows) * available // calibration.rows]
    return rows


@torch.no_grad()
def _sampled(calibration: Calibration, model: torch.nn.Module) -> torch.Tensor:
    """Rows sampled at temperature 1, each from a random first token, the same on every run."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(20250509)
    first = torch.randint(vocabulary, (calibration.rows, 1), generator=generator)
    rows = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20250509)
        for start in first.split(_SAMPLED_AT_ONCE):
            rows.append(
                model.generate(
                    start,
                    attention_mask=torch.ones_like(start),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    # A row goes on after an end token: text after it is text all the same.
                    eos_token_id=None,
                    pad_token_id=0,
                    min_new_tokens=calibration.columns - 1,
                    max_new_tokens=calibration.columns - 1,
                )
            )
    return torch.cat(rows)
