"""A rank's rows of one layer as stock GPU kernels address them: all code bytes, then all scale bytes, no header.

Written once from a pack, every row checked on the way, for devices whose kernels may follow a pointer into a file
mapping. Reading it checks nothing: `open_split` compares a sample with the pack. Knows no engine and no CUDA.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.errors import FormatError, IdentityError
from deskfleet_engram.fileio import replace_file
from deskfleet_engram.host import HostTable

SPLIT_FORMAT = "EGS1"

_CHUNK_ROWS = 1 << 15
_SAMPLES = 256


@dataclass(frozen=True, slots=True, eq=False)
class SplitFile:
    """A mapped file. `address` is where its first byte lies in this process; it stays as long as this object does."""

    path: Path
    num_rows: int
    mapping: mmap.mmap
    content: NDArray[np.uint8]

    @property
    def address(self) -> int:
        """Address of the code bytes; the scale bytes follow."""
        return int(self.content.ctypes.data)


def split_path(directory: Path, table: HostTable) -> Path:
    """Return where the rows of a layer's columns belong."""
    return directory / f"L{table.layer:02d}-c{table.columns[0]:02d}-{table.columns[-1]:02d}.rows"


def write_split(
    table: HostTable,
    pack_sha256: str,
    directory: Path,
    *,
    on_rows: Callable[[int], None] | None = None,
) -> Path:
    """Write the table's rows and return the file. `on_rows` hears how many rows are written so far.

    A file has its name only when it is complete and on the disk. Raises RowError when the pack does not give a row,
    and FormatError when the file cannot be written.
    """
    path = split_path(directory, table)
    partial = path.with_suffix(".partial")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, _num_bytes(table))
            _write_rows(table, file.fileno(), on_rows)
            os.fsync(file.fileno())
        partial.replace(path)
        replace_file(path.with_suffix(".json"), json.dumps(_description(table, pack_sha256)).encode())
    except OSError as error:
        raise FormatError(f"{path}: cannot write: {error.strerror or error}") from error
    return path


def open_split(table: HostTable, pack_sha256: str, directory: Path) -> SplitFile:
    """Map the rows of a table and compare a sample of every column with the pack.

    Raises IdentityError when the file is of other rows, FormatError when it is missing, cut off, has holes or cannot
    be mapped, and RowError when the pack does not give a row of the sample.
    """
    path = split_path(directory, table)
    try:
        found = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size != _num_bytes(table):
                raise FormatError(f"{path} has {status.st_size} bytes, not {_num_bytes(table)}")
            if status.st_blocks * 512 < status.st_size:
                raise FormatError(f"{path} has holes", hint="remove it and write it again")
            mapping = mmap.mmap(file.fileno(), status.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except ValueError as error:
        raise FormatError(f"{path.with_suffix('.json')}: not JSON: {error}") from error
    except OSError as error:
        raise FormatError(
            f"{error.filename or path}: cannot map: {error.strerror or error}",
            hint="write it from the pack first",
        ) from error
    wanted = _description(table, pack_sha256)
    if found != wanted:
        raise IdentityError(f"{path} holds {found}, but {wanted} is read")
    mapping.madvise(mmap.MADV_RANDOM)  # rows are never read in order: reading ahead costs hundredfold
    split = SplitFile(path, table.num_rows, mapping, np.frombuffer(mapping, np.uint8))
    _compare_sample(table, split)
    return split


def _compare_sample(table: HostTable, split: SplitFile) -> None:
    local = np.unique(np.linspace(0, table.num_rows - 1, _SAMPLES * len(table.columns)).astype(np.int64))
    border = table.num_rows * table.head_dim
    codes = split.content[:border].reshape(table.num_rows, table.head_dim)[local]
    scales = split.content[border:].reshape(table.num_rows, table.num_scales)[local]
    found = np.concatenate([codes, scales], axis=1)
    differs = (found != table.rows(local + table.first_row)).any(axis=1)
    if differs.any():
        row = int(local[differs.argmax()]) + table.first_row
        raise IdentityError(
            f"{split.path}: row {row} is not what the pack holds", hint="remove it and write it again"
        )


def _write_rows(table: HostTable, fd: int, on_rows: Callable[[int], None] | None) -> None:
    border = table.num_rows * table.head_dim
    for begin in range(0, table.num_rows, _CHUNK_ROWS):
        end = min(begin + _CHUNK_ROWS, table.num_rows)
        codes = np.empty((end - begin, table.head_dim), np.uint8)
        scales = np.empty((end - begin, table.num_scales), np.uint8)
        table.gather(np.arange(begin, end) + table.first_row, codes, scales)
        _write_all(fd, codes, begin * table.head_dim)
        _write_all(fd, scales, border + begin * table.num_scales)
        if on_rows is not None:
            on_rows(end)


def _write_all(fd: int, content: NDArray[np.uint8], offset: int) -> None:
    left = content.reshape(-1).data
    while left:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written


def _num_bytes(table: HostTable) -> int:
    return table.num_rows * (table.head_dim + table.num_scales)


def _description(table: HostTable, pack_sha256: str) -> dict[str, Any]:
    return {
        "format": SPLIT_FORMAT,
        "pack_sha256": pack_sha256,
        "layer": table.layer,
        "columns": list(table.columns),
        "first_row": table.first_row,
        "num_rows": table.num_rows,
    }


__all__ = ["SPLIT_FORMAT", "SplitFile", "open_split", "split_path", "write_split"]
