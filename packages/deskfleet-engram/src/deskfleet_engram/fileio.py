"""Large reads and writes that leave the page cache alone: aligned buffers, O_DIRECT, reservation, holes.

On machines where CPU and GPU share memory, every cached page of a 200 GB copy is memory taken from the model.
O_DIRECT is used where the file system has it; elsewhere pages are dropped behind. Errors are OSError, the caller
knows what the file was for.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 4096
"""What O_DIRECT wants of memory, offsets and lengths; no disk asks for more."""

_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class ShortReadError(OSError):
    """The file ended before the bytes that were asked for; `offset_bytes` is where."""

    def __init__(self, path: Path, offset_bytes: int) -> None:
        super().__init__(errno.EIO, f"the file ends at byte {offset_bytes}", str(path))
        self.offset_bytes = offset_bytes


def aligned_buffer(num_bytes: int) -> NDArray[np.uint8]:
    """Return uint8 [num_bytes] whose memory begins at a page, so that O_DIRECT accepts it."""
    rounded = max(1, -(-num_bytes // ALIGNMENT)) * ALIGNMENT
    memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype=np.uint8)[:num_bytes]


class SequentialReader:
    """Reads ranges of one file into a buffer of its own. Not to be shared between threads.

    `with SequentialReader(path, max_bytes) as reader:`; `max_bytes` is the longest range. `is_direct` tells
    whether reads bypass the page cache; where they cannot, pages are dropped after each read.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Open `path`. Raises OSError."""
        self.path = path
        self._buffer = aligned_buffer(max_bytes + 2 * ALIGNMENT)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            self.is_direct = True
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            self._fd = self._open_buffered()

    def read(self, offset_bytes: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return a view of the bytes, good until the next read. Raises ShortReadError or OSError."""
        first = offset_bytes // ALIGNMENT * ALIGNMENT
        skip = offset_bytes - first
        aligned = -(-(skip + num_bytes) // ALIGNMENT) * ALIGNMENT
        target = self._buffer.data[:aligned]
        done = 0
        while done < skip + num_bytes:
            count = self._read_some(target[done:], first + done)
            if count == 0:
                raise ShortReadError(self.path, first + done)
            done += count
            # A direct read may stop short only at the file's end, and then off the alignment.
            if self.is_direct and done % ALIGNMENT and done < skip + num_bytes:
                raise ShortReadError(self.path, first + done)
        if not self.is_direct:
            os.posix_fadvise(self._fd, first, aligned, os.POSIX_FADV_DONTNEED)
        return self._buffer[skip : skip + num_bytes]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_buffered(self) -> int:
        self.is_direct = False
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return fd

    def _read_some(self, target: memoryview, offset_bytes: int) -> int:
        try:
            return os.preadv(self._fd, [target], offset_bytes)
        except OSError as error:
            # Some file systems accept the flag at open and refuse it only now.
            if not self.is_direct or error.errno not in _NOT_DIRECT:
                raise
        os.close(self._fd)
        self._fd = self._open_buffered()
        return os.preadv(self._fd, [target], offset_bytes)


class ExtentWriter:
    """Writes aligned pieces of one file, which it creates if need be; the size is set from the start.

    Pieces must begin and end at multiples of ALIGNMENT and come from `aligned_buffer`.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Open `path` for writing and give it `size_bytes`. Raises OSError."""
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o644)
            self.is_direct = True
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            self._fd = os.open(path, flags, 0o644)
            self.is_direct = False
        try:
            os.ftruncate(self._fd, size_bytes)
        except OSError:
            os.close(self._fd)
            raise

    def write(self, data: NDArray[np.uint8], offset_bytes: int) -> None:
        """Write `data` uint8 [N] at `offset_bytes`. Raises OSError."""
        view = data.data
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self._fd, view[done:], offset_bytes + done)
            except OSError as error:
                if not self.is_direct or error.errno not in _NOT_DIRECT:
                    raise
                os.close(self._fd)
                self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                self.is_direct = False

    def sync(self) -> None:
        """Make what was written durable, and drop its pages."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file without syncing."""
        os.close(self._fd)


def reserve(path: Path, size_bytes: int) -> None:
    """Create `path` with that size and all its blocks, or give an existing file what it lacks.

    Where the file system cannot reserve, the file is merely given its size. Raises OSError, ENOSPC above all.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(fd, size_bytes)
        # posix_fallocate would write to every block where the file system cannot reserve; the call itself says so.
        libc = ctypes.CDLL(None, use_errno=True)
        offset, length = ctypes.c_longlong(0), ctypes.c_longlong(size_bytes)
        if libc.fallocate(fd, 0, offset, length) and ctypes.get_errno() != errno.EOPNOTSUPP:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(fd)


def first_hole(path: Path) -> int | None:
    """Return the offset of the file's first hole, or None when there is none. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        return hole_within(fd, 0, size)
    finally:
        os.close(fd)


def hole_within(fd: int, begin_bytes: int, end_bytes: int) -> int | None:
    """Return the offset of the first hole in that range of an open file, or None."""
    if begin_bytes >= min(end_bytes, os.fstat(fd).st_size):
        return None
    # Every file has a virtual hole at its end.
    hole = os.lseek(fd, begin_bytes, os.SEEK_HOLE)
    return hole if hole < end_bytes else None


def sync_directory(path: Path) -> None:
    """Make renames within `path` durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that after a crash there is the old file or the new one. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


__all__ = [
    "ALIGNMENT",
    "ExtentWriter",
    "SequentialReader",
    "ShortReadError",
    "aligned_buffer",
    "first_hole",
    "hole_within",
    "replace_file",
    "reserve",
    "sync_directory",
]
