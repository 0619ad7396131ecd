"""What the layers of one training forward share: where documents begin, rotary rows, picks, and what is learnt aside.

Owns the rule that nothing reaches across documents: a row sees a run of positions, from the start of its document,
and a run of compressed entries. Knows nothing of weights. The engine's counterpart is `engine/model/step.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deskfleet.engine.ops.rope import RopeTable
from deskfleet.model.config import ModelConfig
from pocket.model.numerics import Numerics

Rotary = tuple[Tensor, Tensor]
"""cos and sin float32 [T, P]."""


class RopeTables:
    """Both rotary variants of a configuration, on one device."""

    def __init__(self, config: ModelConfig) -> None:
        scaling = config.rope_scaling
        local = RopeTable.local(config.qk_rope_head_dim, config.rope_theta)
        yarn = RopeTable.yarn(
            config.qk_rope_head_dim,
            config.compress_rope_theta,
            factor=scaling.factor,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
            original_max_position=scaling.original_max_position_embeddings,
        )
        self._frequencies = {False: local.frequencies, True: yarn.frequencies}

    def rows(self, positions: Tensor, *, yarn: bool) -> Rotary:
        """cos and sin of int64 positions [...], flattened."""
        self._frequencies[yarn] = self._frequencies[yarn].to(positions.device)
        return RopeTable(self._frequencies[yarn]).rows(positions.flatten())


@dataclass
class Rows:
    """One forward pass over B rows of L tokens; T = B·L.

    starts         int64 [B, L]: index of each token's document start in its row
    rope           [uses_yarn]: cos and sin of every token; entry_rope [ratio] of every compressed entry
    window_mask    bool [B, L, 2·W]: which of its block and the block before a token's window shows
    sampled        int64 [B, S]: tokens whose attention the indexers imitate; None when nothing is learnt from it
    attend_all     every visible entry is attended, whatever the indexers say (for the first part of training)
    entries, keys  [KV source]: bf16 [B, N, D] and [B, N, Dᵢ]
    picks          [index source]: int64 [B, L, K] entries of its row, -1 absent
    gathered       [index source]: bf16 [B, L, K, D]
    candidates     bool [B, L, blocks], from the candidate source on
    index_scores, masses  [index source]: float32 [B, S, N]
    loads          per MoE layer: float32 [2, E], text and image tokens that chose each expert
    balance        per MoE layer: the sequence balance loss
    """

    config: ModelConfig
    numerics: Numerics
    positions: Tensor
    image_mask: Tensor
    valid: Tensor
    rope: dict[bool, Rotary]
    entry_rope: dict[int, Rotary]
    window_mask: Tensor
    sampled: Tensor | None
    attend_all: bool
    entries: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    picks: dict[int, Tensor] = field(default_factory=dict)
    gathered: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None
    index_scores: dict[int, Tensor] = field(default_factory=dict)
    masses: dict[int, Tensor] = field(default_factory=dict)
    loads: list[Tensor] = field(default_factory=list)
    balance: list[Tensor] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        config: ModelConfig,
        numerics: Numerics,
        tables: RopeTables,
        *,
        doc_ids: Tensor,
        positions: Tensor,
        image_mask: Tensor,
        sampled: Tensor | None = None,
        attend_all: bool = False,
    ) -> Rows:
        """doc_ids int64 [B, L], -1 in padding; positions int64 [B, L]; image_mask bool [B, L]."""
        ratios = sorted({ratio for ratio in config.compress_ratios if ratio})
        return cls(
            config=config,
            numerics=numerics,
            positions=positions,
            image_mask=image_mask.flatten(),
            valid=(doc_ids >= 0).flatten(),
            rope={yarn: tables.rows(positions, yarn=yarn) for yarn in (False, True)},
            entry_rope={ratio: tables.rows(positions[:, ::ratio], yarn=True) for ratio in ratios},
            window_mask=_window_mask(positions, config.sliding_window),
            sampled=sampled,
            attend_all=attend_all,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """B and L."""
        return self.positions.shape[0], self.positions.shape[1]

    def visible(self, ratio: int, tokens: Tensor | None = None) -> Tensor:
        """bool [B, L, N], or [B, S, N] of sampled tokens: the entries of a token's document whose group is complete."""
        first, end = self.visible_range(ratio)
        if tokens is not None:
            first, end = first.gather(1, tokens), end.gather(1, tokens)
        number = torch.arange(self.shape[1] // ratio, device=first.device)
        return (number >= first[..., None]) & (number < end[..., None])

    def visible_range(self, ratio: int) -> tuple[Tensor, Tensor]:
        """First visible entry and the one after the last, int64 [B, L]."""
        index = torch.arange(self.shape[1], device=self.positions.device)
        return (index - self.positions) // ratio, ((index + 1) // ratio).expand(self.shape)


def _window_mask(positions: Tensor, size: int) -> Tensor:
    """bool [B, L, 2·W]: key k of a token's block and the one before it lies in its window and its document."""
    length = positions.shape[1]
    index = torch.arange(length, device=positions.device)
    key = (index // size - 1)[:, None] * size + torch.arange(2 * size, device=positions.device)  # (L, 2·W)
    back = index[:, None] - key
    return (back >= 0) & (back < size) & (back <= positions[..., None])


__all__ = ["RopeTables", "Rotary", "Rows"]
