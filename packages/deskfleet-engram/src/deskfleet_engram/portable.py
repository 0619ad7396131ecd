"""The portable row reader: rows straight from a published safetensors shard, with numpy and `preadv`.

It is the oracle of the faster readers: `gather` is a pure function of row ids and file, and whatever another
reader returns must be these bytes. The table is never loaded or mapped; a lookup reads the rows it names.
Knows nothing of hashing, columns or ranks.
"""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.errors import GeometryError, RowError

NOT_MINE = -1
"""Row id of a row that another rank owns."""

NOT_MINE_SCALE = 127
"""Scale byte of a NOT_MINE row: 2**0, so that its zero codes decode to plain zeros."""

_CODE_BYTES = 1  # one F8_E4M3 code per value, one F8_E8M0 byte per scale


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where one table lies: two byte ranges of one file, rows contiguous in both.

    Offsets are absolute in the file (safetensors header included). A row is `head_dim` F8_E4M3 codes and
    `head_dim // scale_block` F8_E8M0 scales. `table` is the name that errors use; `layer` the number that the native
    reader's use, where it is known.
    """

    path: Path
    weight_offset_bytes: int
    scale_offset_bytes: int
    num_rows: int
    head_dim: int
    scale_block: int = 32
    table: str = "engram table"
    layer: int | None = None

    @property
    def num_scales(self) -> int:
        """Scales per row."""
        return self.head_dim // self.scale_block

    @property
    def row_bytes(self) -> int:
        """Bytes read for one row: codes and scales."""
        return (self.head_dim + self.num_scales) * _CODE_BYTES


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

    def __init__(self, source: RowSource) -> None:
        """Keep the description; nothing is opened yet. Raises GeometryError when it cannot be right."""
        _check_source(source)
        self.source = source
        self._condition = threading.Condition()
        self._fd: int | None = None
        self._num_running = 0
        self._counters = ReadCounters()

    def open(self) -> Self:
        """Open the file and check that it is long enough for the whole table; a no-op when already open.

        Raises RowError naming the file.
        """
        with self._condition:
            if self._fd is None:
                self._fd = _open_checked(self.source)
        return self

    def close(self) -> None:
        """Close the file, after running lookups ended. Closing twice is allowed."""
        with self._condition:
            self._condition.wait_for(lambda: self._num_running == 0)
            fd, self._fd = self._fd, None
        if fd is not None:
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

        `out_codes` uint8 [..., head_dim] receives E4M3 codes, `out_scales` uint8 [..., num_scales] E8M0
        bytes; a value is `e4m3(code) * 2**(byte - 127)` (specification §7.4). A row id NOT_MINE (-1)
        gives zero codes and scale bytes of 127. A row named twice is read once.

        Raises RowError for a row outside the table, and when the file is closed, ends early or fails; the
        outputs are then untouched, so a row that exists is never answered with zeros.
        """
        _check_outputs(self.source, row_ids, out_codes, out_scales)
        mine = row_ids != NOT_MINE
        wanted, where = np.unique(row_ids[mine], return_inverse=True)
        _check_rows(self.source, wanted)
        # One row more than asked: the last one is what NOT_MINE gets.
        codes = np.zeros((wanted.size + 1, self.source.head_dim), dtype=np.uint8)
        scales = np.full((wanted.size + 1, self.source.num_scales), NOT_MINE_SCALE, dtype=np.uint8)
        num_reads = self._read(wanted, codes, scales)
        pick = np.full(row_ids.shape, wanted.size, dtype=np.int64)
        pick[mine] = where.reshape(-1)
        out_codes[...] = codes[pick]
        out_scales[...] = scales[pick]
        self._count(int(mine.sum()), int(wanted.size), num_reads)

    def _read(self, wanted: NDArray[np.int64], codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> int:
        """Read ascending rows, neighbours together; return the number of system calls."""
        fd = self._enter()
        try:
            num_reads = 0
            for first, last in _runs(wanted):
                row = int(wanted[first])
                for offset, target in (
                    (self.source.weight_offset_bytes, codes),
                    (self.source.scale_offset_bytes, scales),
                ):
                    begin = offset + row * target.shape[1]
                    num_reads += _read_exactly(self.source, fd, row, begin, target[first:last])
            return num_reads
        finally:
            self._leave()

    def _enter(self) -> int:
        with self._condition:
            if self._fd is None:
                raise RowError(f"{self.source.path}: {self.source.table} is not open")
            self._num_running += 1
            return self._fd

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
                read_bytes=so_far.read_bytes + num_unique * self.source.row_bytes,
                num_reads=so_far.num_reads + num_reads,
            )


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
    if source.num_rows < 1 or source.head_dim < 1 or source.scale_block < 1:
        raise GeometryError(
            f"{source.table}: {source.num_rows} rows of {source.head_dim} values in blocks of "
            f"{source.scale_block}; each must be at least 1"
        )
    if source.head_dim % source.scale_block:
        raise GeometryError(
            f"{source.table}: rows of {source.head_dim} values are no whole number of scale blocks of "
            f"{source.scale_block}"
        )
    weight, scale = _spans(source)
    if min(weight[0], scale[0]) < 0 or (weight[0] < scale[1] and scale[0] < weight[1]):
        raise GeometryError(
            f"{source.table}: weight bytes {weight[0]}..{weight[1]} and scale bytes {scale[0]}..{scale[1]} "
            "must not overlap or be negative"
        )


def _spans(source: RowSource) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the [begin, end) byte ranges of weights and scales."""
    weight, scale = source.weight_offset_bytes, source.scale_offset_bytes
    return (
        (weight, weight + source.num_rows * source.head_dim * _CODE_BYTES),
        (scale, scale + source.num_rows * source.num_scales * _CODE_BYTES),
    )


def _open_checked(source: RowSource) -> int:
    needed = max(end for _, end in _spans(source))
    try:
        fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise RowError(f"{source.path}: cannot open {source.table}: {error.strerror}") from error
    size = os.fstat(fd).st_size
    if size < needed:
        os.close(fd)
        raise RowError(f"{source.path}: {source.table} ends at byte {needed}, but the file has {size} bytes")
    return fd


def _check_outputs(
    source: RowSource,
    row_ids: NDArray[np.int64],
    out_codes: NDArray[np.uint8],
    out_scales: NDArray[np.uint8],
) -> None:
    if row_ids.dtype != np.int64:
        raise RowError(f"{source.table}: row ids must be int64, got {row_ids.dtype}")
    for name, array, width in (
        ("out_codes", out_codes, source.head_dim),
        ("out_scales", out_scales, source.num_scales),
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


def _read_exactly(source: RowSource, fd: int, row: int, begin: int, target: NDArray[np.uint8]) -> int:
    """Fill `target` from byte `begin`; return the number of system calls, for one may give less."""
    buffer = target.reshape(-1).data
    done = num_reads = 0
    while done < len(buffer):
        at = row + done // target.shape[1]
        try:
            count = os.preadv(fd, [buffer[done:]], begin + done)
        except OSError as error:
            raise RowError(f"{source.path}: reading row {at} of {source.table}: {error.strerror}") from error
        num_reads += 1
        if count == 0:
            raise RowError(
                f"{source.path}: the file ends at byte {begin + done}, inside row {at} of {source.table}"
            )
        done += count
    return num_reads


__all__ = ["NOT_MINE", "NOT_MINE_SCALE", "PortableStore", "ReadCounters", "RowSource", "decode_rows"]
