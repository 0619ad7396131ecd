"""The portable reader of packed columns: numpy and `preadv`, every returned row's checksum computed.

The oracle of the native reader, as `deskfleet_engram.portable` is for published shards, with the same contract.
A read that fails is tried again, then answered from the checkpoint when one is at hand, then raised; rows that exist
are never answered with zeros. Knows nothing of hashing or ranks.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.blocks import block_rows, check_headers, row_crcs, stored_crcs
from deskfleet_engram.errors import IdentityError, RowError, SourceError
from deskfleet_engram.file_check import check_outside
from deskfleet_engram.format import BLOCK_BYTES, ColumnLayout
from deskfleet_engram.geometry import EngramGeometry
from deskfleet_engram.manifest import (
    PackIdentity,
    check_model,
    check_same_identity,
    identity_of,
    read_manifest,
)
from deskfleet_engram.portable import NOT_MINE, decode_rows, not_mine_scale
from deskfleet_engram.source import Source, SourceTable, read_rows, source_hole

_RETRIES = 2
_MAX_RUN = 256  # blocks read by one call
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class PackCounters:
    """What a store did since it was made.

    `num_rows` rows asked for (NOT_MINE left out), `num_unique` of them after removing repeats within a call,
    `num_reads` system calls, `read_bytes` bytes read, `num_retries` blocks read again, `num_fallback` rows from the
    second source. `errors` counts faults by kind, also those that a retry repaired.
    """

    num_rows: int = 0
    num_unique: int = 0
    num_reads: int = 0
    read_bytes: int = 0
    num_retries: int = 0
    num_fallback: int = 0
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why one block did not give rows. `row` of the column failed its checksum; None: the block is at fault."""

    kind: str
    row: int | None
    detail: str


class PortablePack:
    """Reads rows of one layer from packed columns. Safe to use from several threads.

    `with PortablePack(pack_dir, layer) as store:` or `open()` and `close()`. Closing waits for running lookups.
    """

    def __init__(
        self,
        pack_dir: Path,
        layer: int,
        *,
        columns: Iterable[int] | None = None,
        geometry: EngramGeometry | None = None,
        token_map_sha256: str | None = None,
        second_source: Source | None = None,
        zero_for_others: bool = False,
    ) -> None:
        """Keep the description; nothing is opened yet.

        `columns` are those that will be read, by default all that the pack holds. `geometry` and
        `token_map_sha256` are the model's; a pack made for another model does not open. `second_source` answers for
        blocks that cannot be read. With `zero_for_others`, rows of other columns than `columns` are another rank's
        and give what NOT_MINE gives; otherwise asking for them is an error.
        """
        self.pack_dir = pack_dir
        self.layer = layer
        self._columns = None if columns is None else sorted(set(columns))
        self._geometry = geometry
        self._token_map_sha256 = token_map_sha256
        self._second_source = second_source
        self._zero_for_others = zero_for_others
        self._second_table: SourceTable | None = None
        self._identity: PackIdentity | None = None
        self._condition = threading.Condition()
        self._files: dict[int, _ColumnFile] | None = None
        self._num_running = 0
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    @property
    def identity(self) -> PackIdentity:
        """What the pack is of. Raises RowError before the first `open`."""
        if self._identity is None:
            raise RowError(f"{self.pack_dir} is not open")
        return self._identity

    @property
    def counters(self) -> PackCounters:
        """What was read so far."""
        with self._condition:
            return PackCounters(**self._counts, errors=dict(self._errors))

    def open(self) -> Self:
        """Open and check the manifest and each file's size, holes and superblock; a no-op when already open.

        Raises FormatError for a manifest that cannot be used, IdentityError when pack, model, second source or a
        file do not belong together, and RowError with `path` and `kind` for any other fault of a file.
        """
        with self._condition:
            if self._files is None:
                self._files = self._open_files()
        return self

    def close(self) -> None:
        """Close the files, after running lookups ended. Closing twice is allowed."""
        with self._condition:
            self._condition.wait_for(lambda: self._num_running == 0)
            files, self._files = self._files, None
        for file in (files or {}).values():
            file.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def gather(
        self, row_ids: NDArray[np.int64], out_codes: NDArray[np.uint8], out_scales: NDArray[np.uint8]
    ) -> None:
        """Fill the outputs with the rows named by `row_ids` int64 [...], ids of the layer's whole table.

        `out_codes` uint8 [..., weight_bytes] and `out_scales` uint8 [..., scale_bytes] receive the row's two parts.
        NOT_MINE (-1) gives zero codes and scales of one. A row named twice is read once.

        Raises RowError naming file, block, row and kind, also as attributes; the outputs are then untouched.
        """
        with self._running() as files:
            rows = self.identity.rows
            self._check_outputs(row_ids, out_codes, out_scales)
            mine = row_ids != NOT_MINE
            wanted, where = np.unique(row_ids[mine], return_inverse=True)
            # One row more than asked: the last one is what NOT_MINE gets.
            found = np.zeros((wanted.size + 1, rows.row_bytes), dtype=np.uint8)
            found[:, rows.weight_bytes :] = not_mine_scale(rows)
            for column, first, last in self._by_column(wanted):
                if column not in files and self._zero_for_others:
                    continue
                if column not in files:
                    raise RowError(
                        f"row {wanted[first]} of layer {self.layer} is in column {column}, which is not open here; "
                        f"open are columns {sorted(files)}",
                        row=int(wanted[first]) - self.identity.first_row(self.layer, column),
                        kind="missing",
                    )
                self._read(files[column], wanted[first:last], found[first:last])
            pick = np.full(row_ids.shape, wanted.size, dtype=np.int64)
            pick[mine] = where.reshape(-1)
            out_codes[...] = found[:, : rows.weight_bytes][pick]
            out_scales[...] = found[:, rows.weight_bytes :][pick]
            self._count(num_rows=int(mine.sum()), num_unique=int(wanted.size))

    def _open_files(self) -> dict[int, _ColumnFile]:
        manifest = read_manifest(self.pack_dir)
        identity = manifest.identity
        if self._geometry is not None:
            check_model(identity, self._geometry, token_map_sha256=self._token_map_sha256)
        if self._second_source is not None:
            wanted = identity_of(self._second_source)
            name = str(self._second_source.directory)
            check_same_identity(identity, wanted, found_name=str(self.pack_dir), wanted_name=name)
            self._second_table = self._second_source.table(self.layer)
            hole = source_hole(self._second_table, 0, self._second_table.num_rows)
            if hole is not None:
                raise RowError(
                    f"{hole[0]}: never written from byte {hole[1]} on; the second source is an incomplete copy",
                    path=hole[0],
                    kind="hole",
                )
        held = manifest.columns(self.layer)
        columns = held if self._columns is None else self._columns
        missing = sorted(set(columns) - set(held))
        if missing or not columns:
            raise IdentityError(
                f"{self.pack_dir} does not hold columns {missing} of layer {self.layer}; it holds {list(held)}"
            )
        self._identity = identity
        files: dict[int, _ColumnFile] = {}
        try:
            for column in columns:
                first_row = identity.first_row(self.layer, column)
                files[column] = _ColumnFile(self.pack_dir, identity.layout(self.layer, column), first_row)
        except BaseException:
            for file in files.values():
                file.close()
            raise
        return files

    @contextmanager
    def _running(self) -> Iterator[dict[int, _ColumnFile]]:
        with self._condition:
            if self._files is None:
                raise RowError(f"{self.pack_dir} is not open")
            files = self._files
            self._num_running += 1
        try:
            yield files
        finally:
            with self._condition:
                self._num_running -= 1
                self._condition.notify_all()

    def _check_outputs(
        self, row_ids: NDArray[np.int64], out_codes: NDArray[np.uint8], out_scales: NDArray[np.uint8]
    ) -> None:
        rows = self.identity.rows
        if row_ids.dtype != np.int64:
            raise RowError(f"layer {self.layer}: row ids must be int64, got {row_ids.dtype}")
        for name, array, width in (
            ("out_codes", out_codes, rows.weight_bytes),
            ("out_scales", out_scales, rows.scale_bytes),
        ):
            expected = (*row_ids.shape, width)
            if array.shape != expected or array.dtype != np.uint8:
                raise RowError(
                    f"layer {self.layer}: {name} must be uint8 of shape {expected}, got {array.dtype} of shape "
                    f"{array.shape}"
                )

    def _by_column(self, wanted: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """Yield column and [first, last) index range of `wanted`, which ascends. Raises RowError."""
        geometry = self.identity.geometry
        position = geometry.spec.layer_ids.index(self.layer)
        num_rows = geometry.spec.num_embeddings[position]
        if wanted.size and (wanted[0] < 0 or wanted[-1] >= num_rows):
            row = wanted[0] if wanted[0] < 0 else wanted[-1]
            raise RowError(f"layer {self.layer}: row {row} is outside 0..{num_rows - 1}")
        edges = np.searchsorted(wanted, [*geometry.offsets[position], num_rows]).tolist()
        for column, (first, last) in enumerate(itertools.pairwise(edges)):
            if first < last:
                yield column, first, last

    def _read(self, file: _ColumnFile, wanted: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Fill `out` with rows of one column; `wanted` are ids of the table, ascending."""
        local = wanted - file.first_row
        per_block = file.layout.rows.rows_per_block
        numbers, which = np.unique(local // per_block, return_inverse=True)
        blocks, unread = self._read_blocks(file, numbers)
        rows = block_rows(file.layout, blocks)[which, local % per_block]
        problems = _find_problems(file.layout, numbers, blocks, which, local, rows)
        problems.update(unread)
        out[...] = rows
        for number in sorted(problems):
            inside = which == number
            out[inside] = self._read_again(file, int(numbers[number]), local[inside], problems[number])

    def _read_blocks(
        self, file: _ColumnFile, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], dict[int, _Problem]]:
        """Return the blocks, neighbours read together, and what went wrong by index."""
        blocks = np.zeros((numbers.size, BLOCK_BYTES), dtype=np.uint8)
        problems: dict[int, _Problem] = {}
        cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
        edges = [0, *cuts.tolist(), int(numbers.size)]
        for begin, end in itertools.pairwise(edges):
            for first in range(begin, end, _MAX_RUN):
                last = min(end, first + _MAX_RUN)
                problem = self._try_read(file, int(numbers[first]), blocks[first:last])
                if problem is not None and last - first == 1:
                    problems[first] = problem
                elif problem is not None:
                    problems.update(self._read_singly(file, numbers, blocks, range(first, last)))
        return blocks, problems

    def _read_singly(
        self, file: _ColumnFile, numbers: NDArray[np.int64], blocks: NDArray[np.uint8], indices: range
    ) -> dict[int, _Problem]:
        """Read blocks that failed together one by one; return those that still fail."""
        tried = {i: self._try_read(file, int(numbers[i]), blocks[i : i + 1]) for i in indices}
        return {index: problem for index, problem in tried.items() if problem is not None}

    def _try_read(self, file: _ColumnFile, block: int, out: NDArray[np.uint8]) -> _Problem | None:
        """Read neighbouring blocks; return what went wrong."""
        self._count(num_reads=1, read_bytes=out.nbytes)
        try:
            count = os.preadv(file.fd, [out.reshape(-1).data], (1 + block) * BLOCK_BYTES)
        except OSError as error:
            return _Problem("io", None, error.strerror or str(error))
        if count != out.nbytes:
            return _Problem("short", None, f"{count} bytes came where {out.nbytes} were asked for")
        return None

    def _read_again(
        self, file: _ColumnFile, block: int, local: NDArray[np.int64], problem: _Problem
    ) -> NDArray[np.uint8]:
        """Return rows of one block that failed: from the disk at a further try, or from the second source."""
        layout = file.layout
        stored: NDArray[np.uint32] | None = None
        self._error(problem)
        which = np.zeros(local.size, dtype=np.int64)
        for _ in range(_RETRIES):
            self._count(num_retries=1)
            file.forget(block)
            fresh = np.zeros((1, BLOCK_BYTES), dtype=np.uint8)
            found = self._try_read(file, block, fresh)
            if found is None:
                rows: NDArray[np.uint8] = block_rows(layout, fresh)[0, local % layout.rows.rows_per_block]
                numbers = np.array([block])
                if check_headers(layout, numbers, fresh)[1][0]:
                    stored = stored_crcs(layout, fresh)[0, local % layout.rows.rows_per_block]
                found = _find_problems(layout, numbers, fresh, which, local, rows).get(0)
                if found is None:
                    return rows
            problem = found
            self._error(problem)
        return self._from_second_source(file, block, local, problem, stored)

    def _from_second_source(
        self,
        file: _ColumnFile,
        block: int,
        local: NDArray[np.int64],
        problem: _Problem,
        stored: NDArray[np.uint32] | None,
    ) -> NDArray[np.uint8]:
        """Return the checkpoint's rows, held against the pack's checksums where those can be trusted."""
        row = int(local[0]) if problem.row is None else problem.row

        def failure(reason: str = "") -> RowError:
            message = f"{file.path}: block {block}, row {row}: {problem.kind}: {problem.detail}{reason}"
            return RowError(message, path=file.path, block=block, row=row, kind=problem.kind)

        if self._second_table is None:
            raise failure()
        try:
            rows = read_rows(self._second_table, local + file.first_row)
        except SourceError as error:
            raise failure(f"; and {error.message}") from error
        if stored is not None and (row_crcs(file.layout, local, rows) != stored).any():
            raise failure("; and the checkpoint's row does not match the checksum either")
        self._count(num_fallback=local.size)
        return rows

    def _count(self, **counts: int) -> None:
        with self._condition:
            self._counts.update(counts)

    def _error(self, problem: _Problem) -> None:
        with self._condition:
            self._errors[problem.kind] += 1


class _ColumnFile:
    """One open file, checked from outside."""

    def __init__(self, pack_dir: Path, layout: ColumnLayout, first_row: int) -> None:
        self.path = pack_dir / layout.file_name
        self.layout = layout
        self.first_row = first_row
        for fault in check_outside(self.path, layout):
            message = f"{self.path}: {fault.kind}: {fault.detail}"
            if fault.kind == "identity":
                raise IdentityError(message)
            raise RowError(message, path=self.path, block=fault.block, kind=fault.kind)
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RowError(
                f"{self.path}: cannot open: {error.strerror}", path=self.path, kind="io"
            ) from error

    def forget(self, block: int) -> None:
        """Drop the block from the page cache, so that the next read asks the disk."""
        os.posix_fadvise(self.fd, (1 + block) * BLOCK_BYTES, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self.fd)


def decode_nvfp4_rows(
    codes: NDArray[np.uint8], scales: NDArray[np.uint8], global_scale: np.float32
) -> NDArray[np.float32]:
    """Return float32 [..., D]: E2M1 `codes` [..., D / 2] times their E4M3 `scales` [..., S] times `global_scale`.

    The low half of a byte is the earlier value. The product of code and scale is exact; the last one is rounded.
    """
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    values = np.where(nibbles & 8, -_E2M1[nibbles & 7], _E2M1[nibbles & 7])
    # An E8M0 byte of 127 is a factor of one.
    factors = decode_rows(scales, np.full((*scales.shape[:-1], 1), 127, dtype=np.uint8))
    block = values.shape[-1] // scales.shape[-1]
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(values * np.repeat(factors, block, axis=-1) * global_scale, dtype=np.float32)


def _find_problems(
    layout: ColumnLayout,
    numbers: NDArray[np.int64],
    blocks: NDArray[np.uint8],
    which: NDArray[np.int64],
    local: NDArray[np.int64],
    rows: NDArray[np.uint8],
) -> dict[int, _Problem]:
    """Return what is wrong by index of block: its header, or the first wanted row that fails its checksum.

    Row `local[i]` of the column, with bytes `rows[i]`, is in block `numbers[which[i]]`.
    """
    per_block = layout.rows.rows_per_block
    faults, sound = check_headers(layout, numbers, blocks)
    by_number = {fault.block: fault for fault in faults}
    problems: dict[int, _Problem] = {}
    fits = row_crcs(layout, local, rows) == stored_crcs(layout, blocks)[which, local % per_block]
    for index in np.flatnonzero(~fits | ~sound[which]).tolist():
        number = int(which[index])
        fault = by_number.get(int(numbers[number]))
        kind, detail = ("checksum", "the row's bytes do not match its checksum")
        if fault is not None:
            kind, detail = fault.kind, fault.detail
        problems.setdefault(number, _Problem(kind, int(local[index]), detail))
    return problems


__all__ = ["PackCounters", "PortablePack", "decode_nvfp4_rows"]
