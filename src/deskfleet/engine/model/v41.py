"""The whole V4.1 model of one rank (spec §5.3). Owns the order of things; the parts live beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        self.head = reader.matrix(head)  # (V_local, M)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> bf16 [..., M]; exactly one rank contributes to each row."""
        if self.comm.size == 1:
            return self.embedding[token_ids]
        mine = (token_ids >= self.start) & (token_ids < self.stop)
        local = torch.where(mine, token_ids - self.start, 0)
        rows = torch.where(mine[..., None], self.embedding[local].to(torch.float32), 0.0)
        return self.comm.all_reduce(rows).to(torch.bfloat16)

    def logits(self, x: Tensor) -> Tensor:
        """bf16 [R, M] -> float32 [R, V], the same on every rank."""
        local = ops.linear_f32(x, self.head)
        if self.comm.size == 1:
            return local
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
        self.num_layers_run = 0  # by all passes so far, and the one under way
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
        tail = None if batch.tail is None else self._step(batch.tail.batch, cache, recorder)
        step = self._step(batch, cache, recorder)
        return replace(step, engram_requests=requests, tail=tail)

    def _step(self, batch: Batch, cache: PagedCache, recorder: Recorder | None) -> Step:
        """A step over `batch` with its rotations: those with the yarn table are made in one piece."""
        entries = [index.entry_positions for index in batch.compression.values()]
        positions = [batch.positions, *entries]
        sizes = [len(part) for part in positions]
        cos, sin = (rows.split(sizes) for rows in self.rope[True].rows(torch.cat(positions)))
        rope = {True: (cos[0], sin[0]), False: self.rope[False].rows(batch.positions)}
        entry_rope = dict(zip(batch.compression, zip(cos[1:], sin[1:], strict=True), strict=True))
        return Step(batch, cache, self.dcp, rope, entry_rope, recorder=recorder)

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
            self.num_layers_run += 1
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
    return x[:, None].repeat(1, copies, 1), pre


__all__ = ["BackboneOutput", "V41Model", "VocabularyShard", "enter"]
