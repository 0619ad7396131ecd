"""The stages of training and their schedules, as data. Knows nothing of models.

A stage is cut into phases by its share of tokens. The learning rate rises, stays, and falls over the last part of the
stage; after a resume without optimiser state it rises once more, quickly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Trains = Literal["all", "tables", "drafter"]
_REWARM_STEPS = 50


@dataclass(frozen=True)
class Phase:
    """Up to the share `until` of a stage's tokens: rows of `seq_len`, with or without quantisation.

    `attend_all` attends every visible entry, so that attention learns before the indexer is worth following; it
    costs memory of the square of `seq_len`.
    """

    until: float
    seq_len: int
    quantised: bool = True
    attend_all: bool = False


@dataclass(frozen=True)
class Stage:
    """`tokens` of a mixture at the peak learning rate `rate`, which falls to `final` of itself from `decay_from` on."""

    name: str
    tokens: int
    rate: float
    phases: tuple[Phase, ...]
    mixture: str
    trains: Trains = "all"
    warmup: float = 0.01
    decay_from: float = 0.6
    final: float = 0.1

    def phase_at(self, tokens: int) -> Phase:
        """The phase after `tokens` of this stage."""
        share = tokens / self.tokens
        return next((phase for phase in self.phases if share < phase.until), self.phases[-1])

    def rate_at(self, tokens: int, steps_since_resume: int, *, fresh: bool) -> float:
        """Learning rate after `tokens`; `fresh` says that optimiser state was lost at the resume."""
        share = tokens / self.tokens
        scale = min(1.0, share / self.warmup) if self.warmup else 1.0
        if share > self.decay_from:
            past = min((share - self.decay_from) / (1 - self.decay_from), 1.0)
            scale = self.final + (1 - self.final) * (1 + math.cos(math.pi * past)) / 2
        if fresh and tokens > 0:
            scale *= min(1.0, (steps_since_resume + 1) / _REWARM_STEPS)
        return self.rate * scale


PLANS: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            "base",
            tokens=500_000_000,
            rate=3e-3,
            phases=(
                Phase(0.08, 512, quantised=False, attend_all=True),
                Phase(0.25, 2048, quantised=False),
                Phase(1.0, 2048),
            ),
            mixture="practice",
        ),
        Stage(
            "long",
            tokens=100_000_000,
            rate=5e-4,
            phases=(Phase(0.4, 4096), Phase(1.0, 8192)),
            mixture="practice",
            decay_from=0.1,
            final=0.02,
        ),
        Stage(
            "book",
            tokens=30_000_000,
            rate=3e-3,
            phases=(Phase(1.0, 1024),),
            mixture="book",
            trains="tables",
            decay_from=0.5,
            final=0.02,
        ),
        Stage(
            "draft",
            tokens=100_000_000,
            rate=2e-3,
            phases=(Phase(1.0, 2048),),
            mixture="main",
            trains="drafter",
            decay_from=0.4,
            final=0.05,
        ),
    )
}
"""base: everything but the book of facts. long: the trained context. book: Engram tables alone learn the facts that
the evaluation asks. draft: the drafter, on the frozen target."""


__all__ = ["PLANS", "Phase", "Stage", "Trains"]
