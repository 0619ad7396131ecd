"""One download as a node runs it: a job in, events out, a directory with a complete checkpoint at the end.

Owns what a download is of, what is recorded of it (`.deskfleet-pull.json`), and that nothing counts as fetched that
was not counted, measured and hashed. `main` takes the job as JSON in its first argument and prints one event a
line. Standard library only, as `deskfleet.fleet.origin`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from deskfleet.errors import CheckpointError, ConfigError, DeskfleetError
from deskfleet.fleet.origin import (
    INDEX_NAME,
    SUMS_NAME,
    Digester,
    Listing,
    NotThere,
    Origin,
    RemoteFile,
    Selection,
    Unsteady,
    What,
    check_plain_pin,
    is_pinned,
    parse_hub_listing,
    parse_sums,
    read_all,
    select,
)
from deskfleet.fleet.transfer import (
    Transfer,
    TransferOptions,
    TransferProgress,
    check_space,
    hash_file,
    hash_files,
    sync_directory,
)

RECORD_NAME = ".deskfleet-pull.json"
LOCK_NAME = ".deskfleet-pull.lock"
TOKEN_VARIABLE = "ORIGIN_TOKEN"

Layout = Literal["auto", "hub", "plain"]
_T = TypeVar("_T")
Tell = Callable[[dict[str, Any]], None]

_FORMAT = 1
_ATTEMPTS = 5
_TELL_EVERY_S = 1.0
_TRANSFER = TransferOptions()


@dataclass(frozen=True, slots=True)
class Job:
    """What to fetch: `revision` of the repository at `origin`, into `directory`.

    With `verify` every byte that is there is hashed again. `is_ours`: the origin is one of our own nodes, and the
    revision is what it says.
    """

    origin: str
    revision: str
    directory: str
    what: What = "all"
    layout: Layout = "auto"
    verify: bool = False
    is_ours: bool = False
    parallel: int = _TRANSFER.parallel
    chunk_bytes: int = _TRANSFER.chunk_bytes
    max_failures: int = _TRANSFER.max_failures
    backoff_s: float = _TRANSFER.backoff_s
    timeout_s: float = 30.0


@dataclass(slots=True)
class Record:
    """What is known of a directory: which revision it holds, what the origin lists of it, and which files were hashed.

    `hashed` is name -> [digest, size, time of change in ns]: a file that changes afterwards is hashed again.
    """

    origin: str
    asked: str
    revision: str
    layout: str
    listing: dict[str, RemoteFile]
    hashed: dict[str, tuple[str, int, int]] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Record | None:
        """Read the record in `directory`; None when there is none. Raises CheckpointError for one that is damaged."""
        path = directory / RECORD_NAME
        try:
            document = json.loads(path.read_bytes())
            if document["format"] != _FORMAT:
                raise ValueError(f"its format is {document['format']!r}")
            listing = {
                name: RemoteFile(name, size, digest) for name, (size, digest) in document["files"].items()
            }
            hashed = {name: (kept[0], kept[1], kept[2]) for name, kept in document["hashed"].items()}
            origin, asked, revision, layout = (
                str(document[name]) for name in ("origin", "asked", "revision", "layout")
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"{path} cannot be used: {error}",
                hint="remove it: what is there is then hashed again, not fetched",
            ) from error
        return cls(origin, asked, revision, layout, listing, hashed)

    def write(self, directory: Path) -> None:
        """Replace the record in `directory`, durably."""
        document = {
            "format": _FORMAT,
            "origin": self.origin,
            "asked": self.asked,
            "revision": self.revision,
            "layout": self.layout,
            "files": {name: [file.size_bytes, file.digest] for name, file in sorted(self.listing.items())},
            "hashed": {name: list(kept) for name, kept in sorted(self.hashed.items())},
        }
        beside = directory / f"{RECORD_NAME}.new"
        with beside.open("w") as target:
            json.dump(document, target, indent=1)
            target.flush()
            os.fsync(target.fileno())
        beside.rename(directory / RECORD_NAME)
        sync_directory(directory)

    def note(self, directory: Path, file: RemoteFile) -> None:
        """Keep that the file was hashed and is right."""
        status = (directory / file.name).stat()
        self.hashed[file.name] = (file.digest, status.st_size, status.st_mtime_ns)

    def knows(self, directory: Path, file: RemoteFile) -> bool:
        """Whether the file was hashed and has not changed since."""
        try:
            status = (directory / file.name).stat()
        except OSError:
            return False
        return self.hashed.get(file.name) == (file.digest, status.st_size, status.st_mtime_ns)


def fetch(job: Job, token: str | None, tell: Tell) -> dict[str, Any]:
    """Do the job and return its result. Raises ConfigError, CheckpointError, DoesNotFit."""
    directory = Path(job.directory)
    if not job.revision:
        raise ConfigError("no revision is named", hint="write checkpoint.revision, a commit of 40 digits")
    origin = Origin(job.origin.rstrip("/"), token, job.timeout_s)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            return _Fetching(job, origin, directory, tell).run()
    except OSError as error:
        raise CheckpointError(f"{error.filename or directory}: {error.strerror or error}") from error


class _Fetching:
    """One job over one directory, which is locked."""

    def __init__(self, job: Job, origin: Origin, directory: Path, tell: Tell) -> None:
        self._job = job
        self._origin = origin
        self._directory = directory
        self._tell = tell
        self._record = self._find_record(Record.read(directory))

    def run(self) -> dict[str, Any]:
        """Fetch what is missing, then count everything."""
        self._record.write(self._directory)
        selection = self._select()
        summary = self._summary(selection)
        self._tell({"event": "plan", **summary})
        todo, num_hashed = self._missing(selection)
        check_space(self._directory, todo)
        transfer = Transfer(
            self._origin,
            self._directory,
            [(file, self._url(file.name)) for file in todo],
            TransferOptions(
                self._job.parallel, self._job.chunk_bytes, self._job.max_failures, self._job.backoff_s
            ),
            on_done=self._keep,
            on_progress=self._progress,
            on_note=lambda text: self._tell({"event": "note", "text": text}),
        )
        if todo:
            transfer.run()
        self._count(selection)
        return {
            **summary,
            "num_fetched": len(todo),
            "num_kept": len(selection.files) - len(todo),
            "num_hashed": num_hashed + len(todo),
            "fetched_bytes": transfer.fetched_bytes,
            "resumed_bytes": transfer.resumed_bytes,
        }

    def _find_record(self, old: Record | None) -> Record:
        """Take the listing from an earlier run of the same pinned revision, or ask the origin."""
        asked = self._job.revision
        here = (self._origin.url, asked)
        # What a pinned revision lists never changes: a complete checkpoint needs no network to be checked.
        if old is not None and is_pinned(asked) and (old.origin, old.revision) == here:
            return old
        record = self._ask_for_listing()
        if old is None:
            return record
        if old.revision != record.revision:
            moved = f": {asked} has moved" if old.asked == asked else ""
            raise ConfigError(
                f"{self._directory} holds revision {old.revision}, and {record.revision} is to be fetched{moved}",
                hint="fetch it into another directory; files of two revisions never share one",
            )
        record.hashed = old.hashed
        return record

    def _ask_for_listing(self) -> Record:
        asked = self._job.revision
        layout: str = self._job.layout
        if layout == "auto":
            layout, content = self._guess_layout()
        elif layout == "hub":
            content = self._read(self._hub_listing_url())
        else:
            content = self._read(self._origin.plain_url(SUMS_NAME))
        if layout == "hub":
            listing = parse_hub_listing(content, asked)
            if not is_pinned(asked):
                text = f"{asked} is {listing.revision} now: write that as checkpoint.revision to pin it"
                self._tell({"event": "note", "text": text})
        else:
            revision = asked if self._job.is_ours else check_plain_pin(asked, content)
            if len(revision) == 40 and not self._job.is_ours:
                text = f"a plain directory has no revisions: {revision} is recorded as told, and cannot be checked"
                self._tell({"event": "note", "text": text})
            listing = Listing(revision, self._measure(parse_sums(content)))
        return Record(self._origin.url, asked, listing.revision, layout, dict(listing.files))

    def _hub_listing_url(self) -> str:
        url = self._origin.listing_url(self._job.revision)
        if url is None:
            raise NotThere(
                f"{self._origin.url} is no URL of a hub's repository", hint="that is https://HUB/OWNER/NAME"
            )
        return url

    def _guess_layout(self) -> tuple[str, bytes]:
        try:
            return "hub", self._read(self._hub_listing_url())
        except NotThere as hub_error:
            try:
                return "plain", self._read(self._origin.plain_url(SUMS_NAME))
            except NotThere as plain_error:
                raise CheckpointError(
                    f"the origin has no such checkpoint: {hub_error.message}; {plain_error.message}",
                    hint=hub_error.hint,
                ) from hub_error

    def _measure(self, digests: Mapping[str, str]) -> dict[str, RemoteFile]:
        """Ask a plain directory for the size of each file."""
        with ThreadPoolExecutor(self._job.parallel) as pool:
            sizes = pool.map(
                lambda name: self._steady(lambda: self._origin.size_of(self._url(name, "plain"))), digests
            )
            return {
                name: RemoteFile(name, size, f"sha256:{digest}")
                for (name, digest), size in zip(digests.items(), sizes, strict=True)
            }

    def _select(self) -> Selection:
        listing = self._record.listing
        index = self._index(listing[INDEX_NAME]) if INDEX_NAME in listing else None
        return select(listing, index, self._job.what)

    def _index(self, file: RemoteFile) -> bytes:
        """Return the index, from the directory when it is the right one there, else from the origin."""
        path = self._directory / file.name
        if self._size(file) == file.size_bytes and hash_file(path, file) == file.digest:
            return path.read_bytes()
        content = b""
        # Once more, because what is wrong on the way may be right the next time.
        for _ in range(2):
            content = self._read(self._url(file.name))
            digest = _digest_of(content, file)
            if digest == file.digest:
                return content
        raise CheckpointError(
            f"{file.name} has {len(content)} bytes and digest {digest}; the origin's listing says "
            f"{file.size_bytes} and {file.digest}",
            hint="the origin, or something on the way to it, changes bytes",
        )

    def _missing(self, selection: Selection) -> tuple[list[RemoteFile], int]:
        """Return the files to fetch, and how many of the others were hashed now."""
        directory = self._directory
        todo = [file for file in selection.files if self._size(file) != file.size_bytes]
        there = [file for file in selection.files if file not in todo]
        unsure = [file for file in there if self._job.verify or not self._record.knows(directory, file)]
        for file, found in hash_files(
            directory, unsure, lambda progress: self._progress(progress, "checking")
        ):
            if found == file.digest:
                self._record.note(directory, file)
            else:
                text = f"{file.name} is there with digest {found}, not {file.digest}: it is fetched again"
                self._tell({"event": "note", "text": text})
                todo.append(file)
        self._record.write(directory)
        return todo, len(unsure)

    def _count(self, selection: Selection) -> None:
        """See that all is there, whatever was done: every file, its size, and a digest that was computed."""
        wrong = [file for file in selection.files if not self._record.knows(self._directory, file)]
        if wrong:
            raise CheckpointError(
                f"{len(wrong)} of {len(selection.files)} files are missing or have changed, {wrong[0].name} first",
                hint="does something else write there? Run the same command again",
            )

    def _keep(self, file: RemoteFile) -> None:
        self._record.note(self._directory, file)
        self._record.write(self._directory)
        self._tell({"event": "file", "file": file.name, "size_bytes": file.size_bytes})

    def _progress(self, progress: TransferProgress, doing: str = "fetching") -> None:
        self._tell({"event": "progress", "doing": doing, **asdict(progress)})

    def _summary(self, selection: Selection) -> dict[str, Any]:
        return {
            "directory": str(self._directory),
            "origin": self._origin.url,
            "revision": self._record.revision,
            "what": self._job.what,
            "num_files": len(selection.files),
            "total_bytes": sum(file.size_bytes for file in selection.files),
            "left_out": list(selection.left_out),
        }

    def _size(self, file: RemoteFile) -> int | None:
        path = self._directory / file.name
        return path.stat().st_size if path.is_file() else None

    def _url(self, name: str, layout: str | None = None) -> str:
        if (layout or self._record.layout) == "plain":
            return self._origin.plain_url(name)
        return self._origin.hub_url(name, self._record.revision)

    def _read(self, url: str) -> bytes:
        return self._steady(lambda: read_all(self._origin.open(url)))

    def _steady(self, ask: Callable[[], _T]) -> _T:
        """Ask, and again after what may pass."""
        for attempt in range(_ATTEMPTS):
            try:
                return ask()
            except Unsteady as error:
                if attempt == _ATTEMPTS - 1:
                    raise CheckpointError(
                        f"{_ATTEMPTS} attempts failed, the last with: {error}",
                        hint="is the origin reachable from the machine that downloads?",
                    ) from error
                time.sleep(max(error.wait_s, self._job.backoff_s * 2**attempt))
        raise AssertionError("the last attempt returns or raises")


def _digest_of(content: bytes, file: RemoteFile) -> str:
    digester = Digester(file)
    digester.update(content)
    return digester.found


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other downloads out. The lock goes with the process, however it ends. Raises CheckpointError."""
    fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(fd, 200).decode(errors="replace").strip() or "another process"
            raise CheckpointError(
                f"{directory}: {holder} is downloading there", hint="wait for it, or stop it first"
            ) from error
        os.ftruncate(fd, 0)
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}, since {started},\n".encode(), 0)
        yield
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def main(argv: list[str]) -> int:
    """Run the job in `argv[1]`; print events; return the exit code."""

    def tell(event: dict[str, Any]) -> None:
        # One write a line, so that lines of several threads are never mixed.
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    try:
        result = fetch(Job(**json.loads(argv[1])), os.environ.get(TOKEN_VARIABLE) or None, tell)
    except DeskfleetError as error:
        tell({**error_event(error), "message": _without_token(error.message)})
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os._exit(3)  # nobody listens any more; what has come stays, and the next run goes on from there
    tell({"event": "done", **result})
    return 0


def error_event(error: DeskfleetError) -> dict[str, Any]:
    """Return the event that tells an error, by the name of the kind that everybody knows."""
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "deskfleet.errors")
    return {"event": "error", "type": kind.__name__, "message": error.message, "hint": error.hint}


def _without_token(text: str) -> str:
    token = os.environ.get(TOKEN_VARIABLE)
    return re.sub(re.escape(token), "***", text) if token else text


__all__ = ["LOCK_NAME", "RECORD_NAME", "TOKEN_VARIABLE", "Job", "Record", "error_event", "fetch", "main"]
