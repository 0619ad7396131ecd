"""The vision tower and aligner on the images of a batch (spec §9.3, §9.4), and where their rows go (§9.2).

Owns patches to embeddings. All images of a batch share one grid, padded at the bottom and the right; padded patches are
never attended, and the aligner sees zeros there, which is its own padding. Knows nothing of files or resizing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from deskfleet.model.config import ModelConfig, VisionConfig
from deskfleet.model.vision import SpanToken
from pocket.batch import Batch
from pocket.model.numerics import plain_rms_norm
from pocket.model.parts import Matrix, Norm

_NORM_EPS = 1e-6
_OUTPUT_GAIN = 0.3
_DELIMITERS = (SpanToken.start, SpanToken.newline, SpanToken.end)


@dataclass(frozen=True)
class ImageInputs:
    """The images of a batch on one grid of G·G' patches, both multiples of the aligner's tile.

    patches bf16 [N, G·G', 3·P·P]; present bool [N, G·G']; index int64 [B, L]: which row of `VisionTower` belongs to a
    token, 0 at text.
    """

    patches: Tensor
    present: Tensor
    grid: tuple[int, int]
    index: Tensor

    def each(self, function: Callable[[Tensor], Tensor]) -> ImageInputs:
        """The same with `function` of every tensor."""
        return ImageInputs(function(self.patches), function(self.present), self.grid, function(self.index))


def image_inputs(batch: Batch, vision: VisionConfig) -> ImageInputs | None:
    """Lay out the images of `batch`; None when it has none."""
    if not batch.images:
        return None
    patch, tile = vision.patch_size, vision.downsample_ratio
    shapes = [image.placement.pixels.shape for image in batch.images]
    rows, columns = (max(-(-shape[side] // (patch * tile)) for shape in shapes) * tile for side in (0, 1))
    patches = torch.zeros(len(shapes), rows, columns, 3 * patch * patch, dtype=torch.bfloat16)
    present = torch.zeros(len(shapes), rows, columns, dtype=torch.bool)
    index = torch.zeros(batch.token_ids.shape, dtype=torch.int64)
    cells = (rows // tile) * (columns // tile)
    for number, image in enumerate(batch.images):
        placed = image.placement
        height, width = placed.pixels.shape[0] // patch, placed.pixels.shape[1] // patch
        patches[number, :height, :width] = _patches(torch.from_numpy(placed.pixels.copy()), patch)
        present[number, :height, :width] = True
        types = torch.from_numpy(placed.token_types.astype(np.int64))
        nth = torch.arange(int((types == SpanToken.image).sum()))
        own_columns = -(-width // tile)
        places = torch.empty(len(types), dtype=torch.int64)
        places[types == SpanToken.image] = (
            number * cells + nth // own_columns * (columns // tile) + nth % own_columns
        )
        for order, kind in enumerate(_DELIMITERS):
            places[types == kind] = len(shapes) * cells + order
        index[image.row, placed.start : placed.end] = places
    return ImageInputs(patches.flatten(1, 2), present.flatten(1, 2), (rows, columns), index)


def _patches(pixels: Tensor, patch: int) -> Tensor:
    """uint8 [h, w, 3] -> bf16 [h/P, w/P, 3·P·P] in order of channel, row, column (spec §9.1 steps 8 and 9)."""
    scaled = ((pixels.permute(2, 0, 1).float() / 255 - 0.5) / 0.5).to(torch.bfloat16)
    return scaled.unfold(1, patch, patch).unfold(2, patch, patch).permute(1, 2, 0, 3, 4).flatten(2)


class VisionTower(nn.Module):
    """Patches to normed features bf16 [N, G·G', Mᵥ]."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.vision = vision
        self.patch_embed = PatchEmbedding(vision)
        self.blocks = nn.ModuleList(VisionBlock(vision) for _ in range(vision.num_hidden_layers))
        self.norm = Norm(vision.hidden_size)

    def forward(self, images: ImageInputs) -> Tensor:
        """Padded patches hold nothing of use in the result."""
        x = affine(images.patches, self.patch_embed.proj)
        rope = _rope_2d(*images.grid, self.vision, x.device)
        for block in self.blocks:
            x = block(x, rope, images.present)
        return plain_rms_norm(x, self.norm.weight, _NORM_EPS)


class PatchEmbedding(nn.Module):
    """One linear from pixels."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.proj = Matrix(vision.hidden_size, 3 * vision.patch_size**2, bias=True)


class VisionAttention(nn.Module):
    """The matrices of one attention."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        width = vision.hidden_size
        self.wqkv = Matrix(3 * width, width, bias=True)
        self.wo = Matrix(width, width, gain=_OUTPUT_GAIN, bias=True)


class VisionMlp(nn.Module):
    """The matrices of one gated unit; w1 holds the gate's rows, then the others."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.w1 = Matrix(2 * vision.intermediate_size, vision.hidden_size)
        self.w2 = Matrix(vision.hidden_size, vision.intermediate_size, gain=_OUTPUT_GAIN)


class VisionBlock(nn.Module):
    """One pre-norm block with bidirectional attention and 2-D rotary positions."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.heads = vision.num_attention_heads
        self.norm1, self.norm2 = Norm(vision.hidden_size), Norm(vision.hidden_size)
        self.attn, self.mlp = VisionAttention(vision), VisionMlp(vision)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], present: Tensor) -> Tensor:
        """x bf16 [N, P, Mᵥ] -> the same shape."""
        x = x + self._attend(plain_rms_norm(x, self.norm1.weight, _NORM_EPS), rope, present)
        gate, up = affine(plain_rms_norm(x, self.norm2.weight, _NORM_EPS), self.mlp.w1).chunk(2, -1)
        activated = torch.nn.functional.silu(gate.float()).to(torch.bfloat16) * up
        return x + affine(activated, self.mlp.w2)

    def _attend(self, x: Tensor, rope: tuple[Tensor, Tensor], present: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in affine(x, self.attn.wqkv).chunk(3, -1)
        )  # (N, H, P, Dᵥ)
        query, key = _rotate_halves(query, *rope), _rotate_halves(key, *rope)
        # float32: small enough not to matter, and nearer to the engine.
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), attn_mask=present[:, None, None]
        )
        return affine(mixed.to(torch.bfloat16).transpose(1, 2).flatten(2), self.attn.wo)


class Aligner(nn.Module):
    """Tiles of features to rows of the model's width."""

    def __init__(self, config: ModelConfig, vision: VisionConfig) -> None:
        super().__init__()
        self.tile = vision.downsample_ratio
        self.w1 = Matrix(config.hidden_size, self.tile**2 * vision.hidden_size, bias=True)
        self.w2 = Matrix(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, features: Tensor, images: ImageInputs) -> Tensor:
        """features bf16 [N, G·G', Mᵥ] -> bf16 [N·cells, M], row-major within an image."""
        kept = features.masked_fill(~images.present[..., None], 0).unflatten(1, images.grid)
        tiles = kept.unfold(1, self.tile, self.tile).unfold(2, self.tile, self.tile)  # (N, g, g', Mᵥ, t, t)
        hidden = affine(tiles.flatten(3).flatten(0, 2), self.w1)
        return affine(torch.nn.functional.gelu(hidden.float()).to(torch.bfloat16), self.w2)


def affine(x: Tensor, matrix: Matrix) -> Tensor:
    """x bf16 [..., in] -> bf16 [..., out], summed in float32, bias included."""
    bias = None if matrix.bias is None else matrix.bias.to(torch.bfloat16)
    if x.device.type != "cpu":
        return torch.nn.functional.linear(x, matrix.bf16, bias)
    wide_bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), matrix.bf16.float(), wide_bias).to(torch.bfloat16)


def _rope_2d(height: int, width: int, vision: VisionConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin float32 [height·width, Dᵥ/2]: row angles, then column angles."""
    half = vision.head_dim // 2
    exponent = torch.arange(0, half, 2, dtype=torch.float32, device=device) / half
    frequencies = 1.0 / (vision.rope_theta**exponent)
    rows = torch.arange(height, device=device).repeat_interleave(width)
    columns = torch.arange(width, device=device).repeat(height)
    angle = torch.cat((torch.outer(rows.float(), frequencies), torch.outer(columns.float(), frequencies)), -1)
    return angle.cos(), angle.sin()


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


__all__ = ["Aligner", "ImageInputs", "VisionTower", "image_inputs"]
