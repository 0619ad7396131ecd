"""Image planning against the published examples and the golden tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from deskfleet.errors import RequestError
from deskfleet.model.config import ModelConfig, VisionConfig
from deskfleet.model.published import published_config_dict
from deskfleet.model.vision import ImageGrid, plan_image, span_token_types

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"
GRIDS = json.loads((GOLDEN / "kernels" / "tables.json").read_text())["real_config_image_grids"]


def vision_of(config: ModelConfig) -> VisionConfig:
    assert config.vision is not None
    return config.vision


PUBLISHED = vision_of(ModelConfig.from_dict(published_config_dict()))


@pytest.mark.parametrize(
    ("image", "padded", "vit", "tokens", "num_tokens"),
    [
        ((224, 224), (546, 546), (39, 39), (13, 13), 184),
        ((640, 480), (644, 490), (35, 46), (12, 16), 206),
        ((1024, 768), (1036, 770), (55, 74), (19, 25), 496),
        ((1920, 1080), (1708, 966), (69, 122), (23, 41), 968),
        ((4000, 3000), (1512, 1134), (81, 108), (27, 36), 1001),
        ((10, 100_000), (42, 21_462), (1533, 3), (511, 1), 1024),
        ((100_000, 10), (42_882, 42), (3, 3063), (1, 1021), 1024),
    ],
)
def test_published_examples(
    image: tuple[int, int],
    padded: tuple[int, int],
    vit: tuple[int, int],
    tokens: tuple[int, int],
    num_tokens: int,
) -> None:
    grid = plan_image(*image, PUBLISHED)
    assert grid == ImageGrid(*padded, *vit, *tokens)
    assert grid.num_tokens == num_tokens


@pytest.mark.parametrize("row", GRIDS, ids=lambda row: f"{row['width']}x{row['height']}")
def test_golden_grids(row: dict[str, int]) -> None:
    grid = plan_image(row["width"], row["height"], PUBLISHED)
    assert grid == ImageGrid(
        width_px=row["resized_w"],
        height_px=row["resized_h"],
        vit_height=row["vit_h"],
        vit_width=row["vit_w"],
        token_rows=row["n_llm_h"],
        token_columns=row["n_llm_w"],
    )
    assert grid.num_tokens == row["tokens"]


@pytest.mark.parametrize("number", [0, 1])
def test_golden_image_spans(number: int) -> None:
    with safe_open(GOLDEN / "golden" / "image.safetensors", "np") as file:
        start, vit_height, vit_width, rows, columns = file.get_tensor(f"image{number}.geometry").tolist()
        types = file.get_tensor(f"image{number}.types").tolist()
        token_types = file.get_tensor("token_types")
    patch = 14
    grid = ImageGrid(vit_width * patch, vit_height * patch, vit_height, vit_width, rows, columns)
    assert list(span_token_types(grid)) == types
    np.testing.assert_array_equal(token_types[start : start + grid.num_tokens], types)
    # What the publisher padded to is already a whole number of patches above the minimum: a fixed point.
    tiny = vision_of(ModelConfig.from_file(GOLDEN / "model" / "config.json"))
    assert plan_image(grid.width_px, grid.height_px, tiny) == grid


def test_shrinking_counts_the_newline_column_exactly() -> None:
    """mw = 30.9354 and mh = 32.0021: a little less than the exact root would lose a row, and 14 pixels of width.

    The scale is then min(30 * 42 / 2900, 32 * 42 / 3000) = 1260 / 2900, and the height 3000 * 1260 / 2900
    = 1303.4, which holds 93 patches.
    """
    grid = plan_image(2900, 3000, PUBLISHED)
    assert (grid.width_px, grid.height_px) == (1260, 93 * 14)


def test_span_of_two_rows() -> None:
    grid = ImageGrid(126, 84, 6, 9, 2, 3)
    assert span_token_types(grid) == (0, 1, 1, 1, 2, 1, 1, 1, 2, 3)


@pytest.mark.parametrize(("width", "height"), [(0, 10), (10, 0), (-3, 5)])
def test_image_without_area_is_refused(width: int, height: int) -> None:
    with pytest.raises(RequestError) as caught:
        plan_image(width, height, PUBLISHED)
    assert caught.value.message == f"image of {width} x {height} pixels has no area"


def test_ratio_limit_squeezes_the_width() -> None:
    limited = VisionConfig(32, 1024, 16, 2816, 14, 1e4, 3, 1024, 295936, max_wh_ratio=2.0)
    assert plan_image(4000, 1000, limited) == plan_image(2000, 1000, PUBLISHED)
    assert plan_image(1000, 4000, limited) == plan_image(1000, 4000, PUBLISHED)


SIDES = st.one_of(st.integers(1, 3000), st.integers(1, 10**6))


@given(
    width=SIDES,
    height=SIDES,
    downsample=st.integers(1, 4),
    max_tokens=st.integers(4, 2000),
    min_pixels=st.integers(0, 300_000),
)
def test_every_image_fits(width: int, height: int, downsample: int, max_tokens: int, min_pixels: int) -> None:
    vision = VisionConfig(2, 64, 4, 96, 14, 1e4, downsample, max_tokens, min_pixels, None)
    grid = plan_image(width, height, vision)
    assert grid.num_tokens <= max_tokens
    assert grid.vit_width >= 1
    assert grid.vit_height >= 1
    assert (grid.width_px, grid.height_px) == (grid.vit_width * 14, grid.vit_height * 14)
    assert (grid.token_columns - 1) * downsample < grid.vit_width <= grid.token_columns * downsample
    assert (grid.token_rows - 1) * downsample < grid.vit_height <= grid.token_rows * downsample
    types = span_token_types(grid)
    assert len(types) == grid.num_tokens
    assert types.count(1) == grid.token_rows * grid.token_columns
    assert types.count(2) == grid.token_rows
