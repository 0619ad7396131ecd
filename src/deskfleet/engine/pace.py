"""How long steps take, learnt from steps that are over, and how many rows may join the next one.

Owns past step times and the arithmetic of a chunk. Knows nothing of requests, queues or clocks: it is told seconds.
The cost of a step is described by two numbers: its rows, and its pairs, rows times the positions they can look at.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_WINDOW = 16  # steps remembered: when the machine turns slower, this many steps later everybody knows
_MAX_GROWTH = 2.0  # a step may hold twice the rows that were tried, never more, whatever the law says


def pairs_of(rows: int, prefix: int) -> int:
    """Pairs of a chunk after `prefix` positions, every row counted as if it were the last, which sees the most."""
    return rows * (prefix + rows)


def rows_within(pairs: int, prefix: int) -> int:
    """The longest chunk after `prefix` positions that has at most `pairs` pairs."""
    return (math.isqrt(prefix * prefix + 4 * max(pairs, 0)) - prefix) // 2


@dataclass(frozen=True, slots=True)
class _Step:
    rows: int
    pairs: int
    seconds: float


class StepTimes:
    """Bounds of step times.

    The law is seconds = a + b rows + c pairs, with a, b, c >= 0 unknown. A fit of it would be worthless when it is
    needed most: after a thousand decode steps, all alike, comes a prompt. A bound is not. If a step took t, one with at
    most f >= 1 times its rows and its pairs takes at most f t, and one with at most a part f < 1 of both takes at most
    a + f (t - a), where a is no more than the shortest step of all. The best bound of the last steps counts, so that a
    single slow step, whatever delayed it, changes nothing.
    """

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=_WINDOW)
        self._shortest_s = math.inf

    def observe(self, *, rows: int, pairs: int, seconds: float) -> None:
        """Learn from a step that is over."""
        self._steps.append(_Step(rows, pairs, seconds))
        self._shortest_s = min(self._shortest_s, seconds)

    def rows_within(self, limit_s: float, *, rows: int, pairs: int, prefix: int) -> int:
        """The longest chunk after `prefix` positions that may join a step of `rows` and `pairs` for it to end in time.

        0 when no past step promises that: the caller decides what to try.
        """
        best = 0
        for step in self._steps:
            factor = self._factor(step.seconds, limit_s)
            more_rows = int(min(factor, _MAX_GROWTH) * step.rows) - rows
            more_pairs = int(min(factor, _MAX_GROWTH**2) * step.pairs) - pairs
            best = max(best, min(more_rows, rows_within(more_pairs, prefix)))
        return best

    def _factor(self, seconds: float, limit_s: float) -> float:
        """How many times a step of `seconds` fits into `limit_s`."""
        if seconds <= limit_s:
            return limit_s / seconds if seconds > 0 else math.inf
        spare_s = limit_s - self._shortest_s
        return spare_s / (seconds - self._shortest_s) if spare_s > 0 else 0.0


__all__ = ["StepTimes", "pairs_of", "rows_within"]
