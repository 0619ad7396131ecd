"""Where a sequence of tokens has begun to repeat itself. Owns exact run lengths of every period, cheaply.

A run of period p is the longest tail in which every token equals the one p before it. With M such tokens in a row the
run is M + p tokens long. Every period of up to `max_period` is watched, and a run is reported at the very token that
makes it long enough.

Cheap because most tokens are only appended to a list: M grows by at most one per token, so after all of them have been
counted it is known how many tokens must come before any run can be long enough. Counting them is a few operations of
numpy on the last `max_period` tokens, every sixty tokens or so.

Knows nothing of text, chunks or answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

_MAX_BLOCK = 256
"""How many tokens are counted at once, at most."""


@dataclass(frozen=True, slots=True)
class Run:
    """The tail of `length` tokens consists of copies of its first `period` tokens, the last copy maybe begun only."""

    period: int
    length: int

    @property
    def num_copies(self) -> int:
        """Whole copies in the run."""
        return self.length // self.period


@dataclass(frozen=True, slots=True, eq=False)
class RunLimits:
    """How long runs must be. `needed` int32 [max_period] is what M must be: a run of L tokens has M = L - p.

    `first_due` is how many tokens must come before any run can be long enough. Made once for many trackers, together
    with what they all begin with: `no_matches` int32 [max_period] and `no_tokens` int32 [2 * max_period]. Read-only.
    """

    needed: Tokens
    first_due: int
    no_matches: Tokens
    no_tokens: Tokens


class PeriodTracker:
    """Watches one sequence. Periods are the smallest that reached their limit, so a unit is never itself a repeat."""

    def __init__(self, limits: RunLimits) -> None:
        """`limits` say how many tokens a run of each period must have to be reported."""
        self._needed = limits.needed
        self._max_period = len(limits.needed)
        self._matches = limits.no_matches
        # An array of its own is made when the first tokens are counted: the first token waits for none, and short
        # answers need none. When it is full, all but its end is given up.
        self._no_tokens = self._tokens = limits.no_tokens
        self._end = len(self._tokens)
        self._waiting: list[int] = []
        self._due = limits.first_due
        self._excused: list[tuple[int, int, int]] = []  # period, first token of the run, its new limit
        self._num_counted = 0

    @property
    def num_tokens(self) -> int:
        """Tokens pushed so far."""
        return self._num_counted + len(self._waiting)

    def push(self, token_id: int) -> Run | None:
        """Add a token. Returns the run that has just become long enough, if one has."""
        self._waiting.append(token_id)
        if len(self._waiting) < self._due:
            return None
        return self._count()

    def num_repeated(self) -> int:
        """Return how many of the last tokens may turn out to be a second or later copy of something."""
        if self._waiting:
            self._count()
        return int(self._matches.max())

    def tail(self, num_tokens: int) -> list[int]:
        """Return the last tokens, `num_tokens` of them where there are so many. At most twice `max_period` are kept."""
        if self._waiting:
            self._count()
        counted: list[int] = self._tokens[max(self._end - num_tokens, 0) : self._end].tolist()
        return [token for token in counted if token >= 0]

    def excuse(self, run: Run, limit: int) -> None:
        """Let `run`, which has just been reported, go on until it has `limit` tokens.

        Its multiples are excused with it, as long as they began where it did.
        """
        self._excused.append((run.period, self._num_counted - run.length, limit))
        self._schedule()

    def _count(self) -> Run | None:
        """Bring the matches of every period up to date; return the run that is long enough now."""
        block = np.array(self._waiting, np.int32)
        size = len(block)
        self._append(block)
        self._num_counted += size
        self._waiting.clear()
        matches = np.zeros(self._max_period, np.int32)
        before = self._tokens[self._end - 1 - self._max_period : self._end - 1][
            ::-1
        ]  # [p - 1] is p tokens back
        found = np.flatnonzero(before == block[-1])
        if found.size:
            places = (self._end - size - 1 - found)[:, None] + np.arange(size)
            differs = (self._tokens[places] != block)[:, ::-1]
            num_equal = differs.argmax(axis=1).astype(np.int32)
            is_whole = ~differs[np.arange(len(found)), num_equal]
            matches[found] = np.where(is_whole, self._matches[found] + size, num_equal)
        self._matches = matches
        period = self._schedule()
        return None if period is None else Run(period, int(matches[period - 1]) + period)

    def _schedule(self) -> int | None:
        """Decide after how many tokens to count again. Returns the smallest period whose run is long enough now."""
        missing = self._needed - self._matches
        still = []
        for period, first, limit in self._excused:
            length = int(self._matches[period - 1]) + period
            if self._num_counted - length != first:
                continue  # it ended
            still.append((period, first, limit))
            multiples = np.arange(period - 1, self._max_period, period)
            together = multiples[self._matches[multiples] + multiples + 1 == length]
            missing[together] = limit - length
        self._excused = still
        fewest = int(missing.min())
        self._due = min(max(fewest, 1), _MAX_BLOCK)
        return int(np.flatnonzero(missing <= 0)[0]) + 1 if fewest <= 0 else None

    def _append(self, block: Tokens) -> None:
        kept = 2 * self._max_period
        if self._end + len(block) > len(self._tokens):
            last = self._tokens[self._end - kept : self._end]
            if self._tokens is self._no_tokens:
                self._tokens = np.empty(3 * self._max_period + 2 * _MAX_BLOCK, np.int32)
            self._tokens[:kept] = last
            self._end = kept
        self._tokens[self._end : self._end + len(block)] = block
        self._end += len(block)


def run_limits(max_period: int, limit_of: Callable[[int], int]) -> RunLimits:
    """Return the limits of periods 1 to `max_period`, of which `limit_of` says how many tokens a run must have."""
    needed = np.array([limit_of(period) - period for period in range(1, max_period + 1)], np.int32)
    first_due = min(max(int(needed.min()), 1), _MAX_BLOCK)
    no_matches = np.zeros(max_period, np.int32)
    no_tokens = np.full(2 * max_period, -1, np.int32)  # nothing equals the -1 before the first token
    for array in (needed, no_matches, no_tokens):
        array.flags.writeable = False
    return RunLimits(needed, first_due, no_matches, no_tokens)


__all__ = ["PeriodTracker", "Run", "RunLimits", "run_limits"]
