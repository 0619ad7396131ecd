"""What `deskfleet inspect` reports: what a checkpoint or a pack holds, what each rank would hold, what is wrong.

Owns the report as plain data. Knows nothing of how it is printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskfleet.errors import ConfigError, PackError, WrongPack
from deskfleet.model.checkpoint import Checkpoint, describe_problem, examine
from deskfleet.model.config import ModelConfig
from deskfleet.model.config_keys import MODEL_TYPE
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.names import TensorClass
from deskfleet.model.packs import as_deskfleet_errors, check_belongs, missing_columns
from deskfleet_engram.manifest import Manifest, read_manifest
from deskfleet_engram.pack import is_unfinished
from deskfleet_engram.verify import verify


@dataclass(frozen=True, slots=True)
class Architecture:
    """The facts of config.json a person asks for first."""

    model_type: str
    num_layers: int
    num_draft_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    num_experts: int
    num_chosen_experts: int
    engram_layer_ids: tuple[int, ...]
    has_vision: bool


@dataclass(frozen=True, slots=True)
class Contents:
    """What the files hold. `total_bytes` counts tensor data, `file_bytes` headers too."""

    num_tensors: int
    num_files: int
    total_bytes: int
    file_bytes: int
    bytes_by_class: Mapping[TensorClass, int]
    bytes_by_dtype: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What one rank would hold, in the checkpoint's own dtypes; `padding_bytes` comes on top."""

    rank: int
    bytes_by_class: Mapping[TensorClass, int]
    padding_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything, padding included."""
        return sum(self.bytes_by_class.values()) + self.padding_bytes


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint's report.

    `architecture` is None when config.json cannot be used, `contents` when the files have `problems`. `ranks`
    is empty when no tp_size was asked for, or when the model cannot be cut that way; `problems` says why. `pack` is
    None when none was asked about.
    """

    directory: Path
    architecture: Architecture | None
    contents: Contents | None
    tp_size: int | None
    ranks: tuple[RankBytes, ...]
    problems: tuple[str, ...]
    pack: PackFit | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        ranks = [
            {
                "rank": rank.rank,
                "bytes_by_class": _by_name(rank.bytes_by_class),
                "padding_bytes": rank.padding_bytes,
                "total_bytes": rank.total_bytes,
            }
            for rank in self.ranks
        ]
        contents = None
        if self.contents is not None:
            contents = {
                **{field.name: getattr(self.contents, field.name) for field in _FIELDS_OF_CONTENTS},
                "bytes_by_class": _by_name(self.contents.bytes_by_class),
                "bytes_by_dtype": dict(self.contents.bytes_by_dtype),
            }
        architecture = None
        if self.architecture is not None:
            architecture = dataclasses.asdict(self.architecture)
            architecture["engram_layer_ids"] = list(self.architecture.engram_layer_ids)
        return {
            "directory": str(self.directory),
            "architecture": architecture,
            "contents": contents,
            "tp_size": self.tp_size,
            "ranks": ranks,
            "problems": list(self.problems),
            "engram_pack": None if self.pack is None else self.pack.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class PackFit:
    """Whether a pack serves a checkpoint. `mismatch` says why it is of another one, None when it is of this one.

    `missing` holds, for each rank asked about, the columns that it reads and the pack lacks, by layer.
    """

    directory: Path
    mismatch: str | None
    missing: tuple[Mapping[int, tuple[int, ...]], ...]

    @property
    def is_fit(self) -> bool:
        """Whether the pack is of this checkpoint and every rank finds its columns."""
        return self.mismatch is None and not any(self.missing)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as values that JSON can hold."""
        return {
            "directory": str(self.directory),
            "belongs": self.mismatch is None,
            "mismatch": self.mismatch,
            "ranks": [
                {
                    "rank": rank,
                    "is_covered": not missing,
                    "missing": {str(layer): list(columns) for layer, columns in missing.items()},
                }
                for rank, missing in enumerate(self.missing)
            ],
        }


@dataclass(frozen=True, slots=True)
class PackedLayerContents:
    """One layer of a pack: the columns that are there of `num_columns`, their rows of `total_rows`, their bytes."""

    layer: int
    columns: tuple[int, ...]
    num_columns: int
    num_rows: int
    total_rows: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PackInspection:
    """A pack's report. Everything but `directory` and `problems` is empty when the manifest cannot be used.

    `identity` is what the rows are (FORMAT.md): checkpoint, shard headers, configuration, digests. `is_unfinished`
    says that packing stopped midway and can go on.
    """

    directory: Path
    pack_id: str | None
    format: str | None
    identity: Mapping[str, Any]
    layers: tuple[PackedLayerContents, ...]
    written_by: str | None
    is_unfinished: bool
    problems: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all packed files."""
        return sum(layer.num_bytes for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        return {
            **dataclasses.asdict(self),
            "directory": str(self.directory),
            "total_bytes": self.total_bytes,
        }


_FIELDS_OF_CONTENTS = dataclasses.fields(Contents)


def inspect_checkpoint(
    directory: str | Path, tp_size: int | None = None, *, engram_pack: Path | None = None
) -> Inspection:
    """Report on the checkpoint in `directory`, on each of `tp_size` ranks when given, and on whether a pack fits both.

    A broken checkpoint is reported, not raised. Raises ConfigError for a `tp_size` below 1, and PackError for a pack
    whose manifest cannot be used.
    """
    layout = Layout(1 if tp_size is None else tp_size)
    examination = examine(directory)
    problems = list(examination.problems)
    ranks: tuple[RankBytes, ...] = ()
    pack = None
    if examination.config is not None:
        try:
            # Made without a tp_size too: it refuses Engram tables whose rows the configuration belies.
            plan = ShardPlan(examination.config, layout)
        except ConfigError as error:
            problems.append(describe_problem(error))
        else:
            ranks = _ranks(plan) if tp_size is not None else ()
            if engram_pack is not None and examination.checkpoint is not None:
                numbers = range(0 if tp_size is None else tp_size)
                pack = _pack_fit(
                    engram_pack, Path(directory), [plan.engram_columns(rank) for rank in numbers]
                )
    return Inspection(
        directory=Path(directory),
        architecture=_architecture(examination.config) if examination.config else None,
        contents=_contents(examination.checkpoint) if examination.checkpoint else None,
        tp_size=tp_size,
        ranks=ranks,
        problems=tuple(problems),
        pack=pack,
    )


def inspect_pack(directory: Path) -> PackInspection:
    """Report on the pack in `directory`: its manifest, sizes and superblocks of its files, and random blocks of them.

    A damaged pack is reported, not raised.
    """
    is_begun = is_unfinished(directory)
    try:
        with as_deskfleet_errors():
            manifest = read_manifest(directory)
            checked = verify(directory, level="quick", seed=0)
    except PackError as error:
        return PackInspection(directory, None, None, {}, (), None, is_begun, (describe_problem(error),))
    identity = manifest.identity
    return PackInspection(
        directory=directory,
        pack_id=f"{identity.pack_id:016x}",
        format=f"EGP{identity.document['major']}.{identity.document['minor']}, {identity.rows.name} rows",
        identity=identity.document,
        layers=tuple(_packed_layer(manifest, layer) for layer in identity.layers),
        written_by=manifest.written_by,
        is_unfinished=is_begun,
        problems=tuple(map(str, checked.faults)),
    )


def _packed_layer(manifest: Manifest, layer: int) -> PackedLayerContents:
    identity, columns = manifest.identity, manifest.columns(layer)
    geometry = identity.geometry
    return PackedLayerContents(
        layer=layer,
        columns=columns,
        num_columns=geometry.spec.num_columns,
        num_rows=sum(identity.layout(layer, column).num_rows for column in columns),
        total_rows=geometry.spec.num_embeddings[identity.layers.index(layer)],
        num_bytes=manifest.num_bytes(layer),
    )


def _pack_fit(pack_dir: Path, checkpoint: Path, columns_of_ranks: Sequence[Sequence[int]]) -> PackFit:
    with as_deskfleet_errors():
        manifest = read_manifest(pack_dir)
    mismatch = None
    try:
        check_belongs(manifest, pack_dir, checkpoint)
    except WrongPack as error:
        mismatch = error.message
    missing = tuple(missing_columns(manifest, columns) for columns in columns_of_ranks)
    return PackFit(pack_dir, mismatch, missing)


def _architecture(config: ModelConfig) -> Architecture:
    return Architecture(
        model_type=MODEL_TYPE,
        num_layers=len(config.layers),
        num_draft_layers=len(config.draft_layers),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        num_experts=config.n_routed_experts,
        num_chosen_experts=config.num_experts_per_tok,
        engram_layer_ids=config.engram_layer_ids,
        has_vision=config.vision is not None,
    )


def _contents(checkpoint: Checkpoint) -> Contents:
    return Contents(
        num_tensors=len(checkpoint.tensors),
        num_files=checkpoint.num_files,
        total_bytes=checkpoint.total_bytes,
        file_bytes=checkpoint.file_bytes,
        bytes_by_class=checkpoint.bytes_by_class(),
        bytes_by_dtype=checkpoint.bytes_by_dtype(),
    )


def _ranks(plan: ShardPlan) -> tuple[RankBytes, ...]:
    return tuple(
        RankBytes(rank, plan.rank_bytes(rank), plan.padding_bytes(rank))
        for rank in range(plan.layout.tp_size)
    )


def _by_name(totals: Mapping[TensorClass, int]) -> dict[str, int]:
    return {tensor_class.value: num_bytes for tensor_class, num_bytes in totals.items()}


__all__ = [
    "Architecture",
    "Contents",
    "Inspection",
    "PackFit",
    "PackInspection",
    "PackedLayerContents",
    "RankBytes",
    "inspect_checkpoint",
    "inspect_pack",
]
