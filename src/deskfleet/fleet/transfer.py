"""Files from an origin into a directory: in ranges, in parallel, resumable, and never half a file under its name.

A file grows as `NAME.part`; `NAME.part.done` says which of its ranges are on the disk. When all are, it is hashed
as a whole, made durable, and renamed. A process may be killed at any moment: the next one goes on from there. Knows
nothing of what the files are for. Standard library only, as `deskfleet.fleet.origin`.
"""

from __future__ import annotations

import errno
import json
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from deskfleet.errors import CheckpointError, DeskfleetError, DoesNotFit
from deskfleet.fleet.origin import Digester, Origin, RangeRefused, RemoteFile, Unsteady
from deskfleet.units import format_bytes

PARALLEL = 8
"""Connections of one node to an origin."""

CHUNK_BYTES = 64 << 20
"""A range that is asked for at once; what a kill costs at most, times the number of connections."""

_PIECE_BYTES = 1 << 20
_HASH_BYTES = 8 << 20
_SLACK_BYTES = 16 << 20  # journals, directories
_TELL_EVERY_S = 1.0
_RATE_WINDOW_S = 10.0
_LONGEST_WAIT_S = 60.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How to transfer. A range may fail `max_failures` times in a row without a byte more; `backoff_s`: first wait."""

    parallel: int = PARALLEL
    chunk_bytes: int = CHUNK_BYTES
    max_failures: int = 8
    backoff_s: float = 0.5


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """How far a transfer is. `rate_bytes_s` is that of the last seconds; `eta_s` is None until there is one."""

    done_bytes: int
    total_bytes: int
    done_files: int
    total_files: int
    rate_bytes_s: float
    eta_s: float | None


class Rate:
    """Bytes over the last seconds."""

    def __init__(self, total_bytes: int, done_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._past = deque([(time.monotonic(), done_bytes)])

    def now(self, done_bytes: int) -> tuple[float, float | None]:
        """Return bytes a second, and seconds until all is done: None in the first second."""
        at_s = time.monotonic()
        self._past.append((at_s, done_bytes))
        while len(self._past) > 2 and self._past[0][0] < at_s - _RATE_WINDOW_S:
            self._past.popleft()
        first_s, first_bytes = self._past[0]
        rate = max(0.0, (done_bytes - first_bytes) / max(at_s - first_s, 1e-6))
        is_known = rate > 0 and at_s - first_s >= _TELL_EVERY_S
        return rate, (self._total_bytes - done_bytes) / rate if is_known else None


@dataclass(slots=True, eq=False)
class _Growing:
    """One file on its way. `done` are the numbers of the ranges that are on the disk."""

    file: RemoteFile
    url: str
    path: Path
    chunk_bytes: int
    done: set[int] = field(default_factory=set)
    is_second_try: bool = False
    wants_no_ranges: bool = False
    is_spread: bool = False
    is_closing: bool = False
    counted_bytes: int = 0  # of a file that is given only as a whole, how far progress has counted

    @property
    def part(self) -> Path:
        return self.path.with_name(self.path.name + ".part")

    @property
    def journal(self) -> Path:
        return self.path.with_name(self.path.name + ".part.done")

    @property
    def num_chunks(self) -> int:
        return max(1, -(-self.file.size_bytes // self.chunk_bytes))

    def span(self, chunk: int) -> tuple[int, int]:
        """First byte of a range, and the one behind its last."""
        begin = chunk * self.chunk_bytes
        return begin, min(begin + self.chunk_bytes, self.file.size_bytes)

    def missing(self) -> list[int]:
        return [chunk for chunk in range(self.num_chunks) if chunk not in self.done]

    def done_bytes(self) -> int:
        return sum(end - begin for begin, end in map(self.span, self.done))

    def resume(self) -> None:
        """Read what an earlier run left. What it left of another file, or in other ranges, is removed."""
        head = self._head()
        try:
            lines = self.journal.read_text().splitlines(keepends=True)
        except (OSError, UnicodeDecodeError):
            lines = []
        if not lines or lines[0] != head or not self.part.exists():
            self.forget()
            return
        for line in lines[1:]:
            if line.endswith("\n") and line[:-1].isdigit() and int(line) < self.num_chunks:
                self.done.add(int(line))

    def begin(self) -> None:
        """Make the unfinished file and its journal, if they are not there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.journal.exists():
            self.part.touch()
            self.journal.write_text(self._head())

    def keep(self, chunk: int) -> None:
        """Note that a range is on the disk."""
        with self.journal.open("a") as journal:
            journal.write(f"{chunk}\n")
        self.done.add(chunk)

    def forget(self) -> None:
        """Begin anew."""
        self.part.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)
        self.done.clear()
        self.is_spread = self.is_closing = False
        self.counted_bytes = 0

    def _head(self) -> str:
        return json.dumps([self.file.size_bytes, self.file.digest, self.chunk_bytes]) + "\n"


def needed_bytes(directory: Path, files: Iterable[RemoteFile]) -> int:
    """The room that fetching `files` takes, beyond what unfinished ones have taken."""
    return sum(max(0, file.size_bytes - allocated_bytes(directory / (file.name + ".part"))) for file in files)


def allocated_bytes(path: Path) -> int:
    """What a file takes of the disk; 0 when it is not there."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def free_bytes(directory: Path) -> int:
    """What is free where `directory` is, or will be."""
    there = directory.absolute()
    while not there.exists():
        there = there.parent
    status = os.statvfs(there)
    return status.f_bavail * status.f_frsize


def check_space(directory: Path, files: Iterable[RemoteFile]) -> None:
    """Raise DoesNotFit, with the arithmetic, unless the disk has room for `files`."""
    needed = needed_bytes(directory, files)
    free = free_bytes(directory)
    if needed and needed + _SLACK_BYTES > free:
        raise DoesNotFit(
            f"{directory}: {format_bytes(needed)} are to come, and {format_bytes(free)} are free",
            hint="free some, or put the checkpoint on another disk",
        )


def hash_file(path: Path, file: RemoteFile, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the digest of what is at `path`, spelled as `file.digest`. Leaves nothing of it in the page cache."""
    digester = Digester(file)
    buffer = bytearray(_HASH_BYTES)
    with path.open("rb", buffering=0) as source:
        offset = 0
        while count := source.readinto(buffer):
            digester.update(memoryview(buffer)[:count])
            # On machines whose GPU shares the memory, a cached checkpoint is memory taken from the model.
            os.posix_fadvise(source.fileno(), offset, count, os.POSIX_FADV_DONTNEED)
            offset += count
            if on_bytes is not None:
                on_bytes(count)
    return digester.found


def hash_files(
    directory: Path, files: Sequence[RemoteFile], on_progress: Callable[[TransferProgress], None]
) -> Iterator[tuple[RemoteFile, str]]:
    """Hash files that are there, several at once, and yield their digests in order.

    `on_progress` is told at most once a second how far it is, by whichever thread comes first, and at the end.
    """
    if not files:
        return
    total = sum(file.size_bytes for file in files)
    rate = Rate(total, 0)
    lock = threading.Lock()
    done_bytes = num_done = 0
    told_s = time.monotonic()

    def tell() -> None:
        per_s, eta_s = rate.now(done_bytes)
        on_progress(TransferProgress(done_bytes, total, num_done, len(files), per_s, eta_s))

    def on_bytes(num_bytes: int) -> None:
        nonlocal done_bytes, told_s
        with lock:
            done_bytes += num_bytes
            if time.monotonic() - told_s >= _TELL_EVERY_S:
                told_s = time.monotonic()
                tell()

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda file: hash_file(directory / file.name, file, on_bytes), files)
        for file, digest in zip(files, digests, strict=True):
            num_done += 1
            yield file, digest
    with lock:
        tell()


def sync_directory(path: Path) -> None:
    """Make a directory's names durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Transfer:
    """Fetches files. `run` is called once; `on_done(file)` comes from its thread, once a file has its name."""

    def __init__(
        self,
        origin: Origin,
        directory: Path,
        files: Iterable[tuple[RemoteFile, str]],
        options: TransferOptions,
        *,
        on_done: Callable[[RemoteFile], None],
        on_progress: Callable[[TransferProgress], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._origin = origin
        self._options = options
        self._on_done = on_done
        self._on_progress = on_progress
        self._on_note = on_note
        self._files = [_Growing(file, url, directory / file.name, options.chunk_bytes) for file, url in files]
        for growing in self._files:
            growing.resume()
        self._total_bytes = sum(growing.file.size_bytes for growing in self._files)
        self._bytes = self._resumed_bytes = sum(growing.done_bytes() for growing in self._files)
        self._fetched_bytes = 0
        self._changed = threading.Condition()
        self._tasks: deque[tuple[_Growing, int | None]] = deque()
        self._finished: deque[RemoteFile] = deque()
        self._notes: deque[str] = deque()
        self._num_open = len(self._files)
        self._failure: DeskfleetError | None = None

    @property
    def resumed_bytes(self) -> int:
        """What earlier runs had left of the files."""
        return self._resumed_bytes

    @property
    def fetched_bytes(self) -> int:
        """What has come over the network."""
        return self._fetched_bytes

    def run(self) -> None:
        """Fetch everything. Raises CheckpointError for a file that is not there or stays wrong, DoesNotFit."""
        # The first range of each file tells whether its server takes ranges; the others follow when it does.
        for growing in self._files:
            missing = growing.missing()
            self._tasks.append((growing, missing[0] if missing else None))
        # Daemons: a read that hangs must not keep a process from ending.
        for _ in range(self._options.parallel):
            threading.Thread(target=self._work, daemon=True).start()
        rate = Rate(self._total_bytes, self._bytes)
        told_s = 0.0
        while True:
            with self._changed:
                if not (self._finished or self._notes or self._failure) and self._num_open:
                    self._changed.wait(_TELL_EVERY_S)
                finished, notes = list(self._finished), list(self._notes)
                self._finished.clear()
                self._notes.clear()
                is_over = self._failure is not None or not self._num_open
            for note in notes:
                self._on_note(note)
            for file in finished:
                self._on_done(file)
            if is_over or time.monotonic() - told_s >= _TELL_EVERY_S:
                told_s = time.monotonic()
                self._on_progress(self._progress(rate))
            if self._failure is not None:
                raise self._failure
            if is_over:
                return

    def _progress(self, rate: Rate) -> TransferProgress:
        per_s, eta_s = rate.now(self._bytes)
        num_files = len(self._files)
        return TransferProgress(
            self._bytes, self._total_bytes, num_files - self._num_open, num_files, per_s, eta_s
        )

    def _work(self) -> None:
        is_foreseen = False
        try:
            while (task := self._next()) is not None:
                self._do(*task)
            is_foreseen = True
        finally:
            if not is_foreseen:
                self._fail(CheckpointError("a thread of the download ended; its traceback says why"))

    def _do(self, growing: _Growing, chunk: int | None) -> None:
        try:
            if chunk is not None:
                self._fetch(growing, chunk)
            with self._changed:
                is_last = not growing.missing() and not growing.is_closing
                growing.is_closing = growing.is_closing or is_last
            if is_last:
                self._close(growing)
        except OSError as error:
            self._fail(_translated(growing.path, error))
        except DeskfleetError as error:
            self._fail(error)

    def _next(self) -> tuple[_Growing, int | None] | None:
        with self._changed:
            while True:
                if self._failure is not None or not self._num_open:
                    return None
                if self._tasks:
                    return self._tasks.popleft()
                self._changed.wait()

    def _fail(self, error: DeskfleetError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _fetch(self, growing: _Growing, chunk: int) -> None:
        """Bring one range to the disk; ask again after what may pass."""
        begin, end = growing.span(chunk)
        growing.begin()
        position = begin
        failures = 0
        while position < end and chunk not in growing.done and self._failure is None:
            before = (position, len(growing.done))
            try:
                position = self._ask(growing, position, end, chunk)
            except RangeRefused as error:
                if growing.wants_no_ranges:
                    raise CheckpointError(f"{error}, also without a range") from error
                growing.wants_no_ranges = True
            except _Broken as broken:
                position = broken.position
                failures = 0 if (position, len(growing.done)) != before else failures + 1
                self._wait(growing, broken, failures)
        if position >= end and chunk not in growing.done:
            self._keep(growing, chunk)

    def _wait(self, growing: _Growing, broken: _Broken, failures: int) -> None:
        if failures >= self._options.max_failures:
            raise CheckpointError(
                f"{growing.file.name}: {failures} attempts in a row brought nothing: {broken}",
                hint="run the same command again later: what has come stays",
            ) from broken
        wait_s = self._options.backoff_s * 2 ** min(failures, 8) * (0.5 + random.random())
        end_s = time.monotonic() + min(max(wait_s, broken.wait_s), _LONGEST_WAIT_S)
        while self._failure is None and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.5))

    def _ask(self, growing: _Growing, position: int, end: int, chunk: int) -> int:
        """Ask once for [position, end); return how far it came. Raises _Broken with the place where it broke off."""
        whole = growing.wants_no_ranges or (position == 0 and end == growing.file.size_bytes)
        try:
            answer = self._origin.open(growing.url, None if whole else position, end)
        except Unsteady as error:
            raise _Broken(str(error), position, error.wait_s) from error
        with answer:
            if answer.status != 206:
                return self._take_whole(growing, answer, position, end)
            _check_content_range(growing, answer, position)
            self._spread(growing, chunk)
            return self._take(growing, answer, position, end)

    def _spread(self, growing: _Growing, chunk: int) -> None:
        """The server takes ranges: let the other workers have the rest of this file."""
        with self._changed:
            if growing.is_spread:
                return
            growing.is_spread = True
            self._tasks.extendleft(
                (growing, other) for other in reversed(growing.missing()) if other != chunk
            )
            self._changed.notify_all()

    def _take(self, growing: _Growing, answer: HTTPResponse, position: int, end: int) -> int:
        with growing.part.open("r+b", buffering=0) as part:
            for piece in self._pieces(growing, answer, position, end):
                os.pwrite(part.fileno(), piece, position)
                position += len(piece)
                self._count(len(piece), len(piece))
            os.fdatasync(part.fileno())
        return position

    def _take_whole(self, growing: _Growing, answer: HTTPResponse, position: int, end: int) -> int:
        """Take a file from its first byte, because the server gives it only so; keep what is missing of it."""
        length = answer.headers.get("Content-Length", "")
        if length.isdigit() and int(length) != growing.file.size_bytes:
            raise CheckpointError(
                f"{growing.file.name} has {length} bytes at the origin, and is listed with {growing.file.size_bytes}",
                hint="the origin is inconsistent at this revision: tell its owner",
            )
        at = 0
        with growing.part.open("r+b", buffering=0) as part:
            for piece in self._pieces(growing, answer, 0, growing.file.size_bytes, resume_at=position):
                begin, at = at, at + len(piece)
                os.pwrite(part.fileno(), piece, begin)
                known = max(begin, position, growing.counted_bytes)
                growing.counted_bytes = max(growing.counted_bytes, at)
                self._count(len(piece), max(0, at - known))
                for chunk in range(begin // growing.chunk_bytes, growing.num_chunks):
                    if growing.span(chunk)[1] > at:
                        break
                    if chunk not in growing.done:
                        os.fdatasync(part.fileno())
                        self._keep(growing, chunk)
        return end

    def _pieces(
        self, growing: _Growing, answer: HTTPResponse, begin: int, end: int, resume_at: int | None = None
    ) -> Iterator[bytes]:
        """Yield the bytes of an answer. Raises _Broken when it ends too early."""
        at = begin
        while at < end:
            if self._failure is not None:
                raise _Broken("stopped", at if resume_at is None else resume_at)
            try:
                piece = answer.read(min(_PIECE_BYTES, end - at))
                reason = "" if piece else "the connection ended"
            except (OSError, HTTPException) as error:
                piece, reason = b"", str(error) or type(error).__name__
            if not piece:
                # A range that was begun may go on where it stopped; a whole file is given from its first byte again.
                raise _Broken(
                    f"{reason} at byte {at} of {growing.file.size_bytes}",
                    at if resume_at is None else resume_at,
                )
            at += len(piece)
            yield piece

    def _count(self, fetched_bytes: int, new_bytes: int) -> None:
        with self._changed:
            self._bytes += new_bytes
            self._fetched_bytes += fetched_bytes

    def _keep(self, growing: _Growing, chunk: int) -> None:
        with self._changed:
            if chunk not in growing.done:
                growing.keep(chunk)

    def _close(self, growing: _Growing) -> None:
        """Hash a complete file as a whole, make it durable and give it its name; or fetch it once more."""
        growing.begin()
        os.truncate(growing.part, growing.file.size_bytes)
        found = hash_file(growing.part, growing.file)
        if found != growing.file.digest:
            self._refetch(growing, found)
            return
        with growing.part.open("rb") as part:
            os.fsync(part.fileno())
        growing.part.rename(growing.path)
        growing.journal.unlink(missing_ok=True)
        sync_directory(growing.path.parent)
        with self._changed:
            self._finished.append(growing.file)
            self._num_open -= 1
            self._changed.notify_all()

    def _refetch(self, growing: _Growing, found: str) -> None:
        what = f"{growing.file.name} has digest {found}, and the origin's listing says {growing.file.digest}"
        growing.forget()
        if growing.is_second_try:
            raise CheckpointError(
                f"{what}, for the second time",
                hint="the origin, or something on the way to it, changes bytes",
            )
        growing.is_second_try = True
        with self._changed:
            self._bytes -= growing.file.size_bytes
            self._notes.append(f"{what}: it is fetched once more")
            self._tasks.appendleft((growing, 0))
            self._changed.notify_all()


class _Broken(Exception):
    """An answer broke off or did not come; `position` is where to go on."""

    def __init__(self, reason: str, position: int, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.position = position
        self.wait_s = wait_s


def _check_content_range(growing: _Growing, answer: HTTPResponse, position: int) -> None:
    said = answer.headers.get("Content-Range", "")
    unit, _, rest = said.partition(" ")
    span, _, total = rest.partition("/")
    first = span.partition("-")[0]
    if unit != "bytes" or first != str(position) or total not in ("*", str(growing.file.size_bytes)):
        raise CheckpointError(
            f"{growing.file.name}: bytes from {position} of {growing.file.size_bytes} were asked for, "
            f"and the answer has Content-Range {said!r}",
            hint="the origin is inconsistent at this revision: tell its owner",
        )


def _translated(path: Path, error: OSError) -> DeskfleetError:
    if error.errno in _NO_SPACE:
        return DoesNotFit(
            f"{path}: the disk is full ({error.strerror}); {format_bytes(free_bytes(path.parent))} are free",
            hint="free some and run the same command again: it goes on from where it stopped",
        )
    return CheckpointError(f"{error.filename or path}: {error.strerror or error}")


__all__ = [
    "CHUNK_BYTES",
    "PARALLEL",
    "Rate",
    "Transfer",
    "TransferOptions",
    "TransferProgress",
    "check_space",
    "free_bytes",
    "hash_file",
    "hash_files",
    "needed_bytes",
    "sync_directory",
]
