"""Whether this machine got other work while a server on it was timed: then a falling rate says nothing of the server.

Owns that distinction: how many threads want to run is looked at all the while, and the end is compared with the
beginning. Of a server on another machine nothing is known, and nothing excused.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from pathlib import Path
from types import TracebackType
from typing import Self

from deskfleet.bench.load.machine import is_here, num_cores
from deskfleet.gates.contract import Figure, Finding, failed, skipped

_LOADAVG = Path("/proc/loadavg")
_EVERY_S = 0.1
_PARTS = 3
_MORE = 1.3  # times as many threads as before, or as cores


def num_runnable() -> int | None:
    """Return how many threads of this machine run or could, beside the one that asks; None where nothing tells."""
    try:
        return int(_LOADAVG.read_text(encoding="utf-8").split()[3].partition("/")[0]) - 1
    except (OSError, ValueError, IndexError):
        return None


class OtherWork:
    """`async with OtherWork(url) as machine: ...` around what is timed, then `machine.finding(...)`."""

    def __init__(self, url: str) -> None:
        self._watches = is_here(url)
        self._seen: list[int] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._watches:
            self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        while (count := num_runnable()) is not None:
            self._seen.append(count)
            await asyncio.sleep(_EVERY_S)

    def excuse(self) -> str | None:
        """Return what became of this machine when more wanted to run at last than at first and than it has cores."""
        part = len(self._seen) // _PARTS
        if not part:
            return None
        first, last = statistics.fmean(self._seen[:part]), statistics.fmean(self._seen[-part:])
        if last <= _MORE * max(first, num_cores()):
            return None
        return (
            f"this machine got busier meanwhile: {last:.1f} threads wanted to run at last, {first:.1f} at first, on "
            f"{num_cores()} cores; ask again when it is quiet"
        )

    def finding(self, slower: str, figure: Figure, *, measured: str, **values: float) -> Finding:
        """Return the failure of a server that became `slower`, or that nothing was shown on a machine so busy."""
        excuse = self.excuse()
        if excuse is not None:
            return skipped(f"{slower}, but {excuse}", figure, measured=measured, cause="tool", **values)
        return failed(slower, figure, measured=measured, cause="pace", **values)


__all__ = ["OtherWork", "num_runnable"]
