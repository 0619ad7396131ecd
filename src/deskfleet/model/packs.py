"""Packs of Engram rows: made from a checkpoint, and held against one. deskfleet_engram owns format and files.

Owns which of its errors become which of ours, with the same exit code, and the two questions about a pack: is it of
this checkpoint, and does it hold what a rank reads. Knows nothing of how ranks share columns out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import deskfleet_engram.errors as engram_errors
from deskfleet.errors import CheckpointError, ConfigError, DeskfleetError, DoesNotFit, PackError, WrongPack
from deskfleet_engram.manifest import (
    MANIFEST_NAME,
    Manifest,
    check_same_identity,
    identity_of,
    open_source_as,
    read_manifest,
)
from deskfleet_engram.native_blocks import use_native_blocks
from deskfleet_engram.ownership import select_columns, spell_numbers
from deskfleet_engram.pack import PackPlan, PackProgress, PackReport, is_unfinished, pack, plan_pack
from deskfleet_engram.source import Source, open_source
from deskfleet_engram.verify import Level, VerifyProgress, VerifyReport, verify

_OURS: tuple[tuple[type[engram_errors.EngramError], type[DeskfleetError]], ...] = (
    (engram_errors.SelectionError, ConfigError),
    (engram_errors.SpaceError, DoesNotFit),
    (engram_errors.IdentityError, WrongPack),
    (engram_errors.SourceError, CheckpointError),
    (engram_errors.GeometryError, CheckpointError),
    (engram_errors.FormatError, PackError),
    (engram_errors.PackError, PackError),
    (engram_errors.RowError, PackError),
)


@contextmanager
def as_deskfleet_errors() -> Iterator[None]:
    """Raise what deskfleet_engram raises in the block as an error of ours, message, hint and exit code kept."""
    try:
        yield
    except engram_errors.EngramError as error:
        kind = next((ours for theirs, ours in _OURS if isinstance(error, theirs)), DeskfleetError)
        raise kind(error.message, hint=error.hint) from error


@dataclass(frozen=True, slots=True)
class PackedTables:
    """The pack that ranks read Engram rows from.

    With `has_second_source`, rows that it cannot give are read from the published shards, and counted.
    """

    directory: Path
    has_second_source: bool


def is_pack(directory: Path) -> bool:
    """Whether `directory` holds a pack, finished or begun, and not a checkpoint."""
    is_there = (directory / MANIFEST_NAME).exists() or is_unfinished(directory)
    return is_there and not (directory / "config.json").exists()


def check_belongs(manifest: Manifest, pack_dir: Path, checkpoint: Path) -> None:
    """Raise WrongPack, naming the first value that differs, unless the pack was made from this checkpoint.

    Compares shard headers, table sizes, the token map and a sample of every column's rows. Raises CheckpointError for
    a checkpoint whose tables cannot be read.
    """
    with as_deskfleet_errors():
        wanted = identity_of(open_source_as(manifest.identity, checkpoint))
        try:
            check_same_identity(
                manifest.identity, wanted, found_name=str(pack_dir), wanted_name=str(checkpoint)
            )
        except engram_errors.IdentityError as error:
            raise WrongPack(
                error.message, hint=f"pack this one elsewhere: deskfleet pack {checkpoint} DIR"
            ) from error


def missing_columns(manifest: Manifest, columns: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Return which of `columns` the pack lacks, by layer; layers that have them all are left out."""
    wanted = set(columns)
    missing = {
        layer: tuple(sorted(wanted - set(manifest.columns(layer)))) for layer in manifest.identity.layers
    }
    return {layer: columns for layer, columns in missing.items() if columns}


def spell_missing(missing: Mapping[int, Sequence[int]]) -> str:
    """Spell missing columns: "columns 1,5 of layer 1, columns 5 of layer 14"."""
    return ", ".join(
        f"columns {spell_numbers(columns)} of layer {layer}" for layer, columns in missing.items()
    )


def check_pack(pack_dir: Path, checkpoint: Path, columns_of_ranks: Sequence[Sequence[int]]) -> None:
    """See that every rank can read its columns of this checkpoint from the pack; opens no packed file.

    Raises PackError for a damaged manifest, WrongPack for a pack of another checkpoint or one that lacks columns,
    naming them and the rank, and CheckpointError.
    """
    with as_deskfleet_errors():
        manifest = read_manifest(pack_dir)
    check_belongs(manifest, pack_dir, checkpoint)
    lacking = {
        rank: missing
        for rank, columns in enumerate(columns_of_ranks)
        if (missing := missing_columns(manifest, columns))
    }
    if lacking:
        ranks = "; ".join(f"rank {rank} reads {spell_missing(missing)}" for rank, missing in lacking.items())
        share = ""
        if len(lacking) == 1 and len(columns_of_ranks) > 1:
            share = f" --rank {next(iter(lacking))} --world-size {len(columns_of_ranks)}"
        raise WrongPack(
            f"{pack_dir} lacks what {len(columns_of_ranks)} rank{'s' * (len(columns_of_ranks) > 1)} read: {ranks}",
            hint=f"add it: deskfleet pack {checkpoint} {pack_dir}{share}",
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackJob:
    """Columns of a checkpoint on their way into a pack. `encoder`: "native", or "numpy", which is slow."""

    source: Source
    pack_dir: Path
    columns: tuple[tuple[int, int], ...]
    encoder: str

    @classmethod
    def prepare(
        cls,
        checkpoint: Path,
        pack_dir: Path,
        *,
        layers: Sequence[int] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        repo: str | None = None,
        revision: str | None = None,
    ) -> PackJob:
        """Describe the job; nothing is written. `repo` and `revision` are what the checkpoint is called.

        When neither is given, the names in a finished pack hold, so that columns can be added to it.

        Raises CheckpointError for a checkpoint without tables, ConfigError for a rank or layers that there are not.
        """
        with as_deskfleet_errors():
            if repo is None and revision is None and (pack_dir / MANIFEST_NAME).exists():
                source = open_source_as(read_manifest(pack_dir).identity, checkpoint)
            else:
                source = open_source(checkpoint, repo=repo, revision=revision)
            columns = select_columns(source.geometry.spec, layers=layers, rank=rank, world_size=world_size)
            encoder = "native" if use_native_blocks() is None else "numpy"
        return cls(source, pack_dir, tuple(columns), encoder)

    def plan(self) -> PackPlan:
        """Say what `run` would do. Raises DoesNotFit, WrongPack for another checkpoint's pack, and PackError."""
        with as_deskfleet_errors():
            return plan_pack(self.source, self.pack_dir, columns=self.columns)

    def run(
        self,
        *,
        on_progress: Callable[[PackProgress], None],
        max_bytes_per_s: float | None = None,
        restart: bool = False,
    ) -> PackReport:
        """Pack; goes on where an interrupted run stopped, or with `restart` begins again. Raises as `plan`.

        `max_bytes_per_s` limits reading from the checkpoint, also of a disk that serves at the same time.
        """
        with as_deskfleet_errors():
            return pack(
                self.source,
                self.pack_dir,
                columns=self.columns,
                on_progress=on_progress,
                max_bytes_per_s=max_bytes_per_s,
                restart=restart,
            )

    def verify(self, level: Level, *, on_progress: Callable[[VerifyProgress], None]) -> VerifyReport:
        """Check what is packed: itself, and rows beside the checkpoint's where `level` says so. Raises PackError."""
        with as_deskfleet_errors():
            return verify(
                self.pack_dir, level=level, source=self.source, columns=self.columns, on_progress=on_progress
            )


__all__ = [
    "PackJob",
    "PackedTables",
    "as_deskfleet_errors",
    "check_belongs",
    "check_pack",
    "is_pack",
    "missing_columns",
    "spell_missing",
]
