"""What this machine remembers of a fleet: who may act on it, which launch there is, what happened, what ranks logged.

    $XDG_STATE_HOME/deskfleet/<fleet>/       default ~/.local/state; never in a checkout
        acting.lock       held while somebody starts, stops or restarts the fleet; says who
        supervisor.lock   held by the supervisor for as long as it lives
        record.json       the latest launch and how far it has come: `Record`
        launches/<id>/    launch.json, events.jsonl, supervisor.log, rank-<n>.log, gates.json

One supervisor has several launches when it restarts; its log lies with the first.

Owns these files. Locks are the kernel's: they end with whoever holds them, so a file that is left behind means nothing.
Knows no container and no engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

from deskfleet.errors import DeskfleetError
from deskfleet.fleet.launch import LaunchSpec, launch_from_json, launch_to_json

Phase = Literal[
    "checking", "starting", "loading", "asking", "serving", "stopping", "waiting", "stopped", "failed"
]
"""How far a launch is. The last two are the ends: it was stopped, or it ended by itself with a reason.

`waiting`: it has served, has failed, and nothing of it runs any more; its supervisor will start another launch.
"""

ENDS: tuple[Phase, ...] = ("stopped", "failed")
KEPT_LAUNCHES = 5
_LOOKED_AT_S = 1.0  # whoever asks whether there is a supervisor holds its lock for an instant
_HELD_S = 0.2  # the same of who acts; being told that somebody does should not take long


class Busy(DeskfleetError):
    """Somebody else acts on the fleet."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A launch as its supervisor wrote it last. `url` while it serves, `reason` and `exit_code` once it has failed.

    `reason` and `restart_at`, a time in UTC, while it is `waiting`. `restart` counts this supervisor's launches before
    this one, and `after` says why the last of them ended. `closed`: why it serves and lets nobody in. `fleet_file` and
    `digest` say what it was started from. What is written here was true when it was written: whether the supervisor
    lives is `FleetState.supervisor`'s to say.
    """

    launch_id: str
    pid: int
    phase: Phase
    started_at: str
    changed_at: str
    fleet_file: str
    digest: str
    url: str | None = None
    model_id: str | None = None
    reason: str | None = None
    exit_code: int | None = None
    restart_at: str | None = None
    restart: int = 0
    after: str | None = None
    closed: str | None = None


class FleetState:
    """The state directory of one fleet. Nothing is made before something is written."""

    def __init__(self, fleet: str, environ: Mapping[str, str]) -> None:
        self.fleet = fleet
        self.directory = _state_home(environ) / "deskfleet" / fleet

    # --- who acts -------------------------------------------------------------------------------------

    @contextmanager
    def acting(self, what: str, *, patience_s: float = 0.0) -> Iterator[int]:
        """Be the only one who changes the fleet. Yields the lock's descriptor, which a child may inherit.

        The lock is free when all who have the descriptor have closed it. Raises Busy with who still holds it after
        `patience_s`: who follows a launch that was just ended needs a moment to notice.
        """
        with self._opened("acting.lock") as lock:
            if not _lock(lock, max(patience_s, _HELD_S)):
                raise Busy(
                    f"the fleet {self.fleet} is being changed: {_said_in(lock) or 'somebody'}",
                    hint="wait for it, or see deskfleet fleet status",
                )
            say_holder(lock, what)
            yield lock

    @contextmanager
    def supervising(self) -> Iterator[None]:
        """Be the fleet's supervisor. Raises Busy when there is one."""
        with self._opened("supervisor.lock") as lock:
            if not _lock(lock, _LOOKED_AT_S):
                raise Busy(f"the fleet {self.fleet} has a supervisor already")
            say_holder(lock, "supervisor")
            yield

    def supervisor(self) -> int | None:
        """The process id of the supervisor that lives now; None when there is none."""
        said = self._holder("supervisor.lock")
        return None if said is None else _pid_in(said)

    def actor(self) -> str | None:
        """Who changes the fleet now, as they have said it; None when nobody does, or only this process."""
        said = self._holder("acting.lock")
        return None if said is None or _pid_in(said) == os.getpid() else said or "somebody"

    def _holder(self, name: str) -> str | None:
        """What is written in a lock that somebody has; None when nobody has it."""
        try:
            lock = os.open(self.directory / name, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _said_in(lock)
        finally:
            os.close(lock)
        return None

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DeskfleetError(
                f"cannot keep the fleet's state in {self.directory}: {error.strerror}",
                hint="set XDG_STATE_HOME to a directory that is yours",
            ) from error
        try:
            yield lock
        finally:
            with contextlib.suppress(OSError):  # whoever handed it on has closed it
                os.close(lock)

    # --- what there is ----------------------------------------------------------------------------------

    def record(self) -> Record | None:
        """The latest launch; None when there was none. Raises DeskfleetError for a file that is not ours."""
        path = self.directory / "record.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Record)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise DeskfleetError(
                f"{path} cannot be read: {error}", hint="remove it: it says what was started last"
            ) from error

    def write_record(self, record: Record) -> None:
        """Put it in place whole."""
        _write(self.directory / "record.json", msgspec.json.encode(record))

    def launch(self, launch_id: str) -> Launch:
        """The files of one launch."""
        return Launch(self.directory / "launches" / launch_id)

    def launches(self) -> list[str]:
        """Ids of the launches of which there are files, the latest last."""
        try:
            return sorted(path.name for path in (self.directory / "launches").iterdir())
        except FileNotFoundError:
            return []

    def forget_old_launches(self, *, keep: str | None = None) -> None:
        """Keep the files of the latest launches only, and of `keep`, where a supervisor still writes its log."""
        for launch_id in self.launches()[:-KEPT_LAUNCHES]:
            if launch_id == keep:
                continue
            shutil.rmtree(self.directory / "launches" / launch_id, ignore_errors=True)


class Launch:
    """The files of one launch."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def events_path(self) -> Path:
        """Everything that happened, one JSON object a line."""
        return self.directory / "events.jsonl"

    @property
    def supervisor_log(self) -> Path:
        """What the supervisor's process said."""
        return self.directory / "supervisor.log"

    def rank_log(self, rank: int) -> Path:
        """What a rank's container said, with docker's times; kept when the container is gone."""
        return self.directory / f"rank-{rank}.log"

    def make(self) -> None:
        """Make the directory."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write_spec(self, spec: LaunchSpec) -> None:
        """Keep what was started."""
        _write(self.directory / "launch.json", launch_to_json(spec))

    def spec(self) -> LaunchSpec | None:
        """What was started; None when it did not come so far. Raises ConfigError for a file that is not ours."""
        try:
            return launch_from_json((self.directory / "launch.json").read_bytes())
        except FileNotFoundError:
            return None

    def write_report(self, report: Mapping[str, Any]) -> None:
        """Keep what the gates found."""
        _write(self.directory / "gates.json", json.dumps(report, ensure_ascii=False).encode())

    def append(self, event: str, **values: Any) -> None:
        """Add an event with the time of now. A reader never sees half a line."""
        line = json.dumps({"at": now(), "event": event, **values}, ensure_ascii=False) + "\n"
        descriptor = os.open(self.events_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def events(self, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
        """The events that were added after `offset` bytes, and where the next ones will begin."""
        try:
            with self.events_path.open("rb") as file:
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:
            return [], offset
        whole = data[: data.rfind(b"\n") + 1]
        return [json.loads(line) for line in whole.splitlines()], offset + len(whole)


def now(in_s: float = 0.0) -> str:
    """This moment, or another `in_s` from it, in UTC, to the millisecond."""
    moment = datetime.now(UTC) + timedelta(seconds=in_s)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def say_holder(lock: int, what: str) -> None:
    """Write into a lock who has it: this process."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{what}, process {os.getpid()}, since {now()}\n".encode(), 0)


def _lock(lock: int, patience_s: float) -> bool:
    """Take the lock; whether it could be had in time."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.02)
        else:
            return True


def _said_in(lock: int) -> str:
    return os.pread(lock, 1000, 0).decode(errors="replace").strip()


def _pid_in(text: str) -> int | None:
    _, _, rest = text.partition("process ")
    digits = rest.split(",")[0]
    return int(digits) if digits.isdecimal() else None


def _state_home(environ: Mapping[str, str]) -> Path:
    """As the XDG specification says: an absolute path, or it does not count."""
    given = Path(environ.get("XDG_STATE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".local/state"


def _write(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(data)
    beside.chmod(0o600)
    beside.replace(path)


__all__ = ["ENDS", "Busy", "FleetState", "Launch", "Phase", "Record", "now", "say_holder"]
