"""The EXL3 weight format in numpy: what every stored word means, slowly enough to be believed.

A linear layer `y = x W + bias` with `W` `[k, n]` is stored as 16x16 tiles of a rotated weight.
Each tile is a ring of `256 * bits` bits, walked in 256 steps; the value of a step is a fixed
function (the codebook) of the 16 ring bits that end with that step. Around the tiles stand two
128-point Hadamard transforms and the vectors `suh` (inputs) and `svh` (outputs):

    W = diag(suh) H A H diag(svh)            A = decode_inner(trellis, codebook)

This module decodes, packs and multiplies; `layout.py` decides which tensors make a legal layer.
All arithmetic after the decoder is float64: the compiled kernels are held against this module,
which is held against exllamav3's own results.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

CODEBOOKS = ("3inst", "mcg", "mul1")
"""Names of the codebooks; the position in this tuple is the number the compiled operators take."""

MARKERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
"""Codebook marker tensors and the multiplier each must hold; a layer without one is 3inst."""

TILE = 16
BLOCK = 128
"""Side of a tile, and the Hadamard block of which every stored dimension is a multiple."""

LEGAL_BITS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0)
"""Bits per weight that exist; the fractional ones only with the mul1 codebook."""

EMBEDDING_GROUP = 256
"""Elements of one group of a quantised embedding row (one scale and one ring per group)."""


class FormatError(ValueError):
    """The tensors are not a legal EXL3 layer; the message says what was found and expected."""


def bits_from_words(words: int) -> float:
    """Bits per weight of a trellis whose last dimension is `words` (16-bit words per tile).

    Raises:
        FormatError: `words` belongs to no legal rate.
    """
    bits = words / TILE
    if bits not in LEGAL_BITS:
        legal = ", ".join(str(words_from_bits(b)) for b in LEGAL_BITS)
        raise FormatError(f"trellis has {words} words per tile; legal are {legal}")
    return bits


def words_from_bits(bits: float) -> int:
    """16-bit words of one tile at `bits` bits per weight.

    Raises:
        FormatError: no such rate.
    """
    if bits not in LEGAL_BITS:
        legal = ", ".join(f"{b:g}" for b in LEGAL_BITS)
        raise FormatError(f"{bits} bits per weight do not exist; legal are {legal}")
    return int(bits * TILE)


# Codebooks


def codebook(name: str) -> np.ndarray:
    """All values of a codebook: fp16 `[65536]`, indexed by state, read-only.

    `3inst` and `mcg` spread the state with a multiplication and add the two halves of the product
    as fp16 numbers of random sign and mantissa; `mul1` adds the four bytes of the product. Every
    sum is exact in float64, so the conversion to fp16 is the single rounding of the format.
    """
    return _values(name)


@lru_cache(maxsize=len(CODEBOOKS))
def _values(name: str) -> np.ndarray:
    state = np.arange(1 << 16, dtype=np.uint32)
    if name == "mul1":
        product = state * np.uint32(MARKERS["mul1"])
        byte_sum = product.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.int64)
        values = (1774 * byte_sum - 905216) / 2.0**18
    elif name in ("3inst", "mcg"):
        if name == "mcg":
            product = state * np.uint32(MARKERS["mcg"])
        else:
            product = state * np.uint32(89226354) + np.uint32(64248484)
        pair = (product & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
        values = pair.view(np.float16).reshape(-1, 2).astype(np.float64).sum(axis=1)
    else:
        raise FormatError(f"codebook {name!r} does not exist; there are {', '.join(CODEBOOKS)}")
    table = values.astype(np.float16)
    table.setflags(write=False)
    return table


# Shards of a fused layer, as the operators take them

SHARD_FIELDS = 5
"""Numbers that describe one shard: codebook index, words a tile, n, n_begin, n_out."""


def shard_columns(shards: list[int]) -> int:
    """Columns that a layer returns: the last number of each shard."""
    return sum(shards[SHARD_FIELDS - 1 :: SHARD_FIELDS])


# Rings


@lru_cache(maxsize=len(LEGAL_BITS))
def step_ends(bits: float) -> np.ndarray:
    """Ring position just after the bits of each step: int64 `[256]`, last is `256 * bits`.

    A step adds `bits` bits; at a half rate even steps add the lower and odd steps the higher
    whole number.
    """
    words_from_bits(bits)
    steps = np.full(TILE * TILE, int(bits), dtype=np.int64)
    if bits != int(bits):
        steps[1::2] += 1
    return np.cumsum(steps)


def _tile_order() -> np.ndarray:
    """Row-major element of each ring position: the register order of an m16n8k16 B operand pair."""
    position = np.arange(TILE * TILE)
    lane, j = position >> 3, position & 7
    row = 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1)
    column = (lane >> 2) + 8 * (j >> 2)
    return TILE * row + column


PERM = _tile_order()
"""Ring position -> 16 * row + column inside the tile (row counts inputs), int64 `[256]`."""

_POSITION_OF = np.argsort(PERM)


def _windows(trellis: np.ndarray, positions: np.ndarray | None) -> np.ndarray:
    """States of `trellis` `[..., words]` at the given ring positions (None: all 256, in order)."""
    words = trellis.shape[-1]
    ends = step_ends(bits_from_words(words))
    if positions is not None:
        ends = ends[positions]
    # As big-endian 32-bit words the ring reads MSB first; two neighbouring 16-bit pieces of it
    # hold every window that starts in the first of them.
    ring = _uint32(trellis).astype(">u4").view(">u2").astype(np.uint32)
    pairs = (ring << np.uint32(16)) | np.roll(ring, -1, axis=-1)
    begin = (ends - 16) % (16 * words)
    shift = (16 - begin % 16).astype(np.uint32)
    return (pairs[..., begin // 16] >> shift).astype(np.uint16)


def _uint32(trellis: np.ndarray) -> np.ndarray:
    if trellis.dtype not in (np.dtype(np.int16), np.dtype(np.uint16)):
        raise FormatError(f"trellis has dtype {trellis.dtype}, expected int16")
    return np.ascontiguousarray(trellis).view("<u4")


def unpack_states(trellis: np.ndarray, bits: float | None = None) -> np.ndarray:
    """States of packed tiles.

    Args:
        trellis: int16 `[..., 16 * bits]`, one ring per row.
        bits: rate, checked against the shape when given.

    Returns:
        uint16 `[..., 256]`, in ring order.
    """
    if bits is not None and words_from_bits(bits) != trellis.shape[-1]:
        raise FormatError(
            f"trellis has {trellis.shape[-1]} words per tile, "
            f"expected {words_from_bits(bits)} at {bits:g} bits"
        )
    return _windows(trellis, None)


def pack_states(states: np.ndarray, bits: float) -> np.ndarray:
    """Tiles that hold the given walks, the inverse of `unpack_states`.

    Args:
        states: uint16 `[..., 256]` in ring order; each must continue its predecessor and the first
            must continue the last, since only the new bits of a step are stored.

    Returns:
        int16 `[..., 16 * bits]`.

    Raises:
        FormatError: the states are not closed walks.
    """
    states = np.asarray(states)
    if states.dtype != np.uint16 or states.shape[-1:] != (TILE * TILE,):
        raise FormatError(f"states are {states.dtype} {states.shape}, expected uint16 [..., 256]")
    ends = step_ends(bits)
    bit = np.arange(ends[-1])
    step = np.searchsorted(ends, bit, side="right")
    shift = (ends[step] - 1 - bit).astype(np.uint16)
    ring = np.packbits(((states[..., step] >> shift) & 1).astype(np.uint8), axis=-1)
    trellis = np.ascontiguousarray(ring).view(">u4").astype("<u4").view(np.int16)
    mismatch = np.argwhere(_windows(trellis, None) != states)
    if mismatch.size:
        *tile, position = (int(i) for i in mismatch[0])
        raise FormatError(
            f"states of tile {tuple(tile)} are no closed walk at {bits:g} bits: the state at ring "
            f"position {position} does not continue its predecessors"
        )
    return trellis


def decode_inner(trellis: np.ndarray, codebook: str) -> np.ndarray:
    """The weight between the two Hadamard transforms, bit-exact.

    Args:
        trellis: int16 `[k/16, n/16, 16*bits]` as stored.
        codebook: one of `CODEBOOKS`.

    Returns:
        fp16 `[k, n]`.
    """
    if trellis.ndim != 3:
        raise FormatError(f"trellis has shape {list(trellis.shape)}, expected [k/16, n/16, words]")
    if trellis.shape[2] % TILE and codebook != "mul1":
        raise FormatError(
            f"{trellis.shape[2]} words per tile with codebook {codebook}; half rates exist "
            "only with mul1"
        )
    tile_rows, tile_columns, _ = trellis.shape
    values = _values(codebook)[_windows(trellis, _POSITION_OF)]
    tiles = values.reshape(tile_rows, tile_columns, TILE, TILE)
    return tiles.transpose(0, 2, 1, 3).reshape(tile_rows * TILE, tile_columns * TILE)


# Transforms and scales


@lru_cache(maxsize=1)
def _sylvester() -> np.ndarray:
    """The 128-point Hadamard matrix in natural order, entries +1 and -1."""
    matrix = np.ones((1, 1))
    while len(matrix) < BLOCK:
        matrix = np.kron([[1.0, 1.0], [1.0, -1.0]], matrix)
    return matrix


def hadamard(x: np.ndarray) -> np.ndarray:
    """Orthonormal Hadamard transform of every 128-block of the last axis, float64.

    The transform is its own inverse. The last axis must be a multiple of 128.
    """
    x = np.asarray(x, dtype=np.float64)
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise FormatError(f"last axis of {list(x.shape)} is no multiple of {BLOCK}")
    return (x.reshape(-1, BLOCK) @ _sylvester() / np.sqrt(BLOCK)).reshape(x.shape)


def unpack_signs(packed: np.ndarray) -> np.ndarray:
    """Legacy `su`/`sv` (16 signs a word, LSB first, a set bit means -1) as fp16 `[16 * words]`."""
    octets = np.ascontiguousarray(packed).astype("<u2", casting="unsafe").view(np.uint8)
    return 1 - 2 * np.unpackbits(octets, bitorder="little").astype(np.float16)


def _scale(vector: np.ndarray, size: int, name: str) -> np.ndarray:
    """`suh`/`svh` (or their packed legacy form) as float64 `[size]`."""
    vector = np.asarray(vector)
    if vector.dtype.kind in "iu":
        vector = unpack_signs(vector)
    if vector.shape != (size,):
        raise FormatError(f"{name} has {list(vector.shape)} elements, expected [{size}]")
    return vector.astype(np.float64)


def dense_weight(
    trellis: np.ndarray, suh: np.ndarray, svh: np.ndarray, codebook: str
) -> np.ndarray:
    """The weight in the model's own basis: float64 `[k, n]`, `y = x @ W`.

    Args:
        trellis: int16 `[k/16, n/16, 16*bits]`.
        suh: fp16 `[k]`, or legacy packed signs int16 `[k/16]`.
        svh: fp16 `[n]`, or legacy packed signs int16 `[n/16]`.
    """
    inner = decode_inner(trellis, codebook)
    k, n = inner.shape
    rows = hadamard(inner.T).T * _scale(suh, k, "suh")[:, None]
    return hadamard(rows) * _scale(svh, n, "svh")


def linear(
    x: np.ndarray,
    trellis: np.ndarray,
    suh: np.ndarray,
    svh: np.ndarray,
    codebook: str,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """`x W + bias` in float64, in the order a kernel computes it: `[..., k]` to `[..., n]`."""
    inner = decode_inner(trellis, codebook).astype(np.float64)
    k, n = inner.shape
    rotated = hadamard(np.asarray(x, dtype=np.float64) * _scale(suh, k, "suh"))
    y = hadamard(rotated @ inner) * _scale(svh, n, "svh")
    return y if bias is None else y + np.asarray(bias, dtype=np.float64)


# Quantised embeddings


def embedding_states(ring: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """States and scale of quantised embedding groups.

    Unlike a linear's, this ring is written LSB first and element after element.

    Args:
        ring: int16 `[..., 1 + elements * bits / 16]`: the bit pattern of an fp16 scale, then the
            low `bits` bits of each state.
        bits: whole bits per element.

    Returns:
        (uint16 `[..., elements]`, fp16 `[...]`).
    """
    if bits not in range(1, 9):
        raise FormatError(f"{bits} bits per embedding element, expected a whole number 1 to 8")
    words = np.ascontiguousarray(ring).view("<u2")
    stream_bits = 16 * (words.shape[-1] - 1)
    if stream_bits <= 0 or stream_bits % bits:
        raise FormatError(
            f"an embedding group of {words.shape[-1]} words is no scale and {bits}-bit elements"
        )
    octets = np.ascontiguousarray(words[..., 1:]).view(np.uint8)
    stream = np.unpackbits(octets, axis=-1, bitorder="little")
    symbol_bits = stream.reshape(*stream.shape[:-1], -1, bits).astype(np.uint32)
    symbols = (symbol_bits << np.arange(bits, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)
    states = np.zeros_like(symbols)
    for back in range(-(-16 // bits)):
        states |= np.roll(symbols, back, axis=-1) << np.uint32(back * bits)
    scale = np.ascontiguousarray(words[..., 0]).view(np.float16)
    return (states & 0xFFFF).astype(np.uint16), scale


def embedding_bits(width: int, groups: int) -> int:
    """Bits per element of embedding rows of `width` words in `groups` groups of 256.

    Raises:
        FormatError: the sizes fit no whole rate from 1 to 8.
    """
    bits, rest = divmod(width - groups, TILE * groups) if groups else (0, 1)
    if rest or bits not in range(1, 9):
        raise FormatError(
            f"embedding rows of {width} words with {groups} groups, "
            "expected groups * (1 + 16 * bits) words for whole bits from 1 to 8"
        )
    return bits


def decode_embedding(trellis: np.ndarray, signs: np.ndarray, hidden: int) -> np.ndarray:
    """Rows of a quantised embedding (mul1 codebook, rotated in groups of 256).

    Args:
        trellis: int16 `[rows, groups * (1 + 16 * bits)]`.
        signs: fp16 `[groups, 256]`.
        hidden: width of the embedding; the padding of the last group is dropped.

    Returns:
        fp16 `[rows, hidden]`. The butterflies run in float32, as in exllamav3.
    """
    rows, width = trellis.shape
    groups = len(signs)
    if signs.shape != (groups, EMBEDDING_GROUP) or not 0 < hidden <= groups * EMBEDDING_GROUP:
        raise FormatError(
            f"embedding signs {list(signs.shape)} with hidden size {hidden}, "
            f"expected [ceil(hidden / {EMBEDDING_GROUP}), {EMBEDDING_GROUP}]"
        )
    bits = embedding_bits(width, groups)
    states, scale = embedding_states(trellis.reshape(rows, groups, -1), bits)
    values = _values("mul1")[states].astype(np.float32) * scale[..., None].astype(np.float32)
    half = 1
    while half < EMBEDDING_GROUP:
        a, b = np.moveaxis(values.reshape(rows, groups, -1, 2, half), 3, 0)
        values = np.stack((a + b, a - b), axis=3)
        half *= 2
    values = values.reshape(rows, groups, EMBEDDING_GROUP) / np.float32(16)
    restored = (values * signs.astype(np.float32)).astype(np.float16)
    return restored.reshape(rows, -1)[:, :hidden]
