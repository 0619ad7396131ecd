"""Whether the engine answers: a state machine over samples. Owns the states and what follows from them.

    starting   loads, or has not answered yet                          /health 503
    ready      answers, and nothing runs                               200
    busy       answers, and something runs, however much waits         200
    degraded   answers, and something is wrong that may get worse      200; 503 while nobody is let in
    stuck      is there and answers nothing                            503, running requests are failed
    dead       the engine has ended, and says why                      503

Pure: it reads no clock, no file and no engine. `watch.py` takes the samples and acts on the verdicts. Nothing changes
a state because of one bad sample: everything takes `strikes` in a row, but what the engine says of itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from deskfleet.endpoint import EngineStats, RankHealth
from deskfleet.gateway.symptoms import (
    Action,
    CanaryResult,
    Faults,
    HealthSettings,
    Memory,
    Proof,
    Sample,
    Silence,
    Stall,
    Strikes,
    has_work,
)

HealthState = Literal["starting", "ready", "busy", "degraded", "stuck", "dead"]

STATES: tuple[HealthState, ...] = ("starting", "ready", "busy", "degraded", "stuck", "dead")

_PAUSE_S = 5.0  # between two samples: then it was the observer that slept, and what it saw is worth nothing


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is made of all samples so far. `since_s` is when the state began, on the samples' clock."""

    state: HealthState
    reasons: tuple[str, ...]
    since_s: float
    can_answer: bool
    wants_canary: bool = False
    canary_deadline_s: float = 0.0
    action: Action = "none"

    @property
    def reason(self) -> str | None:
        """The reasons as one line."""
        return "; ".join(self.reasons) or None


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Health as it is shown: the latest verdict and what it came from.

    `num_entered` counts how often each state was entered, `num_canaries` those that were answered and those that were
    not. `state_s` is how long the state lasts. `token_age_s` is of the latest token that any request got.
    """

    verdict: Verdict
    state_s: float
    ranks: tuple[RankHealth, ...] = ()
    stats: EngineStats | None = None
    canary: CanaryResult | None = None
    canary_age_s: float | None = None
    num_canaries: tuple[int, int] = (0, 0)
    num_entered: Mapping[HealthState, int] = field(default_factory=dict)
    available_bytes: int | None = None
    token_age_s: float | None = None


class HealthMachine:
    """Makes a verdict of each sample. Samples come about once a second, in order of time."""

    def __init__(self, settings: HealthSettings, *, now_s: float) -> None:
        self._settings = settings
        self._silence = Silence(settings)
        self._stall = Stall(settings)
        self._report = Strikes(settings.strikes)
        self._memory = Memory(settings)
        self._faults = Faults(settings)
        self._proof = Proof(settings, now_s)
        self._last_s = now_s
        self._stuck_s: float | None = (
            None  # since when it has not answered, until it is proven that it does again
        )
        self._stuck_reasons: tuple[str, ...] = ()
        self._has_reported = False
        self.verdict = Verdict("starting", ("no sample has been taken yet",), now_s, can_answer=False)

    def observe(self, sample: Sample) -> Verdict:
        """Take a sample in and say what it means."""
        if sample.now_s - self._last_s > _PAUSE_S:
            self._silence.forgive()
            self._stall.forgive(sample.now_s)
            self._report.count = 0
            self._memory.forgive()
            if self._stuck_s is not None:
                self._stuck_s = sample.now_s
        self._last_s = sample.now_s
        self._has_reported |= sample.stats is not None
        self._proof.observe(sample)
        stuck = self._stuck_because(sample)
        closed = [] if sample.closed is None else [f"no new requests are taken: {sample.closed}"]
        degraded = [*closed, *self._memory.observe(sample), *self._faults.observe(sample)]
        degraded += self._proof.doubts()
        state, reasons = self._state(sample, stuck, tuple(degraded))
        since_s = self.verdict.since_s if state == self.verdict.state else sample.now_s
        self.verdict = Verdict(
            state,
            reasons,
            since_s,
            can_answer=state in ("ready", "busy")
            or (state == "degraded" and not self._memory.is_low and sample.closed is None),
            wants_canary=self._wants_canary(sample, state),
            canary_deadline_s=self._canary_deadline_s(sample),
            action=self._action(sample, state),
        )
        return self.verdict

    def _stuck_because(self, sample: Sample) -> tuple[str, ...]:
        reasons = [*self._silence.observe(sample), *self._stall.observe(sample), *self._proof.failures()]
        if self._report.observe(sample.stats is None and sample.failure is None and self._has_reported):
            reasons.append("the engine does not say how it is")
        return tuple(reasons)

    def _state(
        self, sample: Sample, stuck: tuple[str, ...], degraded: tuple[str, ...]
    ) -> tuple[HealthState, tuple[str, ...]]:
        now_s = sample.now_s
        if sample.failure is not None:
            self._stuck_s = now_s if self._stuck_s is None else self._stuck_s
            self._stuck_reasons = (sample.failure,)
            return "dead", (sample.failure,)
        loading = [rank.rank for rank in sample.ranks if rank.state == "loading"]
        if loading:
            return "starting", (f"rank {', '.join(map(str, loading))} loads",)
        if not self._has_reported:
            return "starting", ("the engine has not been reached yet",)
        if stuck:
            self._stuck_s = now_s if self._stuck_s is None else self._stuck_s
            self._stuck_reasons = stuck
            return "stuck", stuck
        if self._stuck_s is not None:
            if not self._proof.after(self._stuck_s):
                return "stuck", ("has not answered since: " + "; ".join(self._stuck_reasons),)
            self._stuck_s = None
        if self._settings.needs_first_answer and not self._proof.after(float("-inf")):
            return "starting", ("has not answered yet", *self._proof.doubts())
        if degraded:
            return "degraded", degraded
        return ("busy" if has_work(sample) else "ready"), ()

    def _wants_canary(self, sample: Sample, state: HealthState) -> bool:
        if state == "dead" or (state == "starting" and not self._has_reported) or self._silence.is_silent:
            return False
        if any(rank.state == "loading" for rank in sample.ranks):
            return False
        in_doubt = state in ("stuck", "starting") or self._proof.is_doubtful(sample)
        return self._proof.is_due(sample, in_doubt=in_doubt)

    def _canary_deadline_s(self, sample: Sample) -> float:
        settings = self._settings
        ahead = sample.traffic.num_open
        if sample.stats is not None:
            ahead = max(ahead, sample.stats.num_running + sample.stats.num_waiting)
        return (
            settings.canary_deadline_s
            + settings.canary_request_s * ahead
            + settings.prompt_token_s * sample.traffic.num_tokens_ahead
        )

    def _action(self, sample: Sample, state: HealthState) -> Action:
        if state == "starting":
            return "none"
        if self._stuck_s is not None and sample.now_s - self._stuck_s >= self._settings.dead_after_s:
            return "abandon"
        return "none" if state == "dead" else self._memory.action(sample)


__all__ = ["STATES", "HealthMachine", "HealthReport", "HealthState", "Verdict"]
