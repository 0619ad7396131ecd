"""Compressed KV and index keys of a source layer (spec §4.4, §4.5 for the keys).

Owns pooling, the two derived rows and their cache writes. A group is pooled when its last token arrives;
until then its members wait in the slot's open-group state. Knows nothing of who reads the entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deskfleet.engine import ops
from deskfleet.engine.model.step import Step
from deskfleet.engine.ops.rope import RopeTable
from deskfleet.engine.weights import ShardReader
from deskfleet.model.config import ModelConfig
from deskfleet.model.layers import LayerPlan


class Compressor:
    """Pools `ratio` consecutive tokens into one entry."""

    def __init__(self, config: ModelConfig, layer: LayerPlan, reader: ShardReader) -> None:
        prefix = f"{layer.prefix}.attn"
        self.config = config
        self.layer = layer
        self.ratio = layer.compress_ratio
        self.wkv = reader.matrix(f"{prefix}.compressor.wkv.weight")
        self.wgate = reader.matrix(f"{prefix}.compressor.wgate.weight") if self.ratio > 1 else None
        self.norm = reader.f32(f"{prefix}.compressor.norm.weight")
        self.wk = reader.matrix(f"{prefix}.indexer.wk.weight")
        self.k_norm = reader.f32(f"{prefix}.indexer.k_norm.weight")

    def __call__(self, x: Tensor, step: Step) -> None:
        """x bf16 [T, M]: write the entries and index keys that this step completes."""
        index = step.batch.compression[self.ratio]
        latent = self.latents(x, step)
        rope = step.entry_rope[self.ratio]
        source = self.layer.index
        keys = self.index_keys(latent, rope)
        entries = ops.ENTRY.pack(ops.apply_rope(latent, *rope))
        ops.write_rows(step.cache.index_keys[source], index.entry_pages, keys, index.own)
        ops.write_rows(step.cache.entries[source], index.entry_pages, entries, index.own)
        step.record(f"{self.layer.prefix}.latent", latent)
        step.record(f"{self.layer.prefix}.index_k", keys)
        step.record(f"{self.layer.prefix}.entries", entries)

    def latents(self, x: Tensor, step: Step) -> Tensor:
        """Latents bf16 [N, D] of the groups completed by this step; updates the open-group state."""
        eps = self.config.rms_norm_eps
        index, source = step.batch.compression[self.ratio], self.layer.index
        if self.wgate is None:  # every row is a group; those replayed have their entry already
            return ops.rms_norm(ops.linear(x[index.members[:, 0]], self.wkv), self.norm, eps)
        pooled_inputs = []
        for weight, state in (
            (self.wkv, step.cache.open_values[source]),
            (self.wgate, step.cache.open_gates[source]),
        ):
            rows = ops.linear_f32(x, weight)
            pooled_inputs.append(torch.cat((state[index.open_rows], rows))[index.members])
            ops.write_rows(state, index.open_write_state, rows, index.open_write_rows)
        return ops.rms_norm(ops.compress_pairs(*pooled_inputs), self.norm, eps)

    def index_keys(self, latent: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Index key records [N, bytes] of unrotated latents: the key comes from the latent before its rotation."""
        key = ops.rms_norm(ops.linear(latent, self.wk), self.k_norm, self.config.rms_norm_eps)
        return ops.INDEX_KEY.pack(ops.apply_rope(key, *rope))


def yarn_table(config: ModelConfig) -> RopeTable:
    """The rotary table of every layer with compressed KV."""
    scaling = config.rope_scaling
    return RopeTable.yarn(
        config.qk_rope_head_dim,
        config.compress_rope_theta,
        factor=scaling.factor,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        original_max_position=scaling.original_max_position_embeddings,
    )


__all__ = ["Compressor", "yarn_table"]
