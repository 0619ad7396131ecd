"""Everything that was gathered, as plain data. Owns no judgement: what a fact means is a rung's business (`rungs.py`).

None is always "not known": not asked for, or nobody told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from deskfleet.bootfacts.facts import FactSheet

Reached = Literal["yes", "refused", "silent"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one question brought. `error` with nothing else is a failure; `is_finite` None where no logprobs came."""

    text: str = ""
    is_right: bool = False
    seconds_s: float = 0.0
    first_token_s: float | None = None
    tok_s: float | None = None
    finish_reason: str | None = None
    is_finite: bool | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank, as /health/detail tells of it."""

    rank: int
    state: str | None = None
    heartbeat_age_s: float | None = None
    last_step_age_s: float | None = None
    host_available_bytes: int | None = None
    memory_bytes: int | None = None
    planned_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """GET /health and /health/detail. `status` is the HTTP status."""

    status: int | None = None
    state: str | None = None
    reason: str | None = None
    ranks: tuple[Rank, ...] = ()


@dataclass(frozen=True, slots=True)
class Meters:
    """The metrics page, read twice: values now, and what was added in `over_s` seconds."""

    now: dict[str, float] = field(default_factory=dict)
    added: dict[str, float] = field(default_factory=dict)
    over_s: float = 0.0

    def value(self, *names: str) -> float | None:
        """Return the first of the names that is there, as it is now."""
        return next((self.now[name] for name in names if name in self.now), None)

    def growth(self, *names: str) -> float | None:
        """Return by how much the first of the names that is there has grown."""
        return next((self.added[name] for name in names if name in self.added), None)


@dataclass(frozen=True, slots=True)
class Host:
    """The machine this runs on. `memory_pressure` is the share of a minute in which somebody waited for memory."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    free_bytes: int | None = None
    swap_used_bytes: int | None = None
    memory_pressure: float | None = None
    load: float | None = None
    num_cores: int | None = None
    is_server: bool = False
    earlyoom: bool | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """All of it. `questions` were asked alone, `together` at the same time; `again` is the first one, repeated."""

    url: str | None = None
    reached: Reached | None = None
    reach_error: str | None = None
    health: Health = Health()
    meters: Meters = Meters()
    question: Answer | None = None
    again: Answer | None = None
    together: tuple[Answer, ...] = ()
    long_question: Answer | None = None
    host: Host = Host()
    logs: tuple[tuple[str, str], ...] = ()
    sheet: FactSheet | None = None
    kernel_log: str | None = None


__all__ = ["Answer", "Health", "Host", "Meters", "Rank", "Reached", "Situation"]
