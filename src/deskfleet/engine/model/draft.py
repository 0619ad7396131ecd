"""The DSpark drafter (spec §8): three window-only blocks over the backbone's taps, a Markov bias, a confidence.

Owns the draft windows (through the cache, by slot) and the chain of draft tokens. Verification is not here:
a proposal can only ever be accepted or refused by the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from deskfleet.engine import ops
from deskfleet.engine.batch import Batch
from deskfleet.engine.cache import PagedCache
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.model.attention import Attention
from deskfleet.engine.model.block import Block
from deskfleet.engine.model.step import Recorder
from deskfleet.engine.model.v41 import VocabularyShard, enter
from deskfleet.engine.ops.rope import RopeTable
from deskfleet.engine.tables import BlockTables
from deskfleet.engine.weights import ShardReader

Choose = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Anchor:
    """The newest token of one request: sampled, at `position`, not yet run. No window rows before `window_from`."""

    slot: int
    position: int
    token_id: int
    window_from: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of B requests: ids int64 [B, n], logits float32 [B, n, V] with the Markov bias, raw confidence [B, n]."""

    draft_token_ids: Tensor
    logits: Tensor
    confidence: Tensor


@dataclass(frozen=True, slots=True)
class DraftStep:
    """What the stages of one proposal share: B blocks of n rows.

    pages int64 [R] page rows before the blocks; context int64 [B·n, W] of them for each row, -1 absent; own_block int64
    [B·n, n] rows of the same block. Every row sees all of both: the block is bidirectional and nothing slides inside
    it.
    """

    rope: tuple[Tensor, Tensor]
    pages: Tensor
    context: Tensor
    own_block: Tensor
    cache: PagedCache
    recorder: Recorder | None

    def run(self, block: Block, stream: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        """One stage: stream bf16 [B·n, C, M], pre [B·n, C] -> the same after it."""
        if self.recorder is not None:
            self.recorder(f"{block.layer.prefix}.h_in", stream)
        return block.forward(stream, pre, partial(self._attend, block.attention), None, self.recorder)

    def _attend(self, attention: Attention, x: Tensor) -> Tensor:
        query, low_rank = attention.queries(x, self.rope)
        rows = ops.WINDOW.unpack(attention.window_records(x, self.rope))  # temporary: no page is theirs
        committed = ops.WINDOW.unpack_rows(self.cache.windows[attention.layer.index], self.pages)
        sources = [(committed, self.context), (rows, self.own_block)]
        output, attended = attention.core(query, sources, self.rope)
        if self.recorder is not None:
            prefix = attention.layer.prefix
            self.recorder(f"{prefix}.qr", low_rank)
            self.recorder(f"{prefix}.q_rot", query)
            self.recorder(f"{prefix}.window_rows", rows)
            self.recorder(f"{prefix}.sparse_out", attended)
            self.recorder(f"{prefix}.attn_out", output)
        return output


def argmax(place: int, logits: Tensor) -> Tensor:
    """The greedy choice at any place: float32 [B, V] -> int64 [B], ties to the lower id."""
    return logits.argmax(-1)


class DraftModel:
    """One rank's share of the draft stages. Shares the backbone's embedding and head."""

    def __init__(self, reader: ShardReader, comm: Communicator, vocabulary: VocabularyShard) -> None:
        config = reader.plan.config
        first, last = config.draft_layers[0].prefix, config.draft_layers[-1].prefix
        self.config = config
        self.vocabulary = vocabulary
        self.main_proj = reader.fp8(f"{first}.main_proj")
        self.main_norm = reader.f32(f"{first}.main_norm.weight")
        self.blocks = [Block(config, layer, reader, comm) for layer in config.draft_layers]
        self.norm = reader.f32(f"{last}.norm.weight")
        markov = f"{last}.markov_head"
        self.markov = VocabularyShard(config, reader, comm, f"{markov}.embed.weight", f"{markov}.head.weight")
        self.confidence = reader.matrix(f"{last}.confidence_head.proj.weight")
        self.rope = RopeTable.local(config.qk_rope_head_dim, config.rope_theta)

    def commit(self, taps: Tensor, batch: Batch, cache: PagedCache, recorder: Recorder | None = None) -> None:
        """Write the draft windows of every row of `batch` that has a page (taps bf16 [T, 3·M], spec §8.3).

        Rows of drafts that are refused later lie behind the last committed position; they are written again before any
        draft sees them.
        """
        rows, pages = batch.window.write_rows, batch.window.write_pages
        seen = taps[rows]
        main = ops.normed_linear(seen, self.main_proj, self.main_norm, self.config.rms_norm_eps)
        if recorder is not None:
            recorder("mtp.main_proj_out", ops.quantized_linear(seen, self.main_proj))
            recorder("mtp.main_x", main)
        rope = self.rope.rows(batch.positions[rows])
        own = torch.arange(len(rows))
        for block in self.blocks:
            keys = block.attention.window_records(
                main, rope
            )  # no attn_norm and no mixing on the context side
            ops.write_rows(cache.windows[block.layer.index], pages, keys, own)

    def propose(
        self,
        anchors: Sequence[Anchor],
        tables: BlockTables,
        cache: PagedCache,
        *,
        choose: Choose = argmax,
        recorder: Recorder | None = None,
    ) -> Proposal:
        """Draft a block after each of B anchors (§8.4); `choose` picks the token of place i from logits [B, V]."""
        length = self.config.dspark_block_size
        token_ids = torch.tensor([anchor.token_id for anchor in anchors])
        ids = torch.full((len(anchors), length), self.config.dspark_noise_token_id)
        ids[:, 0] = token_ids
        step = self.begin(anchors, tables, cache, recorder)
        stream, pre = enter(self.vocabulary.embed(ids.flatten()), self.config.hc_mult)
        for block in self.blocks:
            stream, pre = step.run(block, stream, pre)
        return self._decode_chain(ops.hc_collapse(stream, pre).unflatten(0, (-1, length)), token_ids, choose)

    def begin(
        self,
        anchors: Sequence[Anchor],
        tables: BlockTables,
        cache: PagedCache,
        recorder: Recorder | None = None,
    ) -> DraftStep:
        """Indices of one block per anchor."""
        length, size = self.config.dspark_block_size, self.config.sliding_window
        positions = np.array([a.position for a in anchors])[:, None] + np.arange(length)
        pages, context, offset = [], [], 0
        for anchor in anchors:
            seen = _last_positions(anchor.position, size, anchor.window_from)
            is_there = seen >= 0
            pages.append(tables.window_rows(anchor.slot, seen[is_there]))
            context.append(np.where(is_there, offset - 1 + np.cumsum(is_there), -1))
            offset += len(pages[-1])
        own_block = np.arange(positions.size).reshape(-1, length)
        return DraftStep(
            rope=self.rope.rows(torch.from_numpy(positions.reshape(-1))),
            pages=torch.from_numpy(np.concatenate(pages)),
            context=torch.from_numpy(np.repeat(context, length, 0)),
            own_block=torch.from_numpy(np.repeat(own_block, length, 0)),
            cache=cache,
            recorder=recorder,
        )

    def _decode_chain(self, x: Tensor, token_ids: Tensor, choose: Choose) -> Proposal:
        """x bf16 [B, n, M]: each position's logits take the bias of the token drafted before it."""
        base = self.vocabulary.logits(ops.rms_norm(x, self.norm, self.config.rms_norm_eps))
        previous, drafts, logits, embedded = token_ids, [], [], []
        for place, unbiased in enumerate(base.unbind(1)):
            embedded.append(self.markov.embed(previous))  # bf16 (B, markov rank)
            biased = self.markov.logits(embedded[-1]).add_(unbiased)
            previous = choose(place, biased)
            drafts.append(previous)
            logits.append(biased)
        joint = torch.cat((x, torch.stack(embedded, 1)), -1)
        confidence = ops.linear_f32(joint, self.confidence)[..., 0]
        return Proposal(torch.stack(drafts, 1), torch.stack(logits, 1), confidence)


def _last_positions(anchor: int, size: int, window_from: int) -> np.ndarray:
    """int64 [W]: the committed positions before `anchor` in the order of the publisher's ring (p mod W), -1 absent."""
    last = anchor - 1
    positions = last - (last - np.arange(size)) % size
    return np.where(positions >= max(window_from, 0), positions, -1)


__all__ = ["Anchor", "Choose", "DraftModel", "Proposal", "argmax"]
