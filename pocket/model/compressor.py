"""Compressed entries of a KV source (spec §4.4). Owns pooling; knows nothing of who reads the entries."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deskfleet.model.config import LayerPlan, ModelConfig
from pocket.model.numerics import product, rms_norm, rotate, wide_product
from pocket.model.parts import Matrix, Norm
from pocket.model.rows import Rows


class Compressor(nn.Module):
    """Pools `ratio` consecutive tokens into one entry. Documents start at even places, so no group has two."""

    def __init__(self, config: ModelConfig, layer: LayerPlan) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.wkv = Matrix(config.head_dim, config.hidden_size)
        self.wgate = Matrix(config.head_dim, config.hidden_size) if layer.compress_ratio > 1 else None
        self.norm = Norm(config.head_dim)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """x bf16 [T, M]: leave the entries in `rows` and return their latents bf16 [B·N, D], not rotated."""
        ratio = self.layer.compress_ratio
        if self.wgate is None:
            pooled = product(x, self.wkv.bf16)
        else:
            values = wide_product(x, self.wkv.bf16).unflatten(0, (-1, ratio))
            gates = wide_product(x, self.wgate.bf16).unflatten(0, (-1, ratio))
            pooled = (torch.softmax(gates, 1) * values).sum(1).to(torch.bfloat16)
        latent = rms_norm(pooled, self.norm.weight, self.config.rms_norm_eps)
        entries = rows.numerics.entry(rotate(latent, *rows.entry_rope[ratio]))
        rows.entries[self.layer.index] = entries.unflatten(0, (rows.shape[0], -1))
        return latent


__all__ = ["Compressor"]
