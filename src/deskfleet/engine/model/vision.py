"""The vision tower and aligner (spec §9.3, §9.4) and the embeddings of one image span (§9.2).

Owns patches to rows. Runs on rank 0 alone; the embeddings are broadcast, so that every rank continues from the
same bits. Knows nothing of files or resizing (engine/images.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deskfleet.engine import ops
from deskfleet.engine.weights import ShardReader
from deskfleet.model.config import VisionConfig
from deskfleet.model.vision import SpanToken

_NORM_EPS = 1e-6


class VisionTower:
    """ViT and aligner. All weights BF16; linears sum in float64 and round once, bias included."""

    def __init__(self, config: VisionConfig, reader: ShardReader) -> None:
        self.config = config
        self.patch_weight = reader.matrix("vision.patch_embed.proj.weight")  # (Mᵥ, 3·14·14)
        self.patch_bias = reader.matrix("vision.patch_embed.proj.bias")
        self.blocks = [
            VisionBlock(config, f"vision.blocks.{b}", reader) for b in range(config.num_hidden_layers)
        ]
        self.norm = reader.f32("vision.norm.weight")
        self.aligner = [
            (reader.matrix(f"aligner.{n}.weight"), reader.matrix(f"aligner.{n}.bias")) for n in ("w1", "w2")
        ]
        self.delimiters = {
            SpanToken.start: reader.bf16("image_start"),
            SpanToken.newline: reader.bf16("image_newline"),
            SpanToken.end: reader.bf16("image_end"),
        }

    def encode(self, patches: Tensor, height: int, width: int) -> Tensor:
        """patches bf16 [height·width, 3, P, P] row-major -> aligner rows bf16 [⌈height/3⌉·⌈width/3⌉, M]."""
        x = _affine(patches.flatten(1), self.patch_weight, self.patch_bias)
        rope = _rope_2d(height, width, self.config)
        for block in self.blocks:
            x = block(x, rope)
        return self._align(ops.rms_norm(x, self.norm, _NORM_EPS), height, width)

    def span(self, patches: Tensor, height: int, width: int, token_types: tuple[int, ...]) -> Tensor:
        """Embeddings bf16 [n, M] of a whole span: delimiters and image rows in order of `token_types`."""
        rows = self.encode(patches, height, width)
        types = torch.tensor(token_types)
        span = torch.empty(len(types), rows.shape[1], dtype=torch.bfloat16)
        span[types == SpanToken.image] = rows
        for kind, delimiter in self.delimiters.items():
            span[types == kind] = delimiter
        return span

    def _align(self, x: Tensor, height: int, width: int) -> Tensor:
        tile = self.config.downsample_ratio
        grid = x.view(height, width, -1).permute(2, 0, 1)  # (Mᵥ, h, w)
        grid = torch.nn.functional.pad(grid, (0, -width % tile, 0, -height % tile))
        tiles = grid.unfold(1, tile, tile).unfold(2, tile, tile)  # (Mᵥ, h', w', tile, tile)
        features = tiles.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)  # channel-major features
        hidden = _affine(features, *self.aligner[0])
        hidden = torch.nn.functional.gelu(hidden.to(torch.float64)).to(torch.bfloat16)
        return _affine(hidden, *self.aligner[1])


class VisionBlock:
    """One pre-norm ViT block with bidirectional attention and 2-D rotary positions."""

    def __init__(self, config: VisionConfig, prefix: str, reader: ShardReader) -> None:
        self.num_heads = config.num_attention_heads
        self.norm1 = reader.f32(f"{prefix}.norm1.weight")
        self.norm2 = reader.f32(f"{prefix}.norm2.weight")
        self.wqkv, self.wqkv_bias = (
            reader.matrix(f"{prefix}.attn.wqkv.weight"),
            reader.matrix(f"{prefix}.attn.wqkv.bias"),
        )
        self.wo, self.wo_bias = (
            reader.matrix(f"{prefix}.attn.wo.weight"),
            reader.matrix(f"{prefix}.attn.wo.bias"),
        )
        self.w1 = reader.matrix(f"{prefix}.mlp.w1.weight")  # gate rows, then up rows
        self.w2 = reader.matrix(f"{prefix}.mlp.w2.weight")

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x bf16 [R, Mᵥ] -> the same shape."""
        x = x + self._attend(ops.rms_norm(x, self.norm1, _NORM_EPS), rope)
        gate, up = ops.linear(ops.rms_norm(x, self.norm2, _NORM_EPS), self.w1).chunk(2, -1)
        wide = gate.to(torch.float64)
        activated = (wide * torch.sigmoid(wide)).to(torch.bfloat16) * up
        return x + ops.linear(activated, self.w2)

    def _attend(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        projected = _affine(x, self.wqkv, self.wqkv_bias)
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(0, 1) for part in projected.chunk(3, -1)
        )  # (H, R, Dᵥ)
        query, key = _rotate_halves(query, *rope), _rotate_halves(key, *rope)
        scores = query.to(torch.float64) @ key.to(torch.float64).transpose(1, 2) * query.shape[-1] ** -0.5
        mixed = torch.softmax(scores, -1) @ value.to(torch.float64)
        attended = mixed.to(torch.bfloat16).transpose(0, 1).flatten(1)
        return _affine(attended, self.wo, self.wo_bias)


def normalise_pixels(pixels: Tensor, patch_size: int) -> Tensor:
    """uint8 [h, w, 3] -> patches bf16 [h/P · w/P, 3, P, P], row-major (spec §9.1 steps 8 and 9)."""
    scaled = (pixels.permute(2, 0, 1).to(torch.float32) / 255 - 0.5) / 0.5
    tiles = scaled.to(torch.bfloat16).unfold(1, patch_size, patch_size).unfold(2, patch_size, patch_size)
    return tiles.permute(1, 2, 0, 3, 4).flatten(0, 1).contiguous()


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (ops.linear_partial(x, weight) + bias).to(torch.bfloat16)


def _rope_2d(height: int, width: int, config: VisionConfig) -> tuple[Tensor, Tensor]:
    """cos and sin float32 [height·width, Dᵥ/2]: row angles, then column angles."""
    half = config.head_dim // 2
    exponent = torch.arange(0, half, 2, dtype=torch.float32) / half
    frequencies = 1.0 / (config.rope_theta**exponent)  # (Dᵥ/4,)
    rows = torch.arange(height).repeat_interleave(width)
    columns = torch.arange(width).repeat(height)
    angle = torch.cat((torch.outer(rows.float(), frequencies), torch.outer(columns.float(), frequencies)), -1)
    return angle.cos(), angle.sin()


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.float32).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


__all__ = ["VisionTower", "normalise_pixels"]
