"""What a gate is, and what it finds. Owns the vocabulary that gates, runner and reports share; asks nobody anything.

A gate that cannot fail is no gate: for each there is an endpoint in `deskfleet.testing.saboteurs` that it fails. A
verdict is one of three. `skip` is for what could not be shown, with the reason; it never counts as a pass.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from deskfleet.gates.subject import Subject

Verdict = Literal["pass", "fail", "skip"]
When = Literal["launch", "acceptance"]
Cause = Literal["answer", "refusal", "server", "time", "pace", "tool"]
"""Whose fault a verdict other than `pass` is: a wrong answer, a refused question, a server that failed or cannot be
read, no answer in time, right answers that came too slowly or unevenly, or the gate itself, which could not do what it
claims to do."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A figure: numbers of 0 to 1 (None: not asked) for each row and column; `title` says what of."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class Series:
    """A figure: points (x, y) of one or several named lines."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]


Figure = Grid | Series


@dataclass(frozen=True, slots=True)
class Finding:
    """What a gate found. `measured` is a line for people, `values` its numbers; `reason` says why it is no pass."""

    verdict: Verdict
    measured: str
    reason: str = ""
    cause: Cause | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()


def passed(measured: str, *figures: Figure, **values: Any) -> Finding:
    """Return that all is as it should be."""
    return Finding("pass", measured, values=values, figures=figures)


def failed(
    reason: str, *figures: Figure, measured: str = "", cause: Cause = "answer", **values: Any
) -> Finding:
    """Return that it is not, and why. Without `measured` the reason stands for it."""
    return Finding("fail", measured or reason, reason, cause, values, figures)


def skipped(
    reason: str, *figures: Figure, measured: str = "", cause: Cause | None = None, **values: Any
) -> Finding:
    """Return that it could not be shown, and why. With the cause `tool` the gate was to show it and failed itself."""
    return Finding("skip", measured or "not shown", reason, cause, values, figures)


class Decided(Exception):
    """Ends a gate with the finding it carries."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.reason or finding.measured)
        self.finding = finding


@dataclass(frozen=True, slots=True)
class Gate:
    """One thing that must be true.

    `question` is what it asks, `protects` what goes wrong where nobody asks, `threshold` what passes. A gate that is
    `alone` needs the server to itself, others run side by side; `is_quick` is asked by `verify --quick` too.
    """

    name: str
    question: str
    protects: str
    threshold: str
    when: When
    run: Callable[[Subject], Awaitable[Finding]]
    alone: bool = False
    is_quick: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """How patient and how thorough gates are. Each default exists here alone.

    `patience_s` is how long a server may be silent, beside what reading a prompt takes at the rate that was measured.
    `concurrency` is the most streams at once. `chunk_tokens` is how many tokens of a prompt the server is thought to
    read in one step; a prompt a little longer is asked. `long_prompt_s` is what a launch may spend on its longest
    prompt. `soak_s`, `num_churned`, `ladder_lengths`, `ladder_depths` and `num_questions` are how much an acceptance
    asks, `ladder_s` (None: no limit) is what a ladder may spend, and within `freed_s` places of clients that left are
    free.
    """

    patience_s: float = 120.0
    concurrency: int = 8
    chunk_tokens: int = 512
    long_prompt_s: float = 15.0
    soak_s: float = 1800.0
    freed_s: float = 15.0
    num_churned: int = 48
    ladder_lengths: int = 6
    ladder_depths: int = 5
    ladder_s: float | None = None
    num_questions: int = 30
    expected_model: str | None = None
    recorded_score: str | None = None
    score_output: str | None = None
    lm_eval_results: str | None = None
    seed: int | None = None


__all__ = [
    "Cause",
    "Decided",
    "Figure",
    "Finding",
    "Gate",
    "Grid",
    "Limits",
    "Series",
    "Verdict",
    "When",
    "failed",
    "passed",
    "skipped",
]
