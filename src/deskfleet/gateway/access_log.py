"""The access log: one JSON object per request and line. Also: which request ids are believed.

Owns the form of a line and where lines go. A line has names, counts and times, never a prompt, an answer or a key.
A line that cannot be written is counted and dropped: no request fails because a disk is full.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from deskfleet.errors import ConfigError
from deskfleet.gateway.recent import RequestRecord

STDERR = "-"
"""The path that means stderr."""

_STDERR_FILE = 2
_REOPEN_EVERY_S = 1.0
_ID = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}")


def accept_request_id(asked: str | None) -> str:
    """Return the client's own id if it is one (1-128 of letters, digits and ._:+/=@-), else nothing."""
    return asked if asked is not None and _ID.fullmatch(asked) else ""


def log_fields(record: RequestRecord) -> dict[str, Any]:
    """Return what is logged of a request that is over; seconds to the microsecond, what is not known left out."""
    began = datetime.fromtimestamp(record.began_at, UTC).isoformat(timespec="milliseconds")
    fields: dict[str, Any] = {
        "time": began.replace("+00:00", "Z"),
        "request_id": record.request_id,
        "client": record.client,
        "key": record.key,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "outcome": record.outcome,
        "duration_s": _rounded(record.duration_s),
        "protocol": record.protocol,
        "model": record.model,
    }
    if record.given_s is not None:
        fields |= {
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_cached_tokens,
            "generated_tokens": record.num_generated_tokens,
            "queued_s": _rounded(record.queued_s),
            "ttft_s": _rounded(record.ttft_s),
            "tok_s": _rounded(record.tok_s),
            "drafted": record.num_drafted or None,
            "accepted": record.num_accepted or None,
            "verify_steps": record.num_verify_steps or None,
            "wasted_rows": record.num_wasted_rows or None,
            "finish_reason": record.finish_reason,
            "stop_reason": record.stop_reason,
        }
    fields["error"] = record.error
    return {name: value for name, value in fields.items() if value is not None}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


class AccessLog:
    """Writes lines to stderr or to a file, which may be moved away by whoever rotates logs."""

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`path` is a file's, or STDERR. Raises ConfigError when it cannot be written to."""
        self._path = None if path == STDERR else Path(path)
        self._clock = clock
        self._file = -1
        self._checked_s = clock()
        self.num_dropped = 0
        if self._path is None:
            self._file = _STDERR_FILE
            return
        try:
            self._open(self._path)
        except OSError as error:
            raise ConfigError(
                f"cannot write the access log {path}: {error.strerror}",
                hint=f"name a file in a directory that exists, or {STDERR} for stderr",
            ) from error

    def write(self, record: RequestRecord) -> None:
        """Write the line of a request that is over, as one write, so that lines of several processes do not mix."""
        line = msgspec.json.encode(log_fields(record)) + b"\n"
        try:
            self._follow()
            if os.write(self._file, line) != len(line):
                self.num_dropped += 1
        except OSError:
            self.num_dropped += 1

    def close(self) -> None:
        """Close the file; stderr stays open."""
        if self._path is not None and self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _follow(self) -> None:
        """Open the path again if it is not the open file any more; looked at once a second."""
        now_s = self._clock()
        if self._path is None or now_s - self._checked_s < _REOPEN_EVERY_S:
            return
        self._checked_s = now_s
        with contextlib.suppress(OSError):  # moved away, or the last attempt to open it failed
            there, own = os.stat(self._path), os.fstat(self._file)
            if (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino):
                return
        self.close()
        self._open(self._path)

    def _open(self, path: Path) -> None:
        # Others of the machine need not read who asked when.
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


__all__ = ["STDERR", "AccessLog", "accept_request_id", "log_fields"]
