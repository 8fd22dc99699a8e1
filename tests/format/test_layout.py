"""What `describe_linear` and `describe_embedding` accept, and how they refuse the rest."""

import pytest

from exl3_plugin.format import MARKERS, FormatError
from exl3_plugin.layout import LinearLayout, describe_embedding, describe_linear

GOOD = {
    "trellis": ("I16", (16, 40, 64)),
    "suh": ("F16", (256,)),
    "svh": ("F16", (640,)),
}
MARKER = ("I32", ())


def test_good_layers():
    assert describe_linear(GOOD, {}) == LinearLayout(4.0, "3inst", 256, 640, False)
    mcg = {**GOOD, "mcg": MARKER, "bias": ("BF16", (600,))}
    assert describe_linear(mcg, {"mcg": -877912083}).codebook == "mcg"
    half = {**GOOD, "trellis": ("U16", (16, 40, 56)), "mul1": ("I32", (1,))}
    assert describe_linear(half, {"mul1": MARKERS["mul1"]}).bits == 3.5


def test_legacy_signs_instead_of_scales():
    legacy = {"trellis": GOOD["trellis"], "su": ("I16", (16,)), "sv": ("I16", (40,))}
    assert describe_linear(legacy, {}) == LinearLayout(4.0, "3inst", 256, 640, True)
    with pytest.raises(FormatError, match=r"sv is I16 \[41\], expected I16 \[40\]"):
        describe_linear({**legacy, "sv": ("I16", (41,))}, {})


@pytest.mark.parametrize(
    ("change", "markers", "message"),
    [
        ({"trellis": ("I32", (16, 40, 64))}, {}, "dtype I32, expected I16"),
        ({"trellis": ("I16", (16, 40, 72))}, {}, "72 words per tile; legal are 16, 24"),
        ({"trellis": ("I16", (40, 64))}, {}, r"\[40, 64\], expected \[k/16, n/16, words\]"),
        ({"trellis": ("I16", (12, 40, 64))}, {}, "k = 192, expected a multiple of 128"),
        ({"trellis": ("I16", (16, 0, 64))}, {}, "n = 0, expected a multiple of 128"),
        ({"trellis": ("I16", (16, 40, 24))}, {}, "1.5 bits .* codebook 3inst; half rates"),
        ({"suh": ("F16", (255,))}, {}, r"suh is F16 \[255\], expected F16 \[256\]"),
        ({"svh": ("BF16", (640,))}, {}, r"svh is BF16 \[640\], expected F16 \[640\]"),
        ({"bias": ("F16", (641,))}, {}, r"bias is F16 \[641\], expected .* at most 640"),
        ({"scale": ("F16", (1,))}, {}, "pre-release file"),
        ({"mcg": ("I64", ())}, {}, r"mcg is I64 \[\], expected I32"),
        ({"mcg": MARKER}, {"mcg": 0x12345678}, "holds 0x12345678, expected 0xCBAC1FED"),
        ({"mul1": MARKER}, {"mul1": MARKERS["mcg"]}, "holds 0xCBAC1FED, expected 0x83DCD12D"),
        (
            {"mcg": MARKER, "mul1": MARKER},
            MARKERS,
            r"both codebook markers are present \(mcg and mul1\)",
        ),
    ],
)
def test_refused_layers(change, markers, message):
    with pytest.raises(FormatError, match=message):
        describe_linear({**GOOD, **change}, markers)


def test_layer_without_scale():
    with pytest.raises(FormatError, match="neither svh nor"):
        describe_linear({k: v for k, v in GOOD.items() if k != "svh"}, {})


def test_embeddings():
    shapes = {"trellis": ("I16", (32000, 3 * 65)), "signs": ("F16", (3, 256))}
    assert describe_embedding(shapes) == (4.0, 32000, 768)
    with pytest.raises(FormatError, match="195 words with 2 groups"):
        describe_embedding({**shapes, "signs": ("F16", (2, 256))})
    with pytest.raises(FormatError, match="n-gram table"):
        describe_embedding({"trellis": ("I16", (32000, 41))})
