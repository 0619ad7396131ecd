"""How far packing is, how fast, for how long still; and a brake on reading.

Knows bytes and clocks only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

_WINDOW_S = 10.0
_TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class PackProgress:
    """Where a packing run stands. All bytes are those of packed files.

    `packed_bytes` were encoded and given to the writer, those of earlier runs included; `checked_bytes` were
    read back; both go to `total_bytes`. `rate_bytes_s` is that of the last seconds: of packing, and once all is
    packed, of reading back. `eta_s` is None until there is a rate.
    """

    file: str
    packed_bytes: int
    checked_bytes: int
    total_bytes: int
    rate_bytes_s: float
    eta_s: float | None
    elapsed_s: float


class WorkMeter:
    """Counts work and tells `on_progress`, always from the thread that packs."""

    def __init__(self, on_progress: Callable[[PackProgress], None] | None) -> None:
        self._on_progress = on_progress
        self._begin_s = time.monotonic()
        self._file = ""
        self._packed = self._checked = self._total = 0
        self._past: deque[tuple[float, int, int]] = deque()

    def expect(self, total_bytes: int, resumed_bytes: int) -> None:
        """Say how much there is, and how much of it is packed already."""
        self._total, self._packed = total_bytes, resumed_bytes

    def packed(self, file: str, num_bytes: int) -> None:
        """Count bytes packed and tell."""
        self._file = file
        self._packed += num_bytes
        self.tell()

    def checked(self, num_bytes: int) -> None:
        """Count bytes read back; may be called from another thread, and tells nothing."""
        self._checked += num_bytes

    def wait_for(self, futures: list[Future[None]]) -> None:
        """Wait for all of them, telling as they go; a failed one ends the wait."""
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=_TICK_S)
            for future in done:
                future.result()
            self.tell()

    def tell(self) -> None:
        """Report now."""
        if self._on_progress is None:
            return
        now = time.monotonic()
        self._past.append((now, self._packed, self._checked))
        while len(self._past) > 2 and now - self._past[0][0] > _WINDOW_S:
            self._past.popleft()
        then, packed, checked = self._past[0]
        passed = max(now - then, 1e-9)
        packing = (self._packed - packed) / passed
        checking = (self._checked - checked) / passed
        left = 2 * self._total - self._packed - self._checked
        rate = packing if self._packed < self._total else checking
        self._on_progress(
            PackProgress(
                file=self._file,
                packed_bytes=self._packed,
                checked_bytes=self._checked,
                total_bytes=self._total,
                rate_bytes_s=rate if len(self._past) > 1 else 0.0,
                eta_s=left / (packing + checking) if packing + checking > 0 else None,
                elapsed_s=now - self._begin_s,
            )
        )


class RateLimit:
    """Keeps an average of at most `max_bytes_per_s`; None is no limit."""

    def __init__(self, max_bytes_per_s: float | None) -> None:
        self._max = max_bytes_per_s
        self._begin_s = time.monotonic()
        self._taken = 0

    def wait(self, num_bytes: int) -> None:
        """Return when the bytes may be taken."""
        if self._max is None:
            return
        due = self._begin_s + self._taken / self._max
        self._taken += num_bytes
        time.sleep(max(0.0, due - time.monotonic()))


__all__ = ["PackProgress", "RateLimit", "WorkMeter"]
