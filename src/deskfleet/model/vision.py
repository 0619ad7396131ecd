"""The geometry of one image: its padded size, its patches, its cells, its span of tokens.

Owns the arithmetic of spec §9.1-9.2. Pure: knows nothing of pixels, files or tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from deskfleet.errors import RequestError
from deskfleet.model.config import VisionConfig


class SpanToken(IntEnum):
    """What stands at one position of an image span. Text outside spans is -1 (spec §9.2)."""

    start = 0
    image = 1
    newline = 2
    end = 3


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """One image after planning.

    `width_px`, `height_px` is the size to pad to, a multiple of the patch; `vit_*` counts patches and
    `token_*` counts cells of downsample_ratio x downsample_ratio patches, one image token each.
    """

    width_px: int
    height_px: int
    vit_height: int
    vit_width: int
    token_rows: int
    token_columns: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the span: every row ends with a newline, and the span has a start and an end."""
        return self.token_rows * (self.token_columns + 1) + 2


def plan_image(width: int, height: int, vision: VisionConfig) -> ImageGrid:
    """Return where an image of `width` x `height` pixels is padded to, and its grids (spec §9.1).

    The image is enlarged to `min_pixels`, rounded up to whole patches, and shrunk when its span would exceed
    `max_image_tokens`. Raises RequestError when a side is not positive, or when no size fits the limit.
    """
    if width <= 0 or height <= 0:
        raise RequestError(f"image of {width} x {height} pixels has no area", param="messages")
    if vision.max_wh_ratio is not None:
        # A very wide image is squeezed to the ratio; a side stays at least one pixel.
        width = max(1, min(width, int(height * vision.max_wh_ratio)))
    if width * height < vision.min_pixels:
        growth = math.sqrt(vision.min_pixels / (width * height))
        width, height = int(width * growth), int(height * growth)
    # A sliver can round to nothing here; it still gets one patch.
    width, height = max(1, width), max(1, height)
    patch = vision.patch_size
    grid = _grid(math.ceil(width / patch) * patch, math.ceil(height / patch) * patch, vision)
    if grid.num_tokens > vision.max_image_tokens:
        grid = _grid(*_shrunk(width, height, vision), vision)
    if grid.num_tokens > vision.max_image_tokens:
        raise RequestError(
            f"image of {width} x {height} pixels needs {grid.num_tokens} tokens, and max_image_tokens is "
            f"{vision.max_image_tokens}",
            param="messages",
        )
    return grid


def span_token_types(grid: ImageGrid) -> tuple[int, ...]:
    """Return the token type of each position of the span, `grid.num_tokens` of them (spec §9.2)."""
    row = (SpanToken.image.value,) * grid.token_columns + (SpanToken.newline.value,)
    return (SpanToken.start.value, *row * grid.token_rows, SpanToken.end.value)


def _grid(width_px: int, height_px: int, vision: VisionConfig) -> ImageGrid:
    vit_height, vit_width = height_px // vision.patch_size, width_px // vision.patch_size
    return ImageGrid(
        width_px=width_px,
        height_px=height_px,
        vit_height=vit_height,
        vit_width=vit_width,
        token_rows=math.ceil(vit_height / vision.downsample_ratio),
        token_columns=math.ceil(vit_width / vision.downsample_ratio),
    )


def _shrunk(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """Return the padded (width, height) that fits the token limit (spec §9.1 step 6)."""
    patch, cell = vision.patch_size, vision.patch_size * vision.downsample_ratio
    room = vision.max_image_tokens - 2  # start and end
    ratio = height / width
    # Columns c and rows c * ratio with c * ratio * (c + 1) = room: the newline is one column more.
    max_columns = math.sqrt(room / ratio + 0.25) - 0.5
    max_rows = max_columns * ratio
    if max_columns < 1:
        return cell, (room // 2) * cell
    if max_rows < 1:
        return (room - 1) * cell, cell
    scale = min(math.floor(max_columns) * cell / width, math.floor(max_rows) * cell / height)
    # At least one patch: with one-patch cells, the side that does not set the scale can round to none.
    columns, rows = math.floor(width * scale / patch), math.floor(height * scale / patch)
    return max(1, columns) * patch, max(1, rows) * patch


__all__ = ["ImageGrid", "SpanToken", "plan_image", "span_token_types"]
