"""Which part of every tensor each rank holds: `Layout` (how many ranks) and `ShardPlan` (the slices).

Owns the sharding rules of spec §11, made to work at every tp_size by padding the last ranks; the layers
above never ask whether sizes divide. Engram tables are cut by column, not by row, so that every rank reads
the same number of rows for a token. Knows nothing of files or of how a slice is read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from deskfleet.errors import ConfigError
from deskfleet.model.config import ModelConfig
from deskfleet.model.engram import engram_geometry
from deskfleet.model.names import TensorClass, TensorSpec, expected_tensors
from deskfleet_engram.ownership import ColumnOwnership


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is spread: `tp_size` tensor-parallel ranks, any number from 1 up.

    Raises ConfigError for a number that is none.
    """

    tp_size: int

    def __post_init__(self) -> None:
        if type(self.tp_size) is not int or self.tp_size < 1:
            raise ConfigError(f"tp_size must be an integer of 1 or more, got {self.tp_size!r}")


@dataclass(frozen=True, slots=True)
class TensorShard:
    """What one rank holds of one tensor.

    `dim` None: the whole tensor, as every other rank does. Otherwise the rank holds `ranges`, half-open and
    ascending in elements of dimension `dim`, one after another. `padded_size` is the local size of `dim`
    when the slice is followed by padding, which the loader fills with zeros; None when there is no padding.

        full     |---- rank 0 ----|---- rank 1 ----|-- rank 2 --|
        rank 2   |-- rank 2 --|000|    padded_size counts both parts
    """

    name: str
    full_shape: tuple[int, ...]
    dim: int | None
    ranges: tuple[tuple[int, int], ...] = ()
    padded_size: int | None = None

    @property
    def is_replicated(self) -> bool:
        """Every rank holds the whole tensor."""
        return self.dim is None

    @property
    def is_held(self) -> bool:
        """This rank has a tensor of `local_shape`, be it all padding. False for another rank's expert."""
        return self.dim is None or bool(self.ranges) or self.padded_size is not None

    @property
    def num_held(self) -> int:
        """Elements of `dim` that come from the checkpoint; 0 when replicated."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def num_padding(self) -> int:
        """Elements of `dim` that are padding."""
        return 0 if self.padded_size is None else self.padded_size - self.num_held

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the rank's tensor, padding included. `dim` is 0 long when nothing is held."""
        if self.dim is None:
            return self.full_shape
        local = self.num_held + self.num_padding
        return (*self.full_shape[: self.dim], local, *self.full_shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class _Cut:
    """Dimension `dim` of a tensor is `count` units of `unit` elements; rank r gets `per_rank` of them."""

    dim: int
    count: int
    per_rank: int
    unit: int
    block: int = 1  # elements that share one entry of this tensor: the scale tile for a scale grid


_LAYER_NAME = re.compile(r"(?:layers|mtp)\.\d+\.(?P<rest>.+)")
_EXPERT_NAME = re.compile(r"(?P<prefix>layers|mtp)\.\d+\.ffn\.experts\.(?P<number>\d+)\.\w+\.\w+")
_TABLE_NAME = re.compile(r"layers\.(?P<layer>\d+)\.engram\.embed\.\w+")


class ShardPlan:
    """The slice of every tensor that each rank of `layout` holds.

    Attention is cut by output group, so that a group's heads, its `wo_a` rows and its `wo_b` columns stay
    together; embeddings and heads by vocabulary row; routed experts whole; Engram tables by column, strided
    (`engram_ownership`). Everything else, indexers and shared experts too, is replicated.

    `engram_column_rows` holds the rows of every column of every Engram table. None derives them from the
    configuration. Raises ConfigError when they contradict the configuration, or when a cut would divide the
    square tile that shares one scale.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        engram_column_rows: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        if engram_column_rows is None:
            engram_column_rows = engram_column_rows_of(config)
        self._column_offsets = _column_offsets(config, engram_column_rows)
        self.groups_per_rank = _share(config.o_groups, layout.tp_size)
        self.heads_per_rank = self.groups_per_rank * config.heads_per_group
        self.vocab_per_rank = _share(config.vocab_size, layout.tp_size)
        self.experts_per_rank = _share(config.n_routed_experts, layout.tp_size)
        self.draft_experts_per_rank = _share(config.dspark_n_routed_experts, layout.tp_size)
        self.engram_ownership = ColumnOwnership.split(config.engram_num_columns, layout.tp_size)
        self._cuts = self._make_cuts()
        self._check_blocks()

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor of the checkpoint, by name."""
        return expected_tensors(self.config)

    def group_range(self, rank: int) -> range:
        """Output groups that `rank` holds; fewer than `groups_per_rank` (none, at the end) when padded."""
        return self._contiguous(self.config.o_groups, self.groups_per_rank, rank)

    def vocab_range(self, rank: int) -> range:
        """Token ids whose embedding and logit `rank` holds."""
        return self._contiguous(self.config.vocab_size, self.vocab_per_rank, rank)

    def expert_range(self, rank: int) -> range:
        """Routed experts of every backbone layer that `rank` holds. Experts are never padded."""
        return self._contiguous(self.config.n_routed_experts, self.experts_per_rank, rank)

    def draft_expert_range(self, rank: int) -> range:
        """Routed experts of every draft stage that `rank` holds. Experts are never padded."""
        return self._contiguous(self.config.dspark_n_routed_experts, self.draft_experts_per_rank, rank)

    def engram_columns(self, rank: int) -> tuple[int, ...]:
        """Engram columns that `rank` holds, ascending; fewer than `engram_columns_per_rank` when padded."""
        self._check_rank(rank)
        return self.engram_ownership.columns(rank)

    @property
    def engram_columns_per_rank(self) -> int:
        """Places for Engram columns on every rank, padding included."""
        return self.engram_ownership.columns_per_rank

    def shard(self, name: str, rank: int) -> TensorShard:
        """Return what `rank` holds of tensor `name`. Raises ConfigError for an unknown name or rank."""
        self._check_rank(rank)
        spec = self.tensors.get(name)
        if spec is None:
            raise ConfigError(f"no tensor {name!r} in this model")
        if expert := _EXPERT_NAME.fullmatch(name):
            held = self.expert_range(rank) if expert["prefix"] == "layers" else self.draft_expert_range(rank)
            whole = ((0, spec.shape[0]),) if int(expert["number"]) in held else ()
            return TensorShard(name, spec.shape, dim=0, ranges=whole)
        if table := _TABLE_NAME.fullmatch(name):
            offsets = self._column_offsets[self.config.engram_layer_ids.index(int(table["layer"]))]
            columns = self.engram_columns(rank)
            ranges = tuple((offsets[column], offsets[column + 1]) for column in columns)
            return TensorShard(name, spec.shape, dim=0, ranges=ranges)
        cut = self._cut(name)
        if cut is None:
            return TensorShard(name, spec.shape, dim=None)
        units = self._contiguous(cut.count, cut.per_rank, rank)
        start, stop = (units.start * cut.unit // cut.block, units.stop * cut.unit // cut.block)
        local = cut.per_rank * cut.unit // cut.block
        return TensorShard(
            name,
            spec.shape,
            dim=cut.dim,
            ranges=((start, stop),) if start < stop else (),
            padded_size=local if stop - start < local else None,
        )

    def rank_bytes(self, rank: int) -> dict[TensorClass, int]:
        """Return the checkpoint bytes that `rank` holds, by class, padding left out.

        Every class is present. Replicas count on every rank, so the ranks' sum exceeds the checkpoint's.
        """
        return self._count_bytes(rank)[0]

    def padding_bytes(self, rank: int) -> int:
        """Return the bytes of zeros that `rank` holds besides `rank_bytes`, in the checkpoint's dtypes."""
        return self._count_bytes(rank)[1]

    def _count_bytes(self, rank: int) -> tuple[dict[TensorClass, int], int]:
        held: Counter[TensorClass] = Counter(dict.fromkeys(TensorClass, 0))
        padding = 0
        for name, spec in self._without_experts.items():
            shard = self.shard(name, rank)
            if shard.dim is None:
                held[spec.tensor_class] += spec.nbytes
                continue
            line_bytes = spec.nbytes // spec.shape[shard.dim]
            held[spec.tensor_class] += shard.num_held * line_bytes
            padding += shard.num_padding * line_bytes
        # Experts are nearly all of a checkpoint's names and all alike, so they are counted, not visited.
        experts = len(self.config.layers) * len(self.expert_range(rank))
        held[TensorClass.routed_expert] += experts * self._expert_bytes
        draft_experts = len(self.config.draft_layers) * len(self.draft_expert_range(rank))
        held[TensorClass.draft] += draft_experts * self._expert_bytes
        return dict(held), padding

    @cached_property
    def _without_experts(self) -> dict[str, TensorSpec]:
        return {name: spec for name, spec in self.tensors.items() if not _EXPERT_NAME.fullmatch(name)}

    @cached_property
    def _expert_bytes(self) -> int:
        prefix = f"{self.config.layers[0].prefix}.ffn.experts.0."
        return sum(spec.nbytes for name, spec in self.tensors.items() if name.startswith(prefix))

    def _make_cuts(self) -> dict[str, _Cut]:
        """Return the contiguous cuts, by name with the layer prefix taken off."""
        config, block = self.config, self.config.weight_block_size

        def by_group(dim: int, unit: int, block: int = 1) -> _Cut:
            return _Cut(dim, config.o_groups, self.groups_per_rank, unit, block)

        head_rows, rank_rows = config.heads_per_group * config.head_dim, config.o_lora_rank
        by_token = _Cut(0, config.vocab_size, self.vocab_per_rank, 1)
        return {
            "embed.weight": by_token,
            "head.weight": by_token,
            "markov_head.embed.weight": by_token,
            "markov_head.head.weight": by_token,
            "attn.attn_sink": by_group(0, config.heads_per_group),
            "attn.wq_b.weight": by_group(0, head_rows),
            "attn.wq_b.scale": by_group(0, head_rows, block),
            "attn.wo_a.weight": by_group(0, rank_rows),
            "attn.wo_a.scale": by_group(0, rank_rows, block),
            "attn.wo_b.weight": by_group(1, rank_rows),
            "attn.wo_b.scale": by_group(1, rank_rows, block),
        }

    def _cut(self, name: str) -> _Cut | None:
        in_layer = _LAYER_NAME.fullmatch(name)
        return self._cuts.get(in_layer["rest"] if in_layer else name)

    def _check_blocks(self) -> None:
        for name, cut in self._cuts.items():
            is_cut = cut.per_rank < cut.count
            if is_cut and cut.per_rank * cut.unit % cut.block:
                raise ConfigError(
                    f"tp_size {self.layout.tp_size} cuts {name} every {cut.per_rank * cut.unit} elements, "
                    f"which is inside a {cut.block}-element weight block",
                    hint=f"choose a tp_size that leaves a multiple of {cut.block} to each rank",
                )

    def _contiguous(self, count: int, per_rank: int, rank: int) -> range:
        self._check_rank(rank)
        return range(min(rank * per_rank, count), min((rank + 1) * per_rank, count))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.layout.tp_size:
            raise ConfigError(f"rank {rank} is outside tp_size {self.layout.tp_size}")


def engram_column_rows_of(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Return the rows of each column of each Engram table of `config` (spec §7.2).

    Raises ConfigError when they do not add up to engram_num_embeddings.
    """
    geometry = engram_geometry(config)
    if geometry is None:
        return ()
    return tuple(geometry.column_rows(position) for position in range(len(config.engram_layer_ids)))


def _share(count: int, tp_size: int) -> int:
    return math.ceil(count / tp_size)


def _column_offsets(config: ModelConfig, column_rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return, for each table, the first row of each column and the end of the last."""
    tables = config.engram_num_embeddings
    if len(column_rows) != len(tables):
        raise ConfigError(f"engram column rows of {len(column_rows)} tables given, config has {len(tables)}")
    for layer, table, rows in zip(config.engram_layer_ids, tables, column_rows, strict=True):
        if len(rows) != config.engram_num_columns or sum(rows) != table:
            raise ConfigError(
                f"engram table of layer {layer} has {config.engram_num_columns} columns and {table} rows, "
                f"but {len(rows)} columns with {sum(rows)} rows were given"
            )
    return tuple(tuple(accumulate(rows, initial=0)) for rows in column_rows)


__all__ = ["Layout", "ShardPlan", "TensorShard", "engram_column_rows_of"]
