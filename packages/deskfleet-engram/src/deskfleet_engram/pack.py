"""Packing: from a checkpoint's tables to one self-checking file per layer and hash column.

Decides what is to be done: which columns are there already, which an interrupted run left half done, whether the
rest fits; then `deskfleet_engram.pipeline` does it, and the manifest comes last. FORMAT.md, "Packing", is the order
of events. Whatever happens, a run that is started again ends with the same bytes.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskfleet_engram.blocks import check_blocks
from deskfleet_engram.errors import PackError, SourceError, SpaceError
from deskfleet_engram.file_check import CHUNK_BYTES, pieces
from deskfleet_engram.fileio import SequentialReader, replace_file, reserve, sync_directory
from deskfleet_engram.format import BLOCK_BYTES
from deskfleet_engram.journal import JOURNAL_NAME, Journal
from deskfleet_engram.manifest import (
    MANIFEST_NAME,
    Manifest,
    PackedFile,
    PackIdentity,
    check_same_identity,
    identity_of,
    manifest_bytes,
    read_manifest,
)
from deskfleet_engram.pipeline import PackingColumn, Pipeline
from deskfleet_engram.progress import PackProgress, RateLimit, WorkMeter
from deskfleet_engram.source import Source, source_hole

EXTENT_BYTES = 64 << 20
"""How often packing makes what it wrote durable; what a kill costs at most."""

WRITTEN_BY = "deskfleet-engram 0.1.0"

_SLACK_BYTES = 1 << 20  # journal, manifest, directories
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_Place = tuple[int, int]  # layer id, column
_Digests = dict[_Place, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class PackReport:
    """What a run of `pack` did. `num_kept` columns were there before, `num_adopted` had come from elsewhere.

    `resumed_bytes` were packed by an earlier run that did not finish, `packed_bytes` by this one.
    """

    pack_dir: Path
    pack_id: int
    num_packed: int
    num_kept: int
    num_adopted: int
    resumed_bytes: int
    packed_bytes: int
    elapsed_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        return {**dataclasses.asdict(self), "pack_dir": str(self.pack_dir), "pack_id": f"{self.pack_id:016x}"}

    def __str__(self) -> str:
        return (
            f"{self.pack_dir}: pack {self.pack_id:016x}, {self.num_packed} columns packed, {self.num_kept} kept, "
            f"{self.num_adopted} adopted, {self.packed_bytes:,} bytes in {self.elapsed_s:.1f} s"
        )


@dataclass(frozen=True, slots=True)
class PackPlan:
    """What a run of `pack` would do. `num_complete` columns are there already, `num_to_pack` are not.

    `needed_bytes` more of the disk are taken, of the `free_bytes` that are free; `read_bytes` come from the source.
    """

    pack_dir: Path
    pack_id: int
    num_complete: int
    num_to_pack: int
    read_bytes: int
    needed_bytes: int
    free_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as values that JSON can hold."""
        return {**dataclasses.asdict(self), "pack_dir": str(self.pack_dir), "pack_id": f"{self.pack_id:016x}"}

    def __str__(self) -> str:
        return (
            f"{self.pack_dir}: pack {self.pack_id:016x}, {self.num_to_pack} columns to pack, "
            f"{self.num_complete} there; {self.needed_bytes:,} bytes needed of {self.free_bytes:,} free"
        )


def pack(
    source: Source,
    pack_dir: Path,
    *,
    columns: Iterable[tuple[int, int]] | None = None,
    on_progress: Callable[[PackProgress], None] | None = None,
    max_bytes_per_s: float | None = None,
    extent_bytes: int | None = None,
    restart: bool = False,
    allow_holes: bool = False,
) -> PackReport:
    """Pack columns of `source` into `pack_dir`: the (layer id, column) pairs in `columns`, or all.

    Columns that are complete already are kept, those of an interrupted run are continued, complete files without
    a manifest are read through and adopted. `max_bytes_per_s` limits reading from the source. `restart` discards
    every column that no manifest lists; `allow_holes` accepts a source whose rows lie in holes of a sparse file.

    Raises SpaceError when the disk is too small or fills up, IdentityError when `pack_dir` holds a pack of
    another checkpoint or a column does not exist, SourceError when the source cannot be read, and PackError
    when it changed, when a file does not come back from the disk as written, or when another process packs there.
    """
    begin_s = time.monotonic()
    identity = identity_of(source)
    places = _existing_places(identity, columns)
    try:
        pack_dir.mkdir(parents=True, exist_ok=True)
        with _locked(pack_dir):
            packing = _Packing(source, identity, pack_dir, extent_bytes)
            counts = packing.run(
                places, restart, allow_holes, WorkMeter(on_progress), RateLimit(max_bytes_per_s)
            )
    except OSError as error:
        raise _translated(pack_dir, error) from error
    return PackReport(pack_dir, identity.pack_id, *counts, elapsed_s=time.monotonic() - begin_s)


def plan_pack(
    source: Source,
    pack_dir: Path,
    *,
    columns: Iterable[tuple[int, int]] | None = None,
    allow_holes: bool = False,
) -> PackPlan:
    """Say what `pack` would do with the same arguments; nothing is written.

    What an interrupted run left is counted as room that is taken already, and as rows still to be read. Raises what
    `pack` raises before it writes.
    """
    identity = identity_of(source)
    places = _existing_places(identity, columns)
    try:
        return _Packing(source, identity, pack_dir, None).plan(places, allow_holes)
    except OSError as error:
        raise _translated(pack_dir, error) from error


def is_unfinished(pack_dir: Path) -> bool:
    """Whether a run of `pack` was stopped midway in `pack_dir`: another one goes on from there."""
    return (pack_dir / JOURNAL_NAME).exists()


def packed_bytes(identity: PackIdentity, columns: Iterable[tuple[int, int]] | None = None) -> int:
    """Return what the files of these columns take. Raises IdentityError for a column that does not exist."""
    return sum(identity.layout(*place).file_bytes for place in _existing_places(identity, columns))


class _Packing:
    """One run over one directory, which is locked."""

    def __init__(
        self, source: Source, identity: PackIdentity, pack_dir: Path, extent_bytes: int | None
    ) -> None:
        self._source = source
        self._identity = identity
        self._pack_dir = pack_dir
        self._digests: _Digests = {}
        kept = None
        if (pack_dir / MANIFEST_NAME).exists():
            manifest = read_manifest(pack_dir)
            check_same_identity(
                manifest.identity, identity, found_name=str(pack_dir), wanted_name=str(source.directory)
            )
            self._digests = {(file.layer, file.column): file.extents for file in manifest.files}
            kept = manifest.extent_bytes
        self._extent_bytes = extent_bytes or kept or EXTENT_BYTES
        if self._extent_bytes < BLOCK_BYTES or self._extent_bytes % BLOCK_BYTES:
            raise PackError(f"extents of {self._extent_bytes} bytes are no multiple of {BLOCK_BYTES}")
        if kept not in (None, self._extent_bytes):
            raise PackError(f"{pack_dir} is packed with extents of {kept} bytes, not {self._extent_bytes}")
        self._shards = _shard_states(source)

    def plan(self, places: list[_Place], allow_holes: bool) -> PackPlan:
        """Return what `run` would do. Raises what it raises before it writes."""
        columns = [self._unstarted(place) for place in places if not self._is_complete(place)]
        if not allow_holes:
            _refuse_holes(columns)
        needed, free = self._refuse_too_much(columns)
        rows = sum(column.layout.num_rows for column in columns)
        return PackPlan(
            pack_dir=self._pack_dir,
            pack_id=self._identity.pack_id,
            num_complete=len(places) - len(columns),
            num_to_pack=len(columns),
            read_bytes=rows * self._identity.rows.row_bytes,
            needed_bytes=needed if columns else 0,
            free_bytes=free,
        )

    def run(
        self, places: list[_Place], restart: bool, allow_holes: bool, meter: WorkMeter, limit: RateLimit
    ) -> tuple[int, int, int, int, int]:
        """Return packed, kept and adopted columns, resumed and packed bytes."""
        self._sweep(places, restart)
        missing = [place for place in places if place not in self._digests or not self._is_complete(place)]
        num_kept = len(places) - len(missing)
        if not missing:
            (self._pack_dir / JOURNAL_NAME).unlink(missing_ok=True)
            return 0, num_kept, 0, 0, 0
        begin = {
            "identity_sha256": self._identity.sha256.hex(),
            "extent_bytes": self._extent_bytes,
            "shards": self._shards,
        }
        with closing(Journal(self._pack_dir / JOURNAL_NAME, begin)) as journal:
            columns = [self._column(place, journal) for place in missing if not self._is_done(place, journal)]
            todo = [column for column in columns if not column.is_adopted]
            resumed = sum(column.done_bytes for column in todo)
            if not allow_holes:
                _refuse_holes(todo)
            self._refuse_too_much(todo)
            self._reserve(todo)
            total = sum(column.layout.file_bytes for column in columns)
            meter.expect(total, sum(column.done_bytes for column in columns))
            Pipeline(journal, self._extent_bytes, meter, limit, self._check_shards).run(columns)
            self._finish(journal)
        packed = sum(column.layout.file_bytes for column in todo) - resumed
        num_adopted = len(columns) - len(todo)
        return len(todo), num_kept + len(missing) - len(columns), num_adopted, resumed, packed

    def _sweep(self, places: list[_Place], restart: bool) -> None:
        """Remove unfinished files that this run will not finish."""
        wanted = {self._partial(place) for place in places}
        for path in self._pack_dir.glob("L*/c*.egp.partial"):
            if restart or path not in wanted:
                path.unlink()
        if restart:
            # A column that the interrupted run finished is of the source as it was then: its checksums are sound,
            # and only the journal, which goes, would have told that the source changed since.
            listed = {self._path(place) for place in self._digests}
            for path in self._pack_dir.glob("L*/c*.egp"):
                if path not in listed:
                    path.unlink()
            (self._pack_dir / JOURNAL_NAME).unlink(missing_ok=True)

    def _path(self, place: _Place) -> Path:
        return self._pack_dir / self._identity.layout(*place).file_name

    def _partial(self, place: _Place) -> Path:
        path = self._path(place)
        return path.with_name(path.name + ".partial")

    def _is_complete(self, place: _Place) -> bool:
        path = self._path(place)
        return path.is_file() and path.stat().st_size == self._identity.layout(*place).file_bytes

    def _is_done(self, place: _Place, journal: Journal) -> bool:
        """Whether an interrupted run finished the column, all but the manifest."""
        return place in journal.digests and self._is_complete(place)

    def _unstarted(self, place: _Place) -> PackingColumn:
        layout = self._identity.layout(*place)
        first_row = self._identity.first_row(*place)
        return PackingColumn(layout, self._source.table(place[0]), first_row, self._path(place))

    def _column(self, place: _Place, journal: Journal) -> PackingColumn:
        column = self._unstarted(place)
        layout = column.layout
        if column.path.exists():
            column.is_adopted = True
            column.done_bytes = layout.file_bytes
        else:
            column.done_bytes = self._durable_bytes(column, journal)
        return column

    def _durable_bytes(self, column: PackingColumn, journal: Journal) -> int:
        """Return how much of an unfinished file can be kept: up to the last extent that is sound."""
        count = journal.num_extents.get(column.place, 0)
        if count and not column.partial.exists():
            journal.forget(*column.place)
            return 0
        while count and not self._is_sound(column, count - 1):
            count -= 1
        return min(count * self._extent_bytes, column.layout.file_bytes)

    def _is_sound(self, column: PackingColumn, extent: int) -> bool:
        begin = max(BLOCK_BYTES, extent * self._extent_bytes)  # the superblock comes last
        end = min((extent + 1) * self._extent_bytes, column.layout.file_bytes)
        try:
            with SequentialReader(column.partial, min(CHUNK_BYTES, self._extent_bytes)) as reader:
                for offset, num_bytes in pieces(begin, end, self._extent_bytes):
                    blocks = reader.read(offset, num_bytes).reshape(-1, BLOCK_BYTES)
                    if check_blocks(column.layout, offset // BLOCK_BYTES - 1, blocks):
                        return False
        except OSError:
            return False
        return True

    def _refuse_too_much(self, todo: list[PackingColumn]) -> tuple[int, int]:
        """Return the bytes that are needed and those that are free. Raises SpaceError."""
        needed = _SLACK_BYTES
        for column in todo:
            there = column.partial.stat().st_blocks * 512 if column.partial.exists() else 0
            needed += max(0, column.layout.file_bytes - there)
        free = _free_bytes(self._pack_dir)
        if needed > free:
            raise SpaceError(
                f"{self._pack_dir}: packing {len(todo)} columns needs {needed:,} more bytes, and {free:,} are free",
                hint="pack fewer columns, or onto another disk",
            )
        return needed, free

    def _reserve(self, todo: list[PackingColumn]) -> None:
        """Give every unfinished file its blocks, so that a disk that fills up does so now."""
        made = []
        for column in todo:
            column.path.parent.mkdir(exist_ok=True)
            if not column.partial.exists():
                made.append(column.partial)
            try:
                reserve(column.partial, column.layout.file_bytes)
            except OSError as error:
                for path in made:
                    path.unlink(missing_ok=True)
                raise _translated(column.partial, error) from error
        for directory in {column.path.parent for column in todo}:
            sync_directory(directory)
        sync_directory(self._pack_dir)

    def _check_shards(self) -> None:
        now = _shard_states(self._source)
        for before, after in zip(self._shards, now, strict=True):
            if before != after:
                raise PackError(f"{before['path']} changed while it was packed: {before} became {after}")

    def _finish(self, journal: Journal) -> None:
        """Write the manifest of all that is complete; then the journal has done its duty."""
        digests = {**self._digests, **journal.digests}
        files = tuple(
            PackedFile(*place, digests[place]) for place in sorted(digests) if self._is_complete(place)
        )
        manifest = Manifest(self._identity, self._extent_bytes, files, WRITTEN_BY)
        replace_file(self._pack_dir / MANIFEST_NAME, manifest_bytes(manifest))
        journal.remove()


def _existing_places(identity: PackIdentity, columns: Iterable[_Place] | None) -> list[_Place]:
    """Return the columns asked for, in order. Raises IdentityError when one does not exist."""
    if columns is None:
        count = identity.geometry.spec.num_columns
        return [(layer, column) for layer in identity.layers for column in range(count)]
    places = sorted(set(columns))
    for place in places:
        identity.layout(*place)
    return places


def _refuse_holes(todo: list[PackingColumn]) -> None:
    for column in todo:
        hole = source_hole(column.table, column.first_row, column.first_row + column.layout.num_rows)
        if hole is not None:
            raise SourceError(
                f"{hole[0]}: rows of layer {column.layout.layer} column {column.layout.column} lie in a hole at "
                f"byte {hole[1]}: the file is an incomplete copy",
                hint="fetch it again, or allow holes if these rows really are zeros",
            )


def _shard_states(source: Source) -> list[dict[str, Any]]:
    """Return path, size and time of change of every shard that rows come from."""
    paths = {span.path for table in source.tables for span in (table.weight, table.scale)}
    states = []
    for path in sorted(paths):
        try:
            status = path.stat()
        except OSError as error:
            raise SourceError(f"{path}: cannot look at it: {error.strerror or error}") from error
        states.append({"path": path.name, "size": status.st_size, "mtime_ns": status.st_mtime_ns})
    return states


def _free_bytes(path: Path) -> int:
    """Return what is free where `path` is, or where it would be made."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    status = os.statvfs(there)
    return status.f_bavail * status.f_frsize


@contextmanager
def _locked(pack_dir: Path) -> Iterator[None]:
    """Keep other packers out. The lock goes with the process, however it ends."""
    fd = os.open(pack_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PackError(f"{pack_dir}: another process is packing there") from error
        yield
    finally:
        os.close(fd)


def _translated(path: Path, error: OSError) -> PackError:
    name = error.filename or path
    if error.errno in _NO_SPACE:
        return SpaceError(
            f"{name}: the disk is full ({error.strerror}); {_free_bytes(path.parent):,} bytes are free",
            hint="free some and pack again: it goes on from where it stopped",
        )
    return PackError(f"{name}: {error.strerror or error}")


__all__ = [
    "EXTENT_BYTES",
    "PackPlan",
    "PackProgress",
    "PackReport",
    "is_unfinished",
    "pack",
    "packed_bytes",
    "plan_pack",
]
