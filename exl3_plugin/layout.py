"""Which tensors make a legal EXL3 layer, judged from shapes, dtypes and codebook markers alone.

Nothing here reads weights, so a whole checkpoint is judged from its safetensors headers. The
tensors are the truth: bits and codebook come from here, never from a JSON file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exl3_plugin.format import (
    BLOCK,
    EMBEDDING_GROUP,
    MARKERS,
    TILE,
    FormatError,
    bits_from_words,
    embedding_bits,
)


@dataclass(frozen=True)
class LinearLayout:
    """What the shapes and markers of one stored linear layer say; `k` and `n` are padded sizes."""

    bits: float
    codebook: str
    k: int
    n: int
    legacy_signs: bool


def codebook_from_markers(markers: Mapping[str, int]) -> str:
    """Name of the codebook that the marker tensors of one layer select.

    Args:
        markers: values of the marker tensors found, signed or unsigned, e.g. `{"mcg": -877912083}`.

    Raises:
        FormatError: both markers, or a constant other than the fixed one.
    """
    if len(markers) > 1:
        raise FormatError(
            f"both codebook markers are present ({' and '.join(sorted(markers))}); a layer has one "
            "codebook, so this checkpoint is corrupt or was merged badly"
        )
    for name, value in markers.items():
        found, expected = int(value) & 0xFFFFFFFF, MARKERS[name]
        if found != expected:
            raise FormatError(
                f"marker {name} holds 0x{found:08X}, expected 0x{expected:08X}; files written with "
                "an experimental multiplier (before exllamav3 0.0.9) must be quantised again"
            )
        return name
    return "3inst"


def describe_linear(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]], markers: Mapping[str, int]
) -> LinearLayout:
    """Check one stored linear layer and say what it is, from headers alone.

    Args:
        shapes: suffix -> (safetensors dtype such as "I16", shape), for `trellis`, `suh`/`su`,
            `svh`/`sv`, `bias` and the markers; other suffixes are ignored.
        markers: suffix -> value, for the marker tensors in `shapes`.

    Raises:
        FormatError: anything the format does not allow, naming found and expected.
    """
    dtype, shape = shapes["trellis"]
    if dtype not in ("I16", "U16"):
        raise FormatError(f"trellis has dtype {dtype}, expected I16")
    if len(shape) != 3:
        raise FormatError(f"trellis has shape {list(shape)}, expected [k/16, n/16, words]")
    if "scale" in shapes:
        raise FormatError(
            "a `scale` tensor is present: a pre-release file, quantise the model again"
        )
    bits = bits_from_words(shape[2])
    k, n = shape[0] * TILE, shape[1] * TILE
    for axis, size in (("k", k), ("n", n)):
        if size == 0 or size % BLOCK:
            raise FormatError(
                f"trellis {list(shape)} means {axis} = {size}, expected a multiple of {BLOCK}"
            )
    for name in MARKERS:
        if name not in shapes:
            continue
        marker_dtype, marker_shape = shapes[name]
        if marker_dtype != "I32" or marker_shape not in ((), (1,)):
            raise FormatError(
                f"marker {name} is {marker_dtype} {list(marker_shape)}, expected I32 [] or [1]"
            )
        if name not in markers:
            raise FormatError(f"marker {name} has no value")
    codebook = codebook_from_markers(markers)
    if bits != int(bits) and codebook != "mul1":
        raise FormatError(
            f"{bits:g} bits per weight with codebook {codebook}; half rates exist only with mul1"
        )
    if "bias" in shapes:
        bias_dtype, bias_shape = shapes["bias"]
        if bias_dtype not in ("F16", "BF16", "F32") or len(bias_shape) != 1 or bias_shape[0] > n:
            raise FormatError(
                f"bias is {bias_dtype} {list(bias_shape)}, expected F16, BF16 or F32 with at most "
                f"{n} elements"
            )
    legacy = [_check_scale(shapes, new, old, size) for new, old, size in _scales_of(k, n)]
    return LinearLayout(bits, codebook, k, n, any(legacy))


def _scales_of(k: int, n: int) -> tuple[tuple[str, str, int], ...]:
    return (("suh", "su", k), ("svh", "sv", n))


def _check_scale(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]], new: str, old: str, size: int
) -> bool:
    """Check `suh`/`su` or `svh`/`sv`; says whether it is the packed legacy form."""
    if new in shapes:
        expected, name = ("F16", (size,)), new
    elif old in shapes:
        expected, name = ("I16", (size // TILE,)), old
    else:
        raise FormatError(f"neither {new} nor (legacy) {old} is present beside the trellis")
    dtype, shape = shapes[name]
    dtypes = ("I16", "U16") if expected[0] == "I16" else (expected[0],)
    if dtype not in dtypes or tuple(shape) != expected[1]:
        raise FormatError(
            f"{name} is {dtype} {list(shape)}, expected {expected[0]} {list(expected[1])} "
            "to match the trellis"
        )
    return name == old


def describe_embedding(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
) -> tuple[float, int, int]:
    """Check one quantised embedding and say its bits, rows and padded width, from headers alone.

    Args:
        shapes: suffix -> (safetensors dtype, shape), for `trellis` `[rows, words]` and `signs`.

    Raises:
        FormatError: anything the format does not allow.
    """
    dtype, (rows, width) = shapes["trellis"]
    if dtype not in ("I16", "U16"):
        raise FormatError(f"trellis has dtype {dtype}, expected I16")
    if "signs" not in shapes:
        raise FormatError(
            f"trellis has shape {[rows, width]} and no signs: a quantised n-gram table, "
            "which is not supported"
        )
    signs_dtype, signs_shape = shapes["signs"]
    if signs_dtype != "F16" or len(signs_shape) != 2 or signs_shape[1] != EMBEDDING_GROUP:
        raise FormatError(
            f"signs is {signs_dtype} {list(signs_shape)}, expected F16 [groups, {EMBEDDING_GROUP}]"
        )
    groups = signs_shape[0]
    return float(embedding_bits(width, groups)), rows, groups * EMBEDDING_GROUP
