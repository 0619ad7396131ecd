"""From file bytes to pixels as the publisher makes them, and nothing but RequestError for bytes that are no image."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from deskfleet.engine.images import prepare_image
from deskfleet.engine.model.vision import normalise_pixels
from deskfleet.errors import RequestError
from deskfleet.model.config import VisionConfig
from deskfleet.model.vision import plan_image
from tests.engine.golden import checkpoint, golden

vision = checkpoint().config.vision
assert vision is not None
VISION: VisionConfig = vision


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture(width: int = 80, height: int = 60) -> Image.Image:
    """Smooth, so that lossy formats keep it, and different in every corner."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)]
    return Image.fromarray(np.stack(channels, -1).astype(np.uint8))


def as_published(data: bytes) -> np.ndarray:
    """Decode, convert to RGB, pad with grey (spec §9.1 steps 1 and 7)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow is not happy about some palettes
        image = Image.open(io.BytesIO(data)).convert("RGB")
    grid = plan_image(*image.size, VISION)
    return np.asarray(ImageOps.pad(image, (grid.width_px, grid.height_px), color=(127, 127, 127)))


def _rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn me by 90 degrees": 80 x 60 stays 80 x 60
    return encoded(picture(), "JPEG", exif=exif.tobytes())


FILES = {
    "png": encoded(picture(), "PNG"),
    "png interlaced": encoded(picture(), "PNG", interlace=1),
    "jpeg": encoded(picture(), "JPEG"),
    "jpeg progressive": encoded(picture(), "JPEG", progressive=True),
    "jpeg grey": encoded(picture().convert("L"), "JPEG"),
    "jpeg cmyk": encoded(picture().convert("CMYK"), "JPEG"),
    "jpeg turned by exif": _rotated(),
    "webp": encoded(picture(), "WEBP"),
    "webp lossless alpha": encoded(picture().convert("RGBA"), "WEBP", lossless=True),
    "palette": encoded(picture().quantize(32), "PNG"),
    "palette, one colour transparent": encoded(picture().quantize(32), "PNG", transparency=3),
    "palette, alpha per colour": encoded(picture().quantize(32), "PNG", transparency=bytes([0, 9, 99])),
    "one bit": encoded(picture().convert("1"), "PNG"),
    "grey and alpha": encoded(picture().convert("LA"), "PNG"),
    "rgb, one colour transparent": encoded(picture(), "PNG", transparency=(0, 0, 0)),
    "16 bit": encoded(Image.fromarray(np.arange(4800, dtype=np.uint16).reshape(60, 80) * 13), "PNG"),
}


@pytest.mark.parametrize("kind", FILES)
def test_pixels_are_the_publishers(kind: str) -> None:
    prepared = prepare_image(FILES[kind], VISION)
    assert prepared.pixels.dtype == np.uint8
    assert prepared.pixels.shape == (prepared.grid.height_px, prepared.grid.width_px, 3)
    np.testing.assert_array_equal(prepared.pixels, as_published(FILES[kind]))
    assert len(prepared.token_types) == prepared.grid.num_tokens


def test_only_the_conversion_to_rgb_is_done() -> None:
    """Transparent pixels keep their colour, and a picture on its side stays there."""
    clear = Image.new("RGBA", (84, 84), (200, 30, 60, 0))
    assert (prepare_image(encoded(clear, "PNG"), VISION).pixels == (200, 30, 60)).all()
    turned = prepare_image(FILES["jpeg turned by exif"], VISION)
    assert turned.grid == prepare_image(FILES["jpeg"], VISION).grid
    assert turned.grid.width_px > turned.grid.height_px


@pytest.mark.parametrize("number", [0, 1])
def test_golden_patches_bit_for_bit(number: int) -> None:
    data = golden("golden/image")
    prepared = prepare_image(data[f"image{number}.png"].numpy().tobytes(), VISION)
    patches = normalise_pixels(torch.from_numpy(prepared.pixels.copy()), VISION.patch_size)
    reference = data[f"image{number}.patches"]
    assert patches.dtype == reference.dtype == torch.bfloat16
    assert torch.equal(patches.view(torch.int16), reference.view(torch.int16))
    _, vit_height, vit_width, token_rows, token_columns = data[f"image{number}.geometry"].tolist()
    grid = prepared.grid
    assert (grid.vit_height, grid.vit_width, grid.token_rows, grid.token_columns) == (
        vit_height,
        vit_width,
        token_rows,
        token_columns,
    )
    assert list(prepared.token_types) == data[f"image{number}.types"].tolist()


@pytest.mark.parametrize("size", [(1, 1), (10, 40000), (40000, 10), (1, 5000), (3, 2)], ids=str)
def test_any_shape_fits_the_span(size: tuple[int, int]) -> None:
    prepared = prepare_image(encoded(Image.new("RGB", size), "PNG"), VISION)
    assert prepared.grid.num_tokens <= VISION.max_image_tokens
    assert prepared.pixels.shape == (prepared.grid.height_px, prepared.grid.width_px, 3)


# --- refusals


def _bomb(width: int, height: int) -> bytes:
    """A valid PNG header that claims a size, without the pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "an image of 0 bytes is not a readable PNG, JPEG, WEBP"),
        (b"<html>not found</html>", "is not a readable PNG, JPEG, WEBP"),
        (FILES["png"][:200], "cannot decode an image of 200 bytes: image file is truncated"),
        (FILES["jpeg"][: len(FILES["jpeg"]) // 2], "cannot decode an image of"),
        (FILES["webp"][: len(FILES["webp"]) // 2], "image of"),
        (FILES["png"][:20], "image of 20 bytes"),
        (encoded(picture(), "GIF"), "is not a readable PNG, JPEG, WEBP"),
        (encoded(picture(), "TIFF"), "is not a readable PNG, JPEG, WEBP"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not a readable PNG, JPEG, WEBP"),
        (_bomb(9000, 8000), "image of 9000 x 8000 pixels exceeds 67108864 pixels"),
        (_bomb(10_000, 10_000), "image"),  # where Pillow begins to warn
        (_bomb(100_000, 100_000), "cannot decode an image of"),  # where Pillow refuses
    ],
    ids=range(12),
)
def test_what_is_no_image_is_the_requests_fault(data: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as failure:
        prepare_image(data, VISION)
    assert failure.value.param == "messages"


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's about damaged EXIF data, which it skips
@settings(deadline=None, max_examples=400)
@given(st.sampled_from(sorted(FILES)), st.randoms(use_true_random=False), st.booleans())
def test_damage_is_refused_or_decoded_but_never_anything_else(
    kind: str, rng: random.Random, cut: bool
) -> None:
    data = bytearray(FILES[kind])
    if cut:
        data = data[: rng.randrange(len(data))]
    else:
        reach = min(len(data), rng.choice([60, len(data)]))
        for _ in range(rng.randint(1, 5)):
            data[rng.randrange(reach)] = rng.randrange(256)
    with contextlib.suppress(RequestError):
        assert prepare_image(bytes(data), VISION).pixels.shape[2] == 3
