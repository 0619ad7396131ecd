"""Reading one packed file from end to end, and saying everything that is wrong with it.

Extents are independent of each other, so several are read, checked and digested at once. Serves verification and the
packer, which trusts nothing that it has not read back. Knows one file, and of the checkpoint only rows to compare with.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.blocks import block_rows, check_blocks
from deskfleet_engram.errors import FormatError, IdentityError
from deskfleet_engram.fileio import SequentialReader, first_hole
from deskfleet_engram.format import BLOCK_BYTES, ColumnLayout, check_superblock, decode_superblock
from deskfleet_engram.source import SourceTable, TableReader

CHUNK_BYTES = 16 << 20
"""What is read or written at once."""

_MAX_WORKERS = 4  # enough for a fast disk; each takes about a core and twice CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong. `file` is the path within the pack; `row` counts within the column; None: not just one.

    `kind`: "missing", "size", "hole", "superblock", "identity" (of another pack, column or version), "io", "checksum",
    "misplaced", "fill" (unused bytes not zero), "digest" (an extent is not what was packed), "source" (a row is not the
    checkpoint's).
    """

    file: str
    block: int | None
    row: int | None
    kind: str
    detail: str

    def __str__(self) -> str:
        place = [self.file]
        if self.block is not None:
            place.append(f"block {self.block}")
        if self.row is not None:
            place.append(f"row {self.row}")
        return f"{', '.join(place)}: {self.kind}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows that a column should hold: those of `table` from `first_row` on."""

    table: SourceTable
    first_row: int

    def reader(self, max_blocks: int) -> TableReader:
        """Return a reader for at most that many blocks at once. Raises SourceError."""
        return TableReader(self.table, max_blocks * self.table.rows.rows_per_block)

    def compare(
        self, reader: TableReader, layout: ColumnLayout, first_block: int, blocks: NDArray[np.uint8]
    ) -> tuple[int, list[Fault]]:
        """Return the number of rows compared and a fault for each that differs. Raises SourceError."""
        first = first_block * layout.rows.rows_per_block
        num_rows = min(len(blocks) * layout.rows.rows_per_block, layout.num_rows - first)
        weight, scale = reader.read(self.first_row + first, num_rows)
        packed = block_rows(layout, blocks).reshape(-1, layout.rows.row_bytes)[:num_rows]
        split = layout.rows.weight_bytes
        differs = (packed[:, :split] != weight).any(axis=1) | (packed[:, split:] != scale).any(axis=1)
        return num_rows, [
            Fault(
                layout.file_name,
                layout.block_of(row),
                row,
                "source",
                f"row {self.first_row + row} of the table is not the checkpoint's",
            )
            for row in (first + np.flatnonzero(differs)).tolist()
        ]


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What reading a file found. `digests` are the SHA-256 of its extents; with faults they may be too few."""

    faults: tuple[Fault, ...]
    digests: tuple[str, ...]
    num_bytes: int
    num_compared: int


def check_file(
    path: Path,
    layout: ColumnLayout,
    *,
    extent_bytes: int,
    comparison: Comparison | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> FileCheck:
    """Read all of one column's file, past the page cache.

    `on_bytes` is told, in the calling thread, of every extent that is done; what it raises ends the check. Raises
    SourceError when rows to compare with cannot be read. A file that cannot be read is a fault.
    """
    faults = check_outside(path, layout)
    if any(fault.kind == "missing" for fault in faults):
        return FileCheck(tuple(faults), (), 0, 0)
    size = min(path.stat().st_size // BLOCK_BYTES * BLOCK_BYTES, layout.file_bytes)
    begins = range(0, size, extent_bytes)

    def check(begin: int) -> FileCheck:
        return _check_extent(path, layout, begin, min(begin + extent_bytes, size), extent_bytes, comparison)

    parts = []
    with contextlib.ExitStack() as stack:
        workers = min(_MAX_WORKERS, os.cpu_count() or 1, len(begins))
        if workers > 1:
            pool = stack.enter_context(ThreadPoolExecutor(workers, "engram-check"))
            # Closing it, which comes first, cancels what has not begun.
            results = cast("Generator[FileCheck]", pool.map(check, begins))
            stack.enter_context(contextlib.closing(results))
        else:
            results = (check(begin) for begin in begins)
        for part in results:
            parts.append(part)
            if on_bytes is not None:
                on_bytes(part.num_bytes)
    for part in parts:
        faults.extend(part.faults)
    return FileCheck(
        faults=tuple(dict.fromkeys(faults)),
        digests=tuple(digest for part in parts for digest in part.digests),
        num_bytes=sum(part.num_bytes for part in parts),
        num_compared=sum(part.num_compared for part in parts),
    )


def check_outside(path: Path, layout: ColumnLayout) -> list[Fault]:
    """Return what is wrong with the file as a whole, what explains the rest first.

    That it is missing, that its superblock is damaged or names something else, its size, a hole.
    """
    name = layout.file_name

    def fault(kind: str, detail: str, block: int | None = None) -> Fault:
        return Fault(name, block, None, kind, detail)

    try:
        with SequentialReader(path, BLOCK_BYTES) as reader:
            size = path.stat().st_size
            hole = first_hole(path)
            superblock = bytes(reader.read(0, BLOCK_BYTES)) if size >= BLOCK_BYTES else b""
    except FileNotFoundError:
        return [fault("missing", "the file is not there")]
    except OSError as error:
        return [fault("io", f"cannot read its beginning: {error.strerror or error}")]
    faults = []
    try:
        if superblock:
            check_superblock(layout, decode_superblock(superblock))
    except FormatError as error:
        faults.append(fault("superblock", error.message))
    except IdentityError as error:
        faults.append(fault("identity", error.message))
    if size != layout.file_bytes:
        faults.append(fault("size", f"has {size} bytes, not {layout.file_bytes}"))
    if hole is not None:
        block = hole // BLOCK_BYTES - 1
        faults.append(fault("hole", f"bytes from {hole} on were never written", None if block < 0 else block))
    return faults


def pieces(begin_bytes: int, end_bytes: int, extent_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of what is read or written at once; no piece crosses the end of an extent."""
    while begin_bytes < end_bytes:
        left = extent_bytes - begin_bytes % extent_bytes
        num_bytes = min(CHUNK_BYTES, left, end_bytes - begin_bytes)
        yield begin_bytes, num_bytes
        begin_bytes += num_bytes


def _check_extent(
    path: Path, layout: ColumnLayout, begin: int, end: int, extent_bytes: int, comparison: Comparison | None
) -> FileCheck:
    name = layout.file_name
    faults: list[Fault] = []
    digest = hashlib.sha256()
    max_bytes = min(CHUNK_BYTES, extent_bytes)
    num_compared = 0
    with contextlib.ExitStack() as stack:
        try:
            reader = stack.enter_context(SequentialReader(path, max_bytes))
        except OSError as error:
            return FileCheck((Fault(name, None, None, "io", str(error.strerror or error)),), (), 0, 0)
        table_reader = None
        if comparison is not None:
            table_reader = stack.enter_context(comparison.reader(max_bytes // BLOCK_BYTES))
        for offset, num_bytes in pieces(begin, end, extent_bytes):
            try:
                data = reader.read(offset, num_bytes)
            except OSError:
                faults += _unreadable(reader, name, offset, num_bytes)
                continue
            digest.update(data.data)
            blocks, first_block = data.reshape(-1, BLOCK_BYTES), offset // BLOCK_BYTES - 1
            if first_block < 0:  # the superblock was looked at from outside
                blocks, first_block = blocks[1:], 0
            if not len(blocks):
                continue
            found = check_blocks(layout, first_block, blocks)
            faults += [Fault(name, fault.block, fault.row, fault.kind, fault.detail) for fault in found]
            if comparison is not None and table_reader is not None:
                num_rows, differing = comparison.compare(table_reader, layout, first_block, blocks)
                num_compared += num_rows
                faults += differing
    return FileCheck(tuple(faults), (digest.hexdigest(),), end - begin, num_compared)


def _unreadable(reader: SequentialReader, name: str, begin: int, num_bytes: int) -> list[Fault]:
    """Read a stretch block by block and return those that fail."""
    faults = []
    for offset in range(begin, begin + num_bytes, BLOCK_BYTES):
        try:
            reader.read(offset, BLOCK_BYTES)
        except OSError as error:
            block = offset // BLOCK_BYTES - 1
            faults.append(Fault(name, None if block < 0 else block, None, "io", str(error.strerror or error)))
    return faults


__all__ = [
    "CHUNK_BYTES",
    "Comparison",
    "Fault",
    "FileCheck",
    "check_file",
    "check_outside",
    "pieces",
]
