"""The stages of training and their schedules, as data. Knows nothing of models.

A stage is cut into phases by its share done. The learning rate rises, stays, and falls over the last part of the stage;
after a resume without optimiser state it rises once more, quickly. How long a stage is may be said in tokens or in
minutes: a budget in minutes ends with the learning rate at its lowest on any machine, at whatever speed. Time that
is lost to compilation counts against the budget and moves no schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Trains = Literal["all", "tables", "drafter"]
_REWARM_STEPS = 50


@dataclass(frozen=True)
class Phase:
    """Up to the share `until` of a stage: rows of `seq_len`, with or without quantisation.

    `attend_all` attends every visible entry, so that attention learns before the indexer is worth following; it
    costs memory of the square of `seq_len`.
    """

    until: float
    seq_len: int
    quantised: bool = True
    attend_all: bool = False


@dataclass(frozen=True)
class Stage:
    """A mixture at the peak learning rate `rate`, which falls to `final` of itself from the share `decay_from` on.

    It lasts for `tokens`, or for `minutes` where they are given. `weight` is its part of a training of all stages. A
    step takes `batch_tokens`: the same in every stage, so that what was compiled for one serves the others.
    """

    name: str
    tokens: int
    rate: float
    phases: tuple[Phase, ...]
    mixture: str
    weight: float
    trains: Trains = "all"
    warmup: float = 0.01
    decay_from: float = 0.6
    final: float = 0.1
    batch_tokens: int = 32_768
    minutes: float | None = None

    def share(self, tokens: int, seconds_s: float, lost_s: float) -> float:
        """How much of the stage is done, from 0 to 1, after `tokens` in `seconds_s`, beside which `lost_s` went by."""
        if self.minutes is None:
            return min(tokens / self.tokens, 1.0)
        room_s = 60 * self.minutes - lost_s
        return min(seconds_s / room_s, 1.0) if room_s > 0 else 1.0

    def phase_at(self, share: float) -> Phase:
        """The phase after this share of the stage."""
        return next((phase for phase in self.phases if share < phase.until), self.phases[-1])

    def rate_at(self, share: float, steps_since_resume: int, *, fresh: bool) -> float:
        """Learning rate after a share; `fresh` says that optimiser state was lost at the resume."""
        scale = min(1.0, share / self.warmup) if self.warmup else 1.0
        if share > self.decay_from:
            past = min((share - self.decay_from) / (1 - self.decay_from), 1.0)
            scale = self.final + (1 - self.final) * (1 + math.cos(math.pi * past)) / 2
        if fresh and share > 0:
            scale *= min(1.0, (steps_since_resume + 1) / _REWARM_STEPS)
        return self.rate * scale


PLANS: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            "base",
            tokens=100_000_000,
            rate=3e-3,
            phases=(
                Phase(0.06, 512, quantised=False, attend_all=True),
                Phase(0.2, 2048, quantised=False),
                Phase(1.0, 2048),
            ),
            mixture="practice",
            weight=0.62,
            decay_from=0.5,
            final=0.05,
        ),
        Stage(
            "long",
            tokens=10_000_000,
            rate=4e-4,
            phases=(Phase(0.4, 4096), Phase(1.0, 8192)),
            mixture="practice",
            weight=0.1,
            decay_from=0.1,
            final=0.02,
        ),
        Stage(
            "book",
            tokens=6_000_000,
            rate=2e-3,
            phases=(Phase(1.0, 2048),),
            mixture="book",
            weight=0.08,
            trains="tables",
            decay_from=0.4,
            final=0.02,
        ),
        Stage(
            "draft",
            tokens=30_000_000,
            rate=2e-3,
            phases=(Phase(1.0, 2048),),
            mixture="main",
            weight=0.2,
            trains="drafter",
            decay_from=0.4,
            final=0.05,
        ),
    )
}
"""base: everything but the book of facts. long: the trained context. book: Engram tables alone learn the facts that
the evaluation asks. draft: the drafter, on the frozen target."""


def timed(minutes: float) -> tuple[Stage, ...]:
    """All stages in order, with `minutes` shared out among them by weight."""
    total = sum(stage.weight for stage in PLANS.values())
    return tuple(replace(stage, minutes=minutes * stage.weight / total) for stage in PLANS.values())


__all__ = ["PLANS", "Phase", "Stage", "Trains", "timed"]
