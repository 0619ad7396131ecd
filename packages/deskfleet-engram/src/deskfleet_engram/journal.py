"""The packer's journal: what of a pack is durable, so that a killed packer goes on where it was.

One record a line, checksummed; a record is written only after what it reports is on the disk. A line that is cut
off or damaged ends the journal: what it would have reported is done again. Knows nothing of rows or sources.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deskfleet_engram.errors import FormatError, PackError
from deskfleet_engram.fields import Fields
from deskfleet_engram.fileio import sync_directory

JOURNAL_NAME = "engram.journal"

_VERSION = 1
_CHANGED = {"identity_sha256": "the source", "shards": "the source", "extent_bytes": "the size of extents"}


class Journal:
    """The open journal of one pack. `extent` and `verified` may be called from several threads.

    `num_extents` holds, by (layer, column), how many extents of a `.partial` file are durable; `digests` the
    extents' digests of columns that were read back. `begin` is the first record: what is packed from what.
    """

    def __init__(self, path: Path, begin: dict[str, Any]) -> None:
        """Open the journal, or begin one with the record `begin`.

        Raises PackError when the journal that is there was begun otherwise, naming what differs, and OSError.
        """
        self.num_extents: dict[tuple[int, int], int] = {}
        self.digests: dict[tuple[int, int], tuple[str, ...]] = {}
        self._path = path
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._open(begin)
        except BaseException:
            os.close(self._fd)
            raise

    def extent(self, layer: int, column: int, count: int) -> None:
        """Record that the first `count` extents of that column's file are durable."""
        self._append({"kind": "extent", "layer": layer, "column": column, "count": count})
        self.num_extents[layer, column] = count

    def verified(self, layer: int, column: int, digests: tuple[str, ...]) -> None:
        """Record that the column's file is complete, durable and was read back with these digests."""
        self._append({"kind": "verified", "layer": layer, "column": column, "digests": list(digests)})
        self.digests[layer, column] = digests

    def forget(self, layer: int, column: int) -> None:
        """Record that nothing of that column's file may be relied on."""
        self._append({"kind": "extent", "layer": layer, "column": column, "count": 0})
        self.num_extents.pop((layer, column), None)
        self.digests.pop((layer, column), None)

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._fd)

    def remove(self) -> None:
        """Delete the file, which is then still to be closed."""
        self._path.unlink()
        sync_directory(self._path.parent)

    def _open(self, begin: dict[str, Any]) -> None:
        content = _read_all(self._fd)
        good = 0
        first = True
        for record, end in _records(content):
            if first:
                _check_begin(self._path, record, begin)
            elif not self._replay(record):
                break
            first, good = False, end
        os.ftruncate(self._fd, good)
        os.lseek(self._fd, good, os.SEEK_SET)
        if first:
            self._append({"kind": "begin", "version": _VERSION, **begin})
            sync_directory(self._path.parent)

    def _replay(self, record: dict[str, Any]) -> bool:
        """Take one record in; False when it makes no sense."""
        fields = Fields(record, "record")
        try:
            place = (fields.whole("layer"), fields.whole("column"))
            if fields.text("kind") == "verified":
                self.digests[place] = fields.sha256_list("digests", count=len(record.get("digests", ())))
            else:
                self.num_extents[place] = fields.whole("count")
                if self.num_extents[place] == 0:
                    self.digests.pop(place, None)
        except (FormatError, TypeError):
            return False
        return True

    def _append(self, record: dict[str, Any]) -> None:
        text = json.dumps(record, sort_keys=True, separators=(",", ":")).encode("ascii")
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        with self._lock:
            view = memoryview(line)
            while view:
                view = view[os.write(self._fd, view) :]
            os.fdatasync(self._fd)


def _read_all(fd: int) -> bytes:
    with open(os.dup(fd), "rb") as file:
        file.seek(0)
        return file.read()


def _records(content: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each sound record with the offset of its end, up to the first line that is not."""
    begin = 0
    while (end := content.find(b"\n", begin)) >= 0:
        digest, _, text = content[begin:end].partition(b" ")
        if digest != b"%08x" % zlib.crc32(text):
            return
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(record, dict):
            return
        begin = end + 1
        yield record, begin


def _check_begin(path: Path, record: dict[str, Any], begin: dict[str, Any]) -> None:
    """Raise PackError unless the journal's first record says what `begin` says."""
    wanted = json.loads(json.dumps({"kind": "begin", "version": _VERSION, **begin}))
    for key in sorted(wanted.keys() | record.keys()):
        if record.get(key) != wanted.get(key):
            raise PackError(
                f"{path}: {_CHANGED.get(key, key)} changed since packing began: it was {record.get(key)!r}, and is "
                f"{wanted.get(key)!r}",
                hint="what is packed already is not mixed with it; pack with restart to begin again",
            )


__all__ = ["JOURNAL_NAME", "Journal"]
