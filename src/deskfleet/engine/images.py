"""From an image file to padded pixels (spec §9.1 steps 1-7). Owns decoding and resizing; no torch, no tower."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from deskfleet.errors import RequestError
from deskfleet.model.config import VisionConfig
from deskfleet.model.vision import ImageGrid, plan_image, span_token_types

_GREY = (127, 127, 127)
_FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
)  # what ImageInput promises; other decoders are not offered to strangers' bytes
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
_MAX_PIXELS = 2**26  # 192 MiB once decoded; a file of a few KB can claim far more


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """Pixels uint8 [height, width, 3] of the padded image, its grid and the types of its span's tokens."""

    pixels: np.ndarray = field(repr=False)
    grid: ImageGrid

    @property
    def token_types(self) -> tuple[int, ...]:
        return span_token_types(self.grid)


def prepare_image(data: bytes, vision: VisionConfig) -> PreparedImage:
    """Decode, convert to RGB, pad to the planned size with grey borders. Raises RequestError for bad files.

    As published: alpha is dropped, not blended, 16-bit grey is clipped, and EXIF orientation is not looked at.
    """
    image = _decode(data)
    width, height = image.size
    grid = plan_image(width, height, vision)
    size = (grid.width_px, grid.height_px)
    if vision.max_wh_ratio is not None and width > height * vision.max_wh_ratio:
        resized = image.resize(size)
    else:
        resized = ImageOps.pad(image, size, color=_GREY)
    return PreparedImage(np.asarray(resized), grid)


def _decode(data: bytes) -> Image.Image:
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            if opened.width * opened.height > _MAX_PIXELS:
                raise RequestError(
                    f"image of {opened.width} x {opened.height} pixels exceeds {_MAX_PIXELS} pixels",
                    param="messages",
                )
            opened.info.pop("transparency", None)  # no effect on RGB, and Pillow warns about some kinds
            return opened.convert("RGB")
    except UnidentifiedImageError as error:
        raise RequestError(
            f"an image of {len(data)} bytes is not a readable {', '.join(_FORMATS)}", param="messages"
        ) from error
    except (OSError, ValueError, SyntaxError, *_BOMBS) as error:  # SyntaxError is Pillow's for broken chunks
        raise RequestError(
            f"cannot decode an image of {len(data)} bytes: {error}", param="messages"
        ) from error


__all__ = ["PreparedImage", "prepare_image"]
