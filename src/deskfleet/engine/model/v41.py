"""The whole V4.1 model of one rank (spec §5.3). Owns the order of things; the parts live beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deskfleet.engine import ops
from deskfleet.engine.batch import Batch
from deskfleet.engine.cache import PagedCache
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.model.block import Block
from deskfleet.engine.model.compressor import yarn_table
from deskfleet.engine.model.engram import Engram, Tables
from deskfleet.engine.model.step import Recorder, Step
from deskfleet.engine.ops.rope import RopeTable
from deskfleet.engine.weights import ShardReader
from deskfleet.model.config import ModelConfig
from deskfleet.model.packs import PackedTables


class VocabularyShard:
    """Vocabulary-parallel embedding and head: this rank's rows, padded at the end."""

    def __init__(
        self, config: ModelConfig, reader: ShardReader, comm: Communicator, embed: str, head: str
    ) -> None:
        self.comm = comm
        self.vocab_size = config.vocab_size
        held = reader.plan.vocab_range(reader.rank)
        self.start, self.stop = held.start, held.stop
        self.embedding = reader.bf16(embed)  # (V_local, M)
        self.head = reader.wide(head)  # (V_local, M)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> bf16 [..., M]; exactly one rank contributes to each row."""
        mine = (token_ids >= self.start) & (token_ids < self.stop)
        local = torch.where(mine, token_ids - self.start, 0)
        rows = torch.where(mine[..., None], self.embedding[local].to(torch.float32), 0.0)
        return self.comm.all_reduce(rows).to(torch.bfloat16)

    def logits(self, x: Tensor) -> Tensor:
        """bf16 [R, M] -> float32 [R, V], the same on every rank."""
        local = ops.linear_partial(x, self.head).to(torch.float32)
        return torch.cat(self.comm.all_gather(local), -1)[..., : self.vocab_size]


@dataclass(frozen=True, slots=True)
class BackboneOutput:
    """hidden bf16 [T, M]: collapsed stream before the final norm. taps bf16 [T, 3·M]: what the drafts see.

    Both of the rows of `batch`: the step's own, or its tail.
    """

    hidden: Tensor
    taps: Tensor
    batch: Batch


class V41Model:
    """One rank's share of the backbone."""

    def __init__(
        self, reader: ShardReader, comm: Communicator, dcp: Communicator, pack: PackedTables | None = None
    ) -> None:
        """Load this rank's share. `comm` are the ranks of the tensor-parallel group, `dcp` those of them that share out
        the global cache. Engram rows are read from `pack`, or from the published shards."""
        config = reader.plan.config
        self.config = config
        self.dcp = dcp
        self.vocabulary = VocabularyShard(config, reader, comm, "embed.weight", "head.weight")
        self.norm = reader.f32("norm.weight")
        self.blocks = [Block(config, layer, reader, comm) for layer in config.layers]
        self.tables = Tables.open(reader, pack)
        self.engrams = {
            layer.index: Engram(config, layer, reader, comm, self.tables)
            for layer in config.layers
            if layer.has_engram
        }
        self.rope = {
            True: yarn_table(config),
            False: RopeTable.local(config.qk_rope_head_dim, config.rope_theta),
        }

    def begin(self, batch: Batch, cache: PagedCache, recorder: Recorder | None = None) -> Step:
        """Open a step over `batch`: the disk starts on its Engram rows. Raises EngineError."""
        requests = {index: engram.request(batch.engram_ids) for index, engram in self.engrams.items()}
        tail = None
        if batch.tail is not None:
            tail = Step(
                batch.tail.batch, cache, self.dcp, self._rope_rows(batch.tail.batch), recorder=recorder
            )
        return Step(batch, cache, self.dcp, self._rope_rows(batch), requests, recorder=recorder, tail=tail)

    def _rope_rows(self, batch: Batch) -> dict[bool, tuple[Tensor, Tensor]]:
        return {yarn: table.rows(batch.positions) for yarn, table in self.rope.items()}

    def embed(self, batch: Batch) -> Tensor:
        """bf16 [T, M]: token rows, image spans overwritten by their embeddings."""
        x = self.vocabulary.embed(batch.token_ids)
        if batch.image_embeddings is not None:
            x[batch.image_mask] = batch.image_embeddings
        return x

    def forward(self, batch: Batch, cache: PagedCache, recorder: Recorder | None = None) -> BackboneOutput:
        """Run every layer over the rows of `batch`, filling `cache`."""
        step = self.begin(batch, cache, recorder)
        stream, pre = enter(self.embed(batch), self.config.hc_mult)
        taps = []
        for block in self.blocks:
            if block.layer.has_engram:
                stream = self.engrams[block.layer.index](stream, step)
            if block.layer.is_tap:
                taps.append(stream.to(torch.float64).mean(1).to(torch.bfloat16))
            stream, pre = block(stream, pre, step)
            if block.layer.starts_decoder and step.tail is not None:
                step = step.tail
        hidden = ops.hc_collapse(stream, pre)
        return BackboneOutput(hidden, torch.cat(taps, -1) if taps else hidden[:, :0], step.batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """Collapsed rows bf16 [R, M] -> float32 [R, V]."""
        return self.vocabulary.logits(ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps))

    def close(self) -> None:
        """Close the Engram files."""
        self.tables.close()


def enter(x: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    """Start a residual stream: bf16 [T, M] on every copy, and a pre mix that reads copy 0 alone."""
    pre = torch.zeros(len(x), copies)
    pre[:, 0] = 1.0
    return x[:, None].expand(-1, copies, -1), pre


__all__ = ["BackboneOutput", "V41Model", "VocabularyShard", "enter"]
