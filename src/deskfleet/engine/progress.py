"""Where a rank's main thread is, for its heartbeat. Written by that thread alone, read by another.

A step costs a few attribute writes and no lock: what is read may be of two neighbouring moments, and that does not
matter to whoever looks once a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from deskfleet.endpoint import RankState


class Progress:
    """How far a rank is. `num_moves` counts whatever ended that is smaller than a pass; it never goes back."""

    __slots__ = ("_clock", "last_pass_s", "num_moves", "num_passes", "num_tokens", "state")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.state: RankState = "idle"
        self.num_tokens = 0
        self.num_passes = 0
        self.num_moves = 0
        self.last_pass_s: float | None = None

    def begin(self, state: RankState, num_tokens: int) -> None:
        """The main thread starts on `num_tokens` rows of something."""
        self.num_tokens = num_tokens
        self.state = state

    def end(self) -> None:
        """It is done and waits for more."""
        self.num_moves += 1
        self.state = "idle"
        self.num_tokens = 0

    def end_pass(self) -> None:
        """What is done was a forward pass over the backbone."""
        self.num_passes += 1
        self.last_pass_s = self._clock()
        self.end()

    @property
    def last_pass_age_s(self) -> float | None:
        """Seconds since the latest pass ended, None before the first."""
        last_s = self.last_pass_s
        return None if last_s is None else self._clock() - last_s


__all__ = ["Progress"]
