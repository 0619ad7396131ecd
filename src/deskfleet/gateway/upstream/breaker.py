"""Whether a replica is sent requests. Owns three states and when they change; knows nothing of HTTP or of time itself.

    closed ──failures──▶ open ──pause over──▶ half open ──probe answers──▶ closed
                          ▲                        │
                          └──── probe fails, the pause doubles ────────────┘

A refused connection opens it at once, other failures only after several in a row: one broken stream is no death.
Probes are the router's own requests, so that no client is the one who finds out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BreakerState = Literal["closed", "open", "half-open"]


@dataclass(slots=True)
class Breaker:
    """One replica's. Every method is told what time it is, in seconds of any clock that only goes forward."""

    max_failures: int = 3
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    state: BreakerState = "closed"
    reason: str | None = None
    """Why it is not closed, else what failed last; None once something has worked."""
    num_failures: int = 0
    """In a row."""
    until_s: float = 0.0
    """While open: when to probe."""
    pause_s: float = 0.0

    def succeed(self) -> None:
        """Something has worked: a token came, or a probe answered."""
        self.state, self.reason, self.num_failures, self.pause_s = "closed", None, 0, 0.0

    def fail(self, now_s: float, reason: str, *, at_once: bool = False) -> None:
        """Something has failed. `at_once`: nothing listens there, more tries are no use."""
        self.num_failures += 1
        self.reason = reason
        if self.state == "open":
            return  # streams that began earlier end one after another; the pause is not theirs to stretch
        if at_once or self.state == "half-open" or self.num_failures >= self.max_failures:
            self.pause_s = min(max(self.pause_s * 2, self.first_pause_s), self.longest_pause_s)
            self.state, self.until_s = "open", now_s + self.pause_s

    def try_probe(self, now_s: float) -> bool:
        """Whether a probe is due; if so, it is half open until the probe has succeeded or failed."""
        if self.state != "open" or now_s < self.until_s:
            return False
        self.state = "half-open"
        return True


__all__ = ["Breaker", "BreakerState"]
