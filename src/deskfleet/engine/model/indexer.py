"""Which compressed entries a row attends to (spec §4.5, §4.6).

Owns index queries, scoring, top-k and the candidate restriction. An index source always ranks the keys of
its *own* KV source. The published reference, in single-token decode with an open group, ranks the keys of
whichever layer published last; that defect is not reproduced (spec §4.8, docs/decisions).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deskfleet.engine import ops
from deskfleet.engine.model.step import Step
from deskfleet.engine.weights import ShardReader
from deskfleet.model.config import ModelConfig
from deskfleet.model.layers import LayerPlan


class Indexer:
    """Ranks the visible entries of one index source. Replicated: every rank ranks with all heads."""

    def __init__(self, config: ModelConfig, layer: LayerPlan, reader: ShardReader) -> None:
        prefix = f"{layer.prefix}.attn.indexer"
        assert layer.kv_source is not None
        self.config = config
        self.layer = layer
        self.source = layer.kv_source
        self.wq_b = reader.fp8(f"{prefix}.wq_b")  # (Hᵢ * Dᵢ, Q)
        self.weights_proj = reader.wide(f"{prefix}.weights_proj.weight")  # (Hᵢ, M)
        self.weight_scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5

    def __call__(self, x: Tensor, low_rank: Tensor, step: Step) -> Tensor:
        """Picks int64 [T, L] of every row: entry numbers within its slot, ascending, -1 absent."""
        visible = step.batch.num_visible[self.layer.compress_ratio]
        if self._takes_everything(visible, step):
            step.candidates = None if self.layer.is_candidate_source else step.candidates
            everything = torch.arange(int(visible.max())).expand(len(visible), -1)
            return torch.where(everything < visible[:, None], everything, -1)
        query = ops.quantized_linear(low_rank, self.wq_b).unflatten(-1, (-1, self.config.index_head_dim))
        query = ops.fake_quant_fp4_e8m0(ops.apply_rope(query, *step.rope[self.layer.uses_yarn]))
        raw_weights = ops.linear(x, self.weights_proj)
        step.record(f"{self.layer.prefix}.index_weights_raw", raw_weights)
        weights = raw_weights * self.weight_scale
        picks, candidates = [], []
        for number, segment in enumerate(step.batch.segments):
            rows = slice(step.batch.row_starts[number], step.batch.row_starts[number + 1])
            count = int(visible[rows.stop - 1])  # the last row of a segment sees the most
            keys = step.cache.index_keys[self.source][segment.slot, :count]
            scores = ops.index_scores(query[rows], weights[rows], keys)
            hidden = torch.arange(count) >= visible[rows, None]
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.layer.is_candidate_source:
                candidates.append(self._candidates(scores, visible[rows]))
            if self.layer.uses_candidates and step.candidates is not None:
                scores = scores.masked_fill(~step.candidates[number], -torch.inf)
            step.record(f"{self.layer.prefix}.index_scores", scores)
            chosen = ops.top_positions(scores, self.config.index_topk)
            padding = self.config.index_topk - chosen.shape[1]
            picks.append(torch.nn.functional.pad(chosen, (0, padding), value=-1))
        if self.layer.is_candidate_source:
            step.candidates = candidates
        return torch.cat(picks)

    def _candidates(self, scores: Tensor, visible: Tensor) -> Tensor:
        return ops.candidate_mask(
            scores,
            visible,
            num_blocks=self.config.candidate_topk_blocks,
            block=self.config.candidate_block_size,
        )

    def _takes_everything(self, visible: Tensor, step: Step) -> bool:
        """Whether no score can change the result, so that scoring may be skipped."""
        most = int(visible.max())
        if step.recorder is not None or most > self.config.index_topk:
            return False
        blocks = -(-most // self.config.candidate_block_size)
        if self.layer.is_candidate_source:
            return blocks <= self.config.candidate_topk_blocks
        return not (self.layer.uses_candidates and step.candidates is not None)


__all__ = ["Indexer"]
