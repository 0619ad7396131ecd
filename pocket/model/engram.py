"""Engram on packed rows (spec §7): n-gram hashes as tensors, looked-up rows, the gate.

Owns the tables as parameters. Geometry and the token map are those of deskfleet_engram.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deskfleet.model.config import ModelConfig
from deskfleet_engram.geometry import EngramGeometry
from deskfleet_engram.hashing import DEAD
from pocket.model.numerics import gather_rows, pointwise, product
from pocket.model.parts import Matrix, Table
from pocket.model.rows import Rows

_ROW_SPREAD = 0.1


class Hashes(nn.Module):
    """Row ids of every token for all Engram layers; knows the token map."""

    token_map: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def __init__(self, geometry: EngramGeometry, token_map: Tensor, pad_token_id: int) -> None:
        """`token_map` int64 [V]: the compressed id of each token (spec §7.1)."""
        super().__init__()
        self.geometry = geometry
        self.pad_token_id = pad_token_id
        for name, value in (
            ("token_map", token_map),
            ("multipliers", torch.tensor(geometry.multipliers.tolist())),
            ("primes", torch.tensor(geometry.primes.tolist())),
            ("offsets", torch.tensor(geometry.offsets.tolist())),
        ):
            self.register_buffer(name, value, persistent=False)

    def forward(self, token_ids: Tensor, positions: Tensor, image_mask: Tensor) -> Tensor:
        """token_ids, positions int64 [B, L], image_mask bool [B, L] -> row ids int64 [B, L, Engram layers, columns].

        An n-gram ends at its document's start, and at the first image token it meets looking back.
        """
        pad = self.token_map[self.pad_token_id]
        compressed = torch.where(image_mask, DEAD, self.token_map[token_ids])
        blocked = torch.zeros_like(image_mask)
        mixed = torch.zeros_like(token_ids)[..., None]
        columns = []
        for lookback in range(self.geometry.spec.max_ngram_size):
            source = compressed.roll(lookback, 1)
            blocked = blocked | (positions < lookback) | (source == DEAD)
            slot = torch.where(blocked, pad, source)
            mixed = mixed ^ (slot[..., None] * self.multipliers[:, lookback])  # (B, L, layers)
            if lookback:
                columns.append(mixed[..., None] % self.primes[:, lookback - 1])  # (B, L, layers, heads)
        return torch.cat(columns, -1) + self.offsets


class Engram(nn.Module):
    """Adds a gated n-gram row lookup to the stream before a block."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        """`number` counts the Engram layers."""
        super().__init__()
        self.config, self.number = config, number
        copies, hidden = config.hc_mult, config.hidden_size
        self.embed = Table(config.engram_num_embeddings[number], config.engram_head_dim, _ROW_SPREAD)
        self.wkv = Matrix((copies + 1) * hidden, config.engram_width)
        self.q_weight = nn.Parameter(torch.empty(copies, hidden))
        self.k_weight = nn.Parameter(torch.empty(copies, hidden))

    def reset(self, generator: torch.Generator) -> None:
        """Gate weights start at one."""
        with torch.no_grad():
            self.q_weight.fill_(1.0)
            self.k_weight.fill_(1.0)

    def forward(self, stream: Tensor, row_ids: Tensor, rows: Rows) -> Tensor:
        """stream bf16 [T, C, M], row_ids int64 [B, L, Engram layers, columns] -> the stream with values added."""
        ids = row_ids[:, :, self.number].flatten(0, 1)  # (T, columns)
        numerics = rows.numerics
        looked_up = gather_rows(numerics.engram_rows(self.embed.weight), ids).flatten(1)
        projected = product(looked_up, numerics.fp8_weight(self.wkv.weight))
        copies, width = stream.shape[1:]
        key, value = projected.split((copies * width, width), -1)
        q_weight, k_weight = (weight.to(torch.bfloat16).float() for weight in (self.q_weight, self.k_weight))
        return _gate(
            stream,
            key.unflatten(-1, (copies, width)),
            value,
            q_weight * k_weight,
            ~rows.image_mask,
            self.config.rms_norm_eps,
        )


@pointwise
def _gate(stream: Tensor, key: Tensor, value: Tensor, weight: Tensor, alive: Tensor, eps: float) -> Tensor:
    wide, wide_key = stream.float(), key.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(wide_key.square().mean(-1) + eps)
    dot = (wide * weight * wide_key).sum(-1) * rstd * stream.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot)) * alive[:, None]
    return (wide + gate[..., None] * value.float()[:, None]).to(torch.bfloat16)


__all__ = ["Engram", "Hashes"]
