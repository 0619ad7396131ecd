"""Which compressed entries a row attends to (spec §4.5, §4.6).

Owns index queries, scoring, top-k and the candidate restriction. An index source always ranks the keys of
its *own* KV source. The published reference, in single-token decode with an open group, ranks the keys of
whichever layer published last; that defect is not reproduced (spec §4.8, docs/decisions).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deskfleet.engine import ops
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.model.step import Step
from deskfleet.engine.weights import ShardReader
from deskfleet.model.config import ModelConfig
from deskfleet.model.layers import LayerPlan

_SCORES_PER_CHUNK = 1 << 22  # rows times entries ranked at a time; bounds the transient, changes no result


class Indexer:
    """Ranks the visible entries of one index source, with all heads on every rank."""

    def __init__(self, config: ModelConfig, layer: LayerPlan, reader: ShardReader) -> None:
        prefix = f"{layer.prefix}.attn.indexer"
        assert layer.kv_source is not None
        self.config = config
        self.layer = layer
        self.source = layer.kv_source
        self.wq_b = reader.fp8(f"{prefix}.wq_b")  # (Hᵢ * Dᵢ, Q)
        self.weights_proj = reader.matrix(f"{prefix}.weights_proj.weight")  # (Hᵢ, M)
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
        picks: list[Tensor] = []
        candidates: list[Tensor | None] = []
        for number in range(len(step.batch.segments)):
            rows = slice(step.batch.row_starts[number], step.batch.row_starts[number + 1])
            chosen, blocks = self._rank(number, query[rows], weights[rows], visible[rows], step)
            picks.append(chosen)
            candidates.append(blocks)
        if self.layer.is_candidate_source:
            step.candidates = candidates
        return _joined(picks)

    def _rank(
        self, number: int, query: Tensor, weights: Tensor, visible: Tensor, step: Step
    ) -> tuple[Tensor, Tensor | None]:
        """Picks int64 [n, L] of one segment and, at the candidate source, its candidate blocks int64 [n, K].

        None instead of blocks when all are candidates. A few rows at a time: scores of a long prefix must not decide
        how much memory a step takes.
        """
        count = int(visible[-1])  # the last row of a segment sees the most
        keys, numbers = step.index_keys(self.source, number, count)
        size = max(_SCORES_PER_CHUNK // max(count, 1), 1)
        picks, candidates, recorded = [], [], []
        narrows = self.layer.is_candidate_source and self._leaves_out(count, step)
        allowed = None
        if self.layer.uses_candidates and step.candidates is not None:
            allowed = step.candidates[number]
        block = self.config.candidate_block_size
        for start in range(0, len(query), size):
            rows = slice(start, start + size)
            among = None if allowed is None else allowed[rows]
            scores = ops.index_scores(
                query[rows], weights[rows], keys, numbers, visible[rows], among, block=block
            )
            if narrows:
                candidates.append(self._candidates(scores, numbers, visible[rows], step))
            picks.append(_best(scores, numbers, self.config.index_topk, step.dcp))
            if step.recorder is not None:
                recorded.append(scores)
        if recorded:
            step.record(f"{self.layer.prefix}.index_scores", torch.cat(recorded))
        return _joined(picks), _joined(candidates) if candidates else None

    def _candidates(self, scores: Tensor, numbers: Tensor, visible: Tensor, step: Step) -> Tensor:
        """Candidate blocks int64 [n, K]; a block's entries lie on one rank (limits.py sees to it)."""
        block = self.config.candidate_block_size
        block_numbers = numbers[::block] // block
        block_scores = ops.candidate_scores(scores, block_numbers, visible, block=block)
        return _best(block_scores, block_numbers, self.config.candidate_topk_blocks, step.dcp)

    def _takes_everything(self, visible: Tensor, step: Step) -> bool:
        """Whether no score can change the result, so that scoring may be skipped."""
        most = int(visible.max())
        if step.recorder is not None or most > self.config.index_topk:
            return False
        if self.layer.is_candidate_source:
            return not self._leaves_out(most, step)
        return not (self.layer.uses_candidates and step.candidates is not None)

    def _leaves_out(self, count: int, step: Step) -> bool:
        """Whether some of `count` entries may be no candidates; to a recorder all are shown."""
        blocks = -(-count // self.config.candidate_block_size)
        return step.recorder is not None or blocks > self.config.candidate_topk_blocks


def _best(scores: Tensor, numbers: Tensor, count: int, dcp: Communicator) -> Tensor:
    """The `count` best numbers int64 [n, count] of all ranks, ascending, -1 absent; ties go to the lower number.

    scores [n, m] of this rank's `numbers` int64 [m], ascending. Each rank's best hold what of it is among the best of
    all.
    """
    chosen = _padded(ops.top_positions(scores, count), count)
    if dcp.size == 1:  # which has all numbers, from 0 on
        return chosen
    absent = chosen < 0
    if len(numbers) == 0:
        best = chosen
    else:
        best = numbers[chosen.clamp_min(0)].masked_fill(absent, -1)
    # Finite on the way: what is sent between ranks is checked for that in the tests, and the order stays the same.
    limit = torch.finfo(torch.float32).max
    own = torch.full(chosen.shape, -limit)
    if len(numbers):
        own = scores.to(torch.float32).clamp(-limit, limit).gather(1, chosen.clamp_min(0))
    all_numbers, all_scores = torch.cat(dcp.all_gather(best), 1), torch.cat(dcp.all_gather(own), 1)
    order = all_numbers.argsort(dim=1)
    all_numbers, all_scores = all_numbers.gather(1, order), all_scores.gather(1, order)
    merged = _padded(ops.top_positions(all_scores.masked_fill(all_numbers < 0, -torch.inf), count), count)
    return all_numbers.gather(1, merged.clamp_min(0)).masked_fill(merged < 0, -1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _padded(chosen: Tensor, count: int) -> Tensor:
    missing = count - chosen.shape[1]
    return torch.nn.functional.pad(chosen, (0, missing), value=-1) if missing else chosen


__all__ = ["Indexer"]
