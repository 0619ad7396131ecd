"""Attention of one layer on packed rows (spec §4.2, §4.3, §4.7): queries, window, the core, the grouped output.

Backbone layers and draft stages share everything but which keys they see. Compressed entries come from
compressor.py, picks from indexer.py. The window is computed in bands of its own size; picked entries are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deskfleet.model.config import LayerPlan, ModelConfig
from pocket.model.compressor import Compressor
from pocket.model.indexer import Indexer, add_mass
from pocket.model.numerics import Numerics, batched_product, gather_rows, pointwise, product, rms_norm, rotate
from pocket.model.parts import Matrix, Norm
from pocket.model.rows import Rotary, Rows

_FIRST_SINK = 1.0
_OUTPUT_GAIN = 0.2  # what writes into the stream is small against it at first


@dataclass(frozen=True)
class Weighed:
    """A core's output bf16 [B, L, H, D], and what its softmax was taken against: float32 [B, L, H] each."""

    output: Tensor
    maximum: Tensor
    denominator: Tensor


class Attention(nn.Module):
    """Multi-query attention over one shared latent that is both key and value."""

    def __init__(self, config: ModelConfig, layer: LayerPlan) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        hidden, heads, size = config.hidden_size, config.num_attention_heads, config.head_dim
        self.scale = size**-0.5
        self.wq_a = Matrix(config.q_lora_rank, hidden)
        self.q_norm = Norm(config.q_lora_rank)
        self.wq_b = Matrix(heads * size, config.q_lora_rank)
        self.wkv = Matrix(size, hidden)
        self.kv_norm = Norm(size)
        self.attn_sink = nn.Parameter(torch.empty(heads))
        self.wo_a = Matrix(config.o_groups * config.o_lora_rank, config.heads_per_group * size)
        self.wo_b = Matrix(hidden, config.o_groups * config.o_lora_rank, gain=_OUTPUT_GAIN)
        self.compressor = Compressor(config, layer) if layer.is_kv_source else None
        self.indexer = Indexer(config, layer) if layer.is_index_source else None

    def reset(self, generator: torch.Generator) -> None:
        """Start with sinks that weigh as much as a few keys, so that training has a use for them."""
        with torch.no_grad():
            self.attn_sink.fill_(_FIRST_SINK)

    def queries(self, x: Tensor, rope: Rotary, numerics: Numerics) -> tuple[Tensor, Tensor]:
        """x bf16 [T, M] as a linear sees it -> rotated queries [T, H, D], and the low-rank query likewise [T, Q]."""
        low_rank = rms_norm(
            product(x, numerics.fp8_weight(self.wq_a.weight)), self.q_norm.weight, self.config.rms_norm_eps
        )
        low_rank = numerics.activation(low_rank)
        query = product(low_rank, numerics.fp8_weight(self.wq_b.weight))
        return rotate(query.unflatten(-1, (-1, self.config.head_dim)), *rope), low_rank

    def window_rows(self, x: Tensor, rope: Rotary, numerics: Numerics) -> Tensor:
        """Keys/values bf16 [T, D] of x bf16 [T, M] as a linear sees it."""
        latent = product(x, numerics.fp8_weight(self.wkv.weight))
        latent = rms_norm(latent, self.kv_norm.weight, self.config.rms_norm_eps)
        return numerics.activation(rotate(latent, *rope))

    def project(self, attended: Tensor, rope: Rotary, numerics: Numerics) -> Tensor:
        """What was attended bf16 [T, H, D] -> bf16 [T, M]."""
        cos, sin = rope
        groups = self.config.o_groups
        unrotated = rotate(attended, cos, -sin).flatten(1).unflatten(1, (groups, -1))  # (T, G, H/G·D)
        wo_a = numerics.fp8_weight(self.wo_a.weight).unflatten(0, (groups, -1))  # (G, R, H/G·D)
        low_rank = batched_product(unrotated.transpose(0, 1), wo_a.transpose(1, 2)).transpose(0, 1).flatten(1)
        return product(numerics.activation(low_rank), numerics.fp8_weight(self.wo_b.weight))

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Backbone attention of x bf16 [T, M] -> bf16 [T, M]."""
        numerics, layer = rows.numerics, self.layer
        rope = rows.rope[layer.uses_yarn]
        seen = numerics.activation(x)
        window = self.window_rows(seen, rope, numerics).unflatten(0, rows.shape)
        query, low_rank = self.queries(seen, rope, numerics)
        query = query.unflatten(0, rows.shape)
        if self.compressor is not None:
            latent = self.compressor(x, rows)
            assert self.indexer is not None
            self.indexer.publish_keys(latent, rows)
        if self.indexer is not None:
            self.indexer(x, low_rank, rows)
        weighed = self._core(query, window, rows)
        if rows.sampled is not None and layer.index_source is not None:
            add_mass(layer, query, weighed.maximum, weighed.denominator, self.scale, rows)
        return self.project(weighed.output.flatten(0, 1), rope, numerics)

    def _core(self, query: Tensor, window: Tensor, rows: Rows) -> Weighed:
        layer, numerics = self.layer, rows.numerics
        near = _band(window, self.config.sliding_window)
        far = mask = None
        if layer.index_source is not None and layer.kv_source is not None:
            entries = rows.entries[layer.kv_source]
            if rows.attend_all:
                far, mask = entries, rows.visible(layer.compress_ratio)
            else:
                picks = rows.picks[layer.index_source]
                if layer.index_source not in rows.gathered:
                    rows.gathered[layer.index_source] = _gather_entries(entries, picks)
                far, mask = rows.gathered[layer.index_source], picks >= 0
        return attend(query, near, rows.window_mask, far, mask, self.attn_sink, self.scale, numerics)


def attend(
    query: Tensor,
    near: Tensor,
    near_mask: Tensor,
    far: Tensor | None,
    far_mask: Tensor | None,
    sink: Tensor,
    scale: float,
    numerics: Numerics,
) -> Weighed:
    """Softmax over two kinds of keys and a sink (spec §N.5).

    query bf16 [B, L, H, D]; near bf16 [G, n, D], shared by the L·B/G tokens of a run, with near_mask bool [B, L, n];
    far bf16 [B, L, K, D] of each token, or [B, K, D] of each row, with far_mask bool [B, L, K].
    """
    rows, length, heads, size = query.shape
    wide = numerics.wide(query)
    pools = [(numerics.wide(near), near_mask)]
    if far is not None and far_mask is not None:
        pools.append((numerics.wide(far.flatten(0, -3)), far_mask))
    scores, masks = [], []
    for keys, mask in pools:
        grouped = wide.reshape(len(keys), -1, size)
        scores.append(batched_product(grouped, keys.transpose(1, 2)).view(rows, length, heads, -1))
        masks.append(mask[:, :, None])
    weights, maximum, denominator = _weigh(torch.cat(scores, -1), torch.cat(masks, -1), sink, scale)
    total = torch.zeros((), device=query.device)
    for (keys, _), part in zip(pools, weights.split([score.shape[-1] for score in scores], -1), strict=True):
        mixed = batched_product(numerics.wide(part).reshape(len(keys), -1, part.shape[-1]), keys)
        total = total + mixed.view(rows, length, heads, size).float()
    return Weighed((total / denominator[..., None]).to(torch.bfloat16), maximum, denominator)


@pointwise
def _weigh(scores: Tensor, mask: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B, L, H, n], mask bool [B, L, 1, n] -> weights bf16, their maximum score and their sum [B, L, H].

    Weights are rounded before they meet the values, the denominator sums them unrounded, as the engine does.
    """
    wide = (scores.float() * scale).masked_fill(~mask, -torch.inf)
    maximum = wide.detach().amax(-1).clamp_min(-1e30)
    weights = torch.exp(wide - maximum[..., None])
    denominator = weights.sum(-1) + torch.exp(sink - maximum)
    return weights.to(torch.bfloat16), maximum, denominator


def _band(rows: Tensor, size: int) -> Tensor:
    """Window rows [B, L, D] -> [B·L/W, 2·W, D]: each block of W with the block before it."""
    blocks = rows.unflatten(1, (-1, size))
    before = torch.nn.functional.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :-1]
    return torch.cat((before, blocks), 2).flatten(0, 1)


def _gather_entries(entries: Tensor, picks: Tensor) -> Tensor:
    """entries bf16 [B, N, D] at picks int64 [B, L, K] -> [B, L, K, D]; absent ones read some row."""
    count = entries.shape[1]
    offset = torch.arange(len(entries), device=picks.device)[:, None, None] * count
    return gather_rows(entries.flatten(0, 1), picks.clamp_min(0) + offset)


__all__ = ["Attention", "Weighed", "attend"]
