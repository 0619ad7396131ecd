"""When tokens leave: one clock for all streams, as an engine's steps are, or no clock at all.

Owns the pace. A stream's first token leaves at once, every later one with a step; with no pace, as fast as it can.
"""

from __future__ import annotations

import asyncio
import time


class Clock:
    """Steps of `step_s` seconds; 0 for none. It may be set at any time, between measurements."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.num_steps = 0
        self._next: asyncio.Future[None] | None = None
        self._index = 0  # of the latest step, on the grid

    async def tick(self) -> None:
        """Wait for the next step. All who wait go on together."""
        if self.step_s == 0:
            self.num_steps += 1
            await asyncio.sleep(0)
            return
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            # On the grid of the clock, not a step after the last one: lateness must not add up. And not the same step
            # again: a loop that counts in milliseconds, as uvloop does, may have made it a little early.
            now_s = time.monotonic()
            index = int(now_s / self.step_s)
            if index == self._index - 1:
                index = self._index
            self._index = index + 1
            loop.call_later(self._index * self.step_s - now_s, self._step)
        await asyncio.shield(self._next)

    def _step(self) -> None:
        waited, self._next = self._next, None
        self.num_steps += 1
        if waited is not None and not waited.done():
            waited.set_result(None)


__all__ = ["Clock"]
