"""Verification of a pack: quickly at every start, a sample beside the source, or every byte.

Faults are collected, not raised: a report names file, block, row and kind of each.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from deskfleet_engram.blocks import check_blocks
from deskfleet_engram.errors import FormatError, IdentityError
from deskfleet_engram.file_check import Comparison, Fault, check_file, check_outside
from deskfleet_engram.fileio import SequentialReader
from deskfleet_engram.format import BLOCK_BYTES, ColumnLayout
from deskfleet_engram.manifest import Manifest, check_same_identity, identity_of, read_manifest
from deskfleet_engram.source import Source

Level = Literal["quick", "sample", "full"]

_NUM_BLOCKS = 1024
_MAX_FAULTS = 1000


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at and what was found. `faults` holds the first ones, `num_faults` counts all.

    `num_compared` rows were compared with the source. `num_bytes` were read from the pack.
    """

    level: Level
    num_files: int
    num_blocks: int
    num_compared: int
    num_bytes: int
    faults: tuple[Fault, ...]
    num_faults: int
    elapsed_s: float

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found."""
        return self.num_faults == 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        return {"is_sound": self.is_sound, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        verdict = "sound" if self.is_sound else f"{self.num_faults} faults"
        return (
            f"{verdict} ({self.level}: {self.num_files} files, {self.num_blocks:,} blocks, "
            f"{self.num_compared:,} rows compared with the source)"
        )


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """How far a verification is: `file` at hand, bytes of packed files done and in all."""

    file: str
    done_bytes: int
    total_bytes: int
    elapsed_s: float


def verify(
    pack_dir: Path,
    *,
    level: Level = "quick",
    source: Source | None = None,
    columns: Iterable[tuple[int, int]] | None = None,
    num_blocks: int = _NUM_BLOCKS,
    seed: int | None = None,
    on_progress: Callable[[VerifyProgress], None] | None = None,
) -> VerifyReport:
    """Check the pack in `pack_dir`, or of it the (layer, column) pairs in `columns`.

    "quick" looks at sizes, holes, superblocks and `num_blocks` random blocks in all, "sample" also compares the
    rows of these blocks with `source`, "full" reads everything, and compares everything when `source` is given.
    `seed` makes the choice of blocks repeatable.

    Raises FormatError or IdentityError when the manifest cannot be used, IdentityError when `source` is not what
    was packed, and SourceError when it cannot be read. Whatever is wrong with files is in the report.
    """
    if level == "sample" and source is None:
        raise FormatError("a sample is compared with the source, and none was given")
    manifest = read_manifest(pack_dir)
    if source is not None:
        wanted = identity_of(source)
        check_same_identity(
            manifest.identity, wanted, found_name=str(pack_dir), wanted_name=str(source.directory)
        )
    places = _places(manifest, columns)
    layouts = [manifest.identity.layout(layer, column) for layer, column in places]
    extents = {(file.layer, file.column): file.extents for file in manifest.files}
    per_file = -(-num_blocks // max(1, len(places)))
    random = np.random.default_rng(seed)
    chosen = [_choose(random, layout, per_file) for layout in layouts] if level != "full" else []
    total = (
        sum(layout.file_bytes for layout in layouts)
        if level == "full"
        else sum(map(len, chosen)) * BLOCK_BYTES
    )
    collected = _Collected(level, len(places), total, on_progress)
    for index, layout in enumerate(layouts):
        comparison = None
        if source is not None and level != "quick":
            first_row = manifest.identity.first_row(layout.layer, layout.column)
            comparison = Comparison(source.table(layout.layer), first_row)
        if level == "full":
            wanted_digests = extents[layout.layer, layout.column]
            collected.full(pack_dir, layout, manifest.extent_bytes, wanted_digests, comparison)
        else:
            collected.some(pack_dir, layout, chosen[index], comparison)
    return collected.report()


class _Collected:
    """Counts and faults of one verification, file after file."""

    def __init__(
        self,
        level: Level,
        num_files: int,
        total_bytes: int,
        on_progress: Callable[[VerifyProgress], None] | None,
    ) -> None:
        self._level = level
        self._num_files = num_files
        self._on_progress = on_progress
        self._num_blocks = self._num_compared = self._num_bytes = self._num_faults = 0
        self._faults: list[Fault] = []
        self._begin_s = time.monotonic()
        self._total_bytes = total_bytes

    def full(
        self,
        pack_dir: Path,
        layout: ColumnLayout,
        extent_bytes: int,
        extents: tuple[str, ...],
        comparison: Comparison | None,
    ) -> None:
        """Read all of one file."""

        def on_bytes(num_bytes: int) -> None:
            self._num_bytes += num_bytes
            self._tell(layout)

        path = pack_dir / layout.file_name
        check = check_file(path, layout, extent_bytes=extent_bytes, comparison=comparison, on_bytes=on_bytes)
        self._num_blocks += max(0, check.num_bytes // BLOCK_BYTES - 1)
        self._num_compared += check.num_compared
        self._add(check.faults)
        if not check.faults and check.digests != extents:
            wrong = [
                index
                for index, pair in enumerate(zip(check.digests, extents, strict=True))
                if len(set(pair)) > 1
            ]
            self._add(
                Fault(
                    layout.file_name,
                    max(0, index * extent_bytes // BLOCK_BYTES - 1),
                    None,
                    "digest",
                    f"extent {index} is sound, but not the one that the manifest lists",
                )
                for index in wrong
            )

    def some(
        self, pack_dir: Path, layout: ColumnLayout, chosen: list[int], comparison: Comparison | None
    ) -> None:
        """Look at one file from outside and at the `chosen` blocks."""
        path = pack_dir / layout.file_name
        faults = check_outside(path, layout)
        self._add(faults)
        if any(fault.kind in ("missing", "io") for fault in faults):
            return
        with ExitStack() as stack:
            reader = stack.enter_context(SequentialReader(path, BLOCK_BYTES))
            table_reader = None if comparison is None else stack.enter_context(comparison.reader(1))
            for block in chosen:
                try:
                    data = reader.read((1 + block) * BLOCK_BYTES, BLOCK_BYTES).reshape(1, BLOCK_BYTES)
                except OSError as error:
                    self._add([Fault(layout.file_name, block, None, "io", str(error.strerror or error))])
                    continue
                found = check_blocks(layout, block, data)
                self._add(Fault(layout.file_name, f.block, f.row, f.kind, f.detail) for f in found)
                self._num_blocks += 1
                self._num_bytes += BLOCK_BYTES
                if comparison is not None and table_reader is not None:
                    num_rows, differing = comparison.compare(table_reader, layout, block, data)
                    self._num_compared += num_rows
                    self._add(differing)
        self._tell(layout)

    def report(self) -> VerifyReport:
        return VerifyReport(
            level=self._level,
            num_files=self._num_files,
            num_blocks=self._num_blocks,
            num_compared=self._num_compared,
            num_bytes=self._num_bytes,
            faults=tuple(self._faults),
            num_faults=self._num_faults,
            elapsed_s=time.monotonic() - self._begin_s,
        )

    def _add(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            self._num_faults += 1
            if len(self._faults) < _MAX_FAULTS:
                self._faults.append(fault)

    def _tell(self, layout: ColumnLayout) -> None:
        if self._on_progress is not None:
            elapsed = time.monotonic() - self._begin_s
            self._on_progress(VerifyProgress(layout.file_name, self._num_bytes, self._total_bytes, elapsed))


def _places(manifest: Manifest, columns: Iterable[tuple[int, int]] | None) -> list[tuple[int, int]]:
    present = [(file.layer, file.column) for file in manifest.files]
    if columns is None:
        return present
    wanted = sorted(set(columns))
    for layer, column in wanted:
        if (layer, column) not in present:
            raise IdentityError(f"the pack does not hold column {column} of layer {layer}")
    return wanted


def _choose(random: np.random.Generator, layout: ColumnLayout, count: int) -> list[int]:
    """Return ascending distinct blocks, the last one always among them: it alone may be short."""
    if count >= layout.num_blocks:
        return list(range(layout.num_blocks))
    drawn = random.choice(layout.num_blocks - 1, size=count - 1, replace=False).tolist() if count > 1 else []
    return [*sorted(drawn), layout.num_blocks - 1]


__all__ = ["Fault", "Level", "VerifyProgress", "VerifyReport", "verify"]
