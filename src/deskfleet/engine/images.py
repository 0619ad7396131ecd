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


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """Pixels uint8 [height, width, 3] of the padded image, its grid and the types of its span's tokens."""

    pixels: np.ndarray = field(repr=False)
    grid: ImageGrid

    @property
    def token_types(self) -> tuple[int, ...]:
        return span_token_types(self.grid)


def prepare_image(data: bytes, vision: VisionConfig) -> PreparedImage:
    """Decode, convert to RGB, pad to the planned size with grey borders. Raises RequestError for bad files."""
    try:
        with Image.open(io.BytesIO(data)) as opened:
            image = opened.convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise RequestError(
            f"cannot decode an image of {len(data)} bytes: {error}", param="messages"
        ) from error
    width, height = image.size
    grid = plan_image(width, height, vision)
    size = (grid.width_px, grid.height_px)
    if vision.max_wh_ratio is not None and width > height * vision.max_wh_ratio:
        resized = image.resize(size)
    else:
        resized = ImageOps.pad(image, size, color=_GREY)
    return PreparedImage(np.asarray(resized), grid)


__all__ = ["PreparedImage", "prepare_image"]
