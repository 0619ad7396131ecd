"""The portable row reader: rows straight from a published safetensors shard, with numpy and `preadv`.

It is the oracle of the faster readers: `gather` is a pure function of row ids and file, and whatever another
reader returns must be these bytes. The table is never loaded or mapped; a lookup reads the rows it names.
Knows nothing of hashing, columns or ranks.
"""

from __future__ import annotations

import itertools
import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.errors import GeometryError, RowError
from deskfleet_engram.fileio import hole_within
from deskfleet_engram.format import NVFP4_FORMAT, RowFormat

NOT_MINE = -1
"""Row id of a row that another rank owns."""

NOT_MINE_SCALE = 127
"""Scale byte of a NOT_MINE row: 2**0, so that its zero codes decode to plain zeros."""

NOT_MINE_NVFP4_SCALE = 0x38
"""Scale byte of a NOT_MINE row of NVFP4: the E4M3 code of 1, so that zero codes decode to plain zeros."""


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where one table lies: a byte range of codes and one of scales, rows contiguous in both.

    Offsets are absolute in the file (safetensors header included). `scale_path` is the scales' file where it is not
    `path`. `table` is the name that errors use; `layer` the number that the native reader's use, where it is known.
    `global_scale` is the factor of NVFP4 rows, which only decoding needs.
    """

    path: Path
    weight_offset_bytes: int
    scale_offset_bytes: int
    num_rows: int
    rows: RowFormat
    table: str = "engram table"
    layer: int | None = None
    scale_path: Path | None = None
    global_scale: float = 1.0

    @property
    def paths(self) -> tuple[Path, Path]:
        """The file of the codes and that of the scales."""
        return self.path, self.scale_path or self.path


@dataclass(frozen=True, slots=True)
class ReadCounters:
    """What a store did since it was made.

    `num_rows` rows asked for (NOT_MINE left out), `num_unique` rows read after removing repeats within a
    call, `read_bytes` bytes read, `num_reads` system calls.
    """

    num_rows: int = 0
    num_unique: int = 0
    read_bytes: int = 0
    num_reads: int = 0


class PortableStore:
    """Reads rows of one table in place. Safe to use from several threads.

    `with PortableStore(source) as store:` or `open()` and `close()`. Closing waits for running lookups.
    """

    def __init__(self, source: RowSource, *, allow_holes: bool = False) -> None:
        """Keep the description; nothing is opened yet. Raises GeometryError when it cannot be right.

        Files with holes, as incomplete copies have, do not open unless `allow_holes`: a hole reads as zeros.
        """
        _check_source(source)
        self.source = source
        self._allow_holes = allow_holes
        self._condition = threading.Condition()
        self._fds: tuple[int, int] | None = None  # of codes and scales
        self._num_running = 0
        self._counters = ReadCounters()

    def open(self) -> Self:
        """Open the files and check that they hold the whole table; a no-op when already open.

        Raises RowError naming the file.
        """
        with self._condition:
            if self._fds is None:
                self._fds = _open_checked(self.source, self._allow_holes)
        return self

    def close(self) -> None:
        """Close the files, after running lookups ended. Closing twice is allowed."""
        with self._condition:
            self._condition.wait_for(lambda: self._num_running == 0)
            fds, self._fds = self._fds, None
        for fd in fds or ():
            os.close(fd)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def counters(self) -> ReadCounters:
        """What was read so far."""
        with self._condition:
            return self._counters

    def gather(
        self, row_ids: NDArray[np.int64], out_codes: NDArray[np.uint8], out_scales: NDArray[np.uint8]
    ) -> None:
        """Fill the outputs with the rows named by `row_ids` int64 [...].

        `out_codes` uint8 [..., weight_bytes] and `out_scales` uint8 [..., scale_bytes] receive the row's two parts;
        `decode_rows` (specification §7.4) and `decode_nvfp4_rows` say what they mean. A row id NOT_MINE (-1) gives zero
        codes and scales of one. A row named twice is read once.

        Raises RowError for a row outside the table, and when the file is closed, ends early or fails; the
        outputs are then untouched, so a row that exists is never answered with zeros.
        """
        _check_outputs(self.source, row_ids, out_codes, out_scales)
        mine = row_ids != NOT_MINE
        wanted, where = np.unique(row_ids[mine], return_inverse=True)
        _check_rows(self.source, wanted)
        # One row more than asked: the last one is what NOT_MINE gets.
        rows = self.source.rows
        codes = np.zeros((wanted.size + 1, rows.weight_bytes), dtype=np.uint8)
        scales = np.full((wanted.size + 1, rows.scale_bytes), not_mine_scale(rows), dtype=np.uint8)
        num_reads = self._read(wanted, codes, scales)
        pick = np.full(row_ids.shape, wanted.size, dtype=np.int64)
        pick[mine] = where.reshape(-1)
        out_codes[...] = codes[pick]
        out_scales[...] = scales[pick]
        self._count(int(mine.sum()), int(wanted.size), num_reads)

    def _read(self, wanted: NDArray[np.int64], codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> int:
        """Read ascending rows, neighbours together; return the number of system calls."""
        fds = self._enter()
        offsets = (self.source.weight_offset_bytes, self.source.scale_offset_bytes)
        parts = list(zip(fds, self.source.paths, offsets, (codes, scales), strict=True))
        try:
            num_reads = 0
            for first, last in _runs(wanted):
                row = int(wanted[first])
                for fd, path, offset, target in parts:
                    begin = offset + row * target.shape[1]
                    num_reads += _read_exactly(fd, path, self.source.table, row, begin, target[first:last])
            return num_reads
        finally:
            self._leave()

    def _enter(self) -> tuple[int, int]:
        with self._condition:
            if self._fds is None:
                raise RowError(f"{self.source.path}: {self.source.table} is not open")
            self._num_running += 1
            return self._fds

    def _leave(self) -> None:
        with self._condition:
            self._num_running -= 1
            self._condition.notify_all()

    def _count(self, num_rows: int, num_unique: int, num_reads: int) -> None:
        with self._condition:
            so_far = self._counters
            self._counters = ReadCounters(
                num_rows=so_far.num_rows + num_rows,
                num_unique=so_far.num_unique + num_unique,
                read_bytes=so_far.read_bytes + num_unique * self.source.rows.row_bytes,
                num_reads=so_far.num_reads + num_reads,
            )


def not_mine_scale(rows: RowFormat) -> int:
    """Return the scale byte of a NOT_MINE row."""
    return NOT_MINE_NVFP4_SCALE if rows.format_id == NVFP4_FORMAT else NOT_MINE_SCALE


def decode_rows(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return float32 [..., D]: E4M3 `codes` [..., D] times 2**(byte - 127) of their E8M0 `scales` [..., S].

    Exact wherever the product is a float32; code 0x7f or 0xff and scale 255 give NaN, as the formats say.
    """
    block = codes.shape[-1] // scales.shape[-1]
    factors = np.repeat(_E8M0_VALUES[scales], block, axis=-1)
    with np.errstate(over="ignore"):  # beyond float32 is inf, as the arithmetic says
        return np.multiply(_E4M3_VALUES[codes], factors, dtype=np.float32)


def _e8m0_values() -> NDArray[np.float32]:
    """Return float32 [256]: the value of every E8M0 byte (255 is NaN)."""
    values = np.full(256, np.nan, dtype=np.float32)
    values[:255] = np.ldexp(np.float32(1), np.arange(255) - 127)
    return values


def _e4m3_values() -> NDArray[np.float32]:
    """Return float32 [256]: the value of every E4M3 code (bias 7, no infinities, 0x7f and 0xff NaN)."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    values = np.empty(256, dtype=np.float32)
    values[:] = np.ldexp(np.where(exponent == 0, mantissa, mantissa + 8), np.maximum(exponent, 1) - 10)
    values[(code & 127) == 127] = np.nan
    values[code > 127] *= -1
    return values


_E8M0_VALUES = _e8m0_values()
_E4M3_VALUES = _e4m3_values()


def _check_source(source: RowSource) -> None:
    if source.num_rows < 1:
        raise GeometryError(f"{source.table}: {source.num_rows} rows; there must be at least 1")
    weight, scale = _spans(source)
    is_one_file = len(set(source.paths)) == 1
    if min(weight[0], scale[0]) < 0 or (is_one_file and weight[0] < scale[1] and scale[0] < weight[1]):
        raise GeometryError(
            f"{source.table}: weight bytes {weight[0]}..{weight[1]} and scale bytes {scale[0]}..{scale[1]} "
            "must not overlap or be negative"
        )


def _spans(source: RowSource) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the [begin, end) byte ranges of weights and scales."""
    weight, scale = source.weight_offset_bytes, source.scale_offset_bytes
    return (
        (weight, weight + source.num_rows * source.rows.weight_bytes),
        (scale, scale + source.num_rows * source.rows.scale_bytes),
    )


def _open_checked(source: RowSource, allow_holes: bool) -> tuple[int, int]:
    """Open the files of codes and scales; where both are one, it is opened twice."""
    fds: list[int] = []
    with ExitStack() as opened:
        for path, (begin, needed) in zip(source.paths, _spans(source), strict=True):
            try:
                fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                raise RowError(f"{path}: cannot open {source.table}: {error.strerror}") from error
            opened.callback(os.close, fds[-1])
            size = os.fstat(fds[-1]).st_size
            if size < needed:
                raise RowError(f"{path}: {source.table} ends at byte {needed}, but the file has {size} bytes")
            hole = None if allow_holes else hole_within(fds[-1], begin, needed)
            if hole is not None:
                raise RowError(
                    f"{path}: never written from byte {hole} on; {source.table} spans {begin} to {needed}",
                    path=path,
                    kind="hole",
                    hint="the file is an incomplete copy; fetch it again",
                )
        opened.pop_all()  # all is well: they stay open
    return fds[0], fds[1]


def _check_outputs(
    source: RowSource,
    row_ids: NDArray[np.int64],
    out_codes: NDArray[np.uint8],
    out_scales: NDArray[np.uint8],
) -> None:
    if row_ids.dtype != np.int64:
        raise RowError(f"{source.table}: row ids must be int64, got {row_ids.dtype}")
    for name, array, width in (
        ("out_codes", out_codes, source.rows.weight_bytes),
        ("out_scales", out_scales, source.rows.scale_bytes),
    ):
        expected = (*row_ids.shape, width)
        if array.shape != expected or array.dtype != np.uint8:
            raise RowError(
                f"{source.table}: {name} must be uint8 of shape {expected}, got {array.dtype} of shape "
                f"{array.shape}"
            )


def _check_rows(source: RowSource, wanted: NDArray[np.int64]) -> None:
    """`wanted` ascends, so its ends tell."""
    if wanted.size and (wanted[0] < 0 or wanted[-1] >= source.num_rows):
        row = wanted[0] if wanted[0] < 0 else wanted[-1]
        raise RowError(f"{source.table}: row {row} is outside 0..{source.num_rows - 1}")


def _runs(wanted: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return [first, last) index ranges of `wanted` (ascending, unique) whose rows are consecutive."""
    if not wanted.size:
        return []
    cuts = np.flatnonzero(np.diff(wanted) != 1) + 1
    edges = [0, *cuts.tolist(), int(wanted.size)]
    return list(itertools.pairwise(edges))


def _read_exactly(fd: int, path: Path, table: str, row: int, begin: int, target: NDArray[np.uint8]) -> int:
    """Fill `target` from byte `begin`; return the number of system calls, for one may give less."""
    buffer = target.reshape(-1).data
    done = num_reads = 0
    while done < len(buffer):
        at = row + done // target.shape[1]
        try:
            count = os.preadv(fd, [buffer[done:]], begin + done)
        except OSError as error:
            raise RowError(f"{path}: reading row {at} of {table}: {error.strerror}") from error
        num_reads += 1
        if count == 0:
            raise RowError(f"{path}: the file ends at byte {begin + done}, inside row {at} of {table}")
        done += count
    return num_reads


__all__ = [
    "NOT_MINE",
    "NOT_MINE_NVFP4_SCALE",
    "NOT_MINE_SCALE",
    "PortableStore",
    "ReadCounters",
    "RowSource",
    "decode_rows",
    "not_mine_scale",
]
