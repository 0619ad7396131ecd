"""The three loops of packing, run at once: read and encode, write, read back.

The calling thread encodes while another reads one piece ahead; one thread writes pieces, makes extents durable and
journals them; one thread reads complete columns back and gives them their final names. The first failure stops
them all.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.blocks import encode_blocks
from deskfleet_engram.errors import PackError
from deskfleet_engram.file_check import CHUNK_BYTES, check_file, pieces
from deskfleet_engram.fileio import ExtentWriter, aligned_buffer, sync_directory
from deskfleet_engram.format import BLOCK_BYTES, ColumnLayout, encode_superblock
from deskfleet_engram.journal import Journal
from deskfleet_engram.progress import RateLimit, WorkMeter
from deskfleet_engram.source import SourceTable, TableReader

_BUFFERS = 3  # one being encoded, two on their way to the disk

_Rows = tuple[NDArray[np.uint8], NDArray[np.uint8]]
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass(slots=True)
class PackingColumn:
    """One column on its way. `done_bytes` of its file are durable: whole extents, or all.

    `is_adopted` means that a complete file under the final name is only to be read through.
    """

    layout: ColumnLayout
    table: SourceTable
    first_row: int
    path: Path
    done_bytes: int = 0
    is_adopted: bool = False

    @property
    def partial(self) -> Path:
        """Name of the file until it is complete and checked."""
        return self.path.with_name(self.path.name + ".partial")

    @property
    def place(self) -> tuple[int, int]:
        """Layer id and column."""
        return self.layout.layer, self.layout.column


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks of one file that are packed at once. They lie in one extent."""

    column: PackingColumn
    offset_bytes: int
    num_bytes: int

    @property
    def first_block(self) -> int:
        return self.offset_bytes // BLOCK_BYTES - 1

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.num_bytes

    @property
    def is_last(self) -> bool:
        return self.end_bytes == self.column.layout.file_bytes

    def rows(self) -> tuple[int, int]:
        """Return first row in the layer's table, and number of rows."""
        layout = self.column.layout
        first = self.first_block * layout.rows.rows_per_block
        last = min(first + self.num_bytes // BLOCK_BYTES * layout.rows.rows_per_block, layout.num_rows)
        return self.column.first_row + first, last - first


class _AlternatingReaders:
    """Two readers in turn, so that the rows of one piece stay while the next one is read."""

    def __init__(self, max_blocks: int, limit: RateLimit) -> None:
        self._max_blocks = max_blocks
        self._limit = limit
        self._readers: list[TableReader] = []
        self._table: SourceTable | None = None
        self._turn = 0

    def read(self, piece: _Piece) -> _Rows:
        """Return the piece's rows, good until the second next call."""
        table = piece.column.table
        if table is not self._table:
            # The rows returned last live in their reader's buffer, which outlives the reader.
            self.close()
            max_rows = self._max_blocks * table.rows.rows_per_block
            for _ in range(2):
                self._readers.append(TableReader(table, max_rows))
            self._table = table
        first, num_rows = piece.rows()
        self._limit.wait(num_rows * table.rows.row_bytes)
        self._turn ^= 1
        return self._readers[self._turn].read(first, num_rows)

    def close(self) -> None:
        while self._readers:
            self._readers.pop().close()


@dataclass(slots=True)
class Pipeline:
    """Packs columns one after another. `check_shards` raises when the source changed."""

    journal: Journal
    extent_bytes: int
    meter: WorkMeter
    limit: RateLimit
    check_shards: Callable[[], None]
    _writers: dict[tuple[int, int], ExtentWriter] = field(default_factory=dict)
    _checks: list[Future[None]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _error: BaseException | None = None

    def run(self, columns: list[PackingColumn]) -> None:
        """Pack and check them all. Raises the first failure, after all threads have ended."""
        readers = _AlternatingReaders(self._piece_bytes // BLOCK_BYTES, self.limit)
        try:
            with ExitStack() as stack:
                names = ("read", "write", "check")
                pools = [stack.enter_context(ThreadPoolExecutor(1, f"engram-{name}")) for name in names]
                try:
                    self._guarded(self._pump, columns, readers, *pools)
                finally:
                    if self._stop.is_set():
                        for pool in pools:
                            pool.shutdown(wait=False, cancel_futures=True)
        except CancelledError:
            # This thread only noticed that another one had failed.
            raise self._error or PackError("packing was stopped") from None
        finally:
            readers.close()
            for writer in self._writers.values():
                writer.close()

    @property
    def _piece_bytes(self) -> int:
        return min(CHUNK_BYTES, self.extent_bytes)

    def _guarded(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Call, unless something failed before; a failure stops everybody."""
        if self._stop.is_set():
            raise CancelledError
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            with self._lock:
                if self._error is None and not isinstance(error, CancelledError):
                    self._error = error
            self._stop.set()
            raise

    def _pump(
        self,
        columns: list[PackingColumn],
        readers: _AlternatingReaders,
        reading: ThreadPoolExecutor,
        writing: ThreadPoolExecutor,
        checking: ThreadPoolExecutor,
    ) -> None:
        """Encode piece after piece, keeping the other threads busy."""
        for column in columns:
            if column.done_bytes == column.layout.file_bytes:
                self._finish(column, writing, checking)
        buffers = [aligned_buffer(self._piece_bytes) for _ in range(_BUFFERS)]
        writes: deque[Future[None]] = deque()
        for number, (piece, read) in enumerate(self._read_ahead(columns, readers, reading)):
            weight, scale = read.result()
            if len(writes) == _BUFFERS - 1:
                writes.popleft().result()
            blocks = buffers[number % _BUFFERS][: piece.num_bytes].reshape(-1, BLOCK_BYTES)
            encode_blocks(piece.column.layout, piece.first_block, weight, scale, blocks)
            writes.append(writing.submit(self._guarded, self._write, piece, blocks.reshape(-1)))
            if piece.is_last:
                self._finish(piece.column, writing, checking)
            self.meter.packed(piece.column.layout.file_name, piece.num_bytes)
            if self._stop.is_set():
                raise CancelledError
        self.meter.wait_for([*writes, *self._checks])

    def _read_ahead(
        self, columns: list[PackingColumn], readers: _AlternatingReaders, reading: ThreadPoolExecutor
    ) -> Iterator[tuple[_Piece, Future[_Rows]]]:
        """Yield pieces with their rows; while one is out, the next one is being read."""
        ahead: tuple[_Piece, Future[_Rows]] | None = None
        for column in columns:
            # The superblock comes last: without it a file does not open, whatever its name.
            begin = max(BLOCK_BYTES, column.done_bytes)
            for offset, num_bytes in pieces(begin, column.layout.file_bytes, self.extent_bytes):
                piece = _Piece(column, offset, num_bytes)
                following = (piece, reading.submit(self._guarded, readers.read, piece))
                if ahead is not None:
                    yield ahead
                ahead = following
        if ahead is not None:
            yield ahead

    def _finish(
        self, column: PackingColumn, writing: ThreadPoolExecutor, checking: ThreadPoolExecutor
    ) -> None:
        """Have a column sealed after the writes before it, then checked."""
        sealed = writing.submit(self._guarded, self._seal, column)
        self._checks.append(checking.submit(self._guarded, self._check, column, sealed))

    def _write(self, piece: _Piece, data: NDArray[np.uint8]) -> None:
        writer = self._writer(piece.column)
        writer.write(data, piece.offset_bytes)
        if piece.end_bytes % self.extent_bytes == 0 or piece.is_last:
            writer.sync()
            self.journal.extent(*piece.column.place, -(-piece.end_bytes // self.extent_bytes))

    def _seal(self, column: PackingColumn) -> None:
        """Write the superblock and make the file durable."""
        if column.is_adopted:
            return
        superblock = aligned_buffer(BLOCK_BYTES)
        superblock[:] = np.frombuffer(encode_superblock(column.layout), dtype=np.uint8)
        writer = self._writer(column)
        writer.write(superblock, 0)
        writer.sync()
        self._writers.pop(column.place).close()

    def _check(self, column: PackingColumn, sealed: Future[None]) -> None:
        """Read a complete file back; if all is well, give it its name."""
        sealed.result()
        path = column.path if column.is_adopted else column.partial
        check = check_file(path, column.layout, extent_bytes=self.extent_bytes, on_bytes=self._on_checked)
        faults = check.faults
        if faults and column.is_adopted:
            raise PackError(
                f"{path} is there without a manifest, and is not what belongs there: {faults[0]}",
                hint="delete the file to have it packed",
            )
        if faults:
            self.journal.forget(*column.place)
            raise PackError(
                f"{path} does not come back from the disk as it was written: {faults[0]}",
                hint="the disk or the memory of this machine is failing",
            )
        self.check_shards()
        self.journal.verified(*column.place, check.digests)
        if not column.is_adopted:
            os.rename(column.partial, column.path)
            sync_directory(column.path.parent)

    def _on_checked(self, num_bytes: int) -> None:
        self.meter.checked(num_bytes)
        if self._stop.is_set():
            raise CancelledError

    def _writer(self, column: PackingColumn) -> ExtentWriter:
        if column.place not in self._writers:
            self._writers[column.place] = ExtentWriter(column.partial, column.layout.file_bytes)
        return self._writers[column.place]


__all__ = ["PackingColumn", "Pipeline"]
