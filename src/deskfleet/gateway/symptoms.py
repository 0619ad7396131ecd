"""What can be wrong with an engine: one class per symptom, each of which remembers what it saw. Owns their thresholds.

A symptom looks at every sample and returns sentences while it is there. What follows from them is `health.py`'s. Pure:
nothing here reads a clock, a file or an engine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from deskfleet.endpoint import EngineStats, RankHealth
from deskfleet.errors import ConfigError
from deskfleet.units import format_bytes

Action = Literal["none", "relieve", "abandon"]
"""`relieve`: fail the request with the longest prompt that has no token yet. `abandon`: end the engine."""

_HYSTERESIS = 1.1  # memory counts as enough again this far above its floor


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """Thresholds. Raises ConfigError naming the one that cannot work.

    The engine is looked at every `period_s`, and `strikes` looks in a row must say the same. A rank is silent after
    `silent_s` without a heartbeat. Nothing may stand still for longer than `stall_s` while work exists, and for
    `prompt_token_s` more for every prompt token that must be run before the next sign of life; None leaves that to the
    engine, if it ends silent streams itself.

    An idle engine is asked for a few tokens every `canary_every_s` (None: never), and in doubt every `canary_retry_s`.
    It has `canary_deadline_s` to answer, `canary_request_s` more for each request before it, and the time of their
    prompts. Faults count for `fault_window_s`. An engine that is stuck for `dead_after_s` is given up.

    Below `memory_floor_bytes` of available memory no request is taken; below `memory_critical_bytes` the largest
    prompts are failed, one by one, and when none is left for `critical_s`, the engine is given up. Floors of None are
    none, unless whoever serves knows the machine.
    """

    period_s: float = 1.0
    strikes: int = 3
    silent_s: float = 9.0
    stall_s: float | None = 15.0
    prompt_token_s: float = 0.005
    canary_every_s: float | None = 60.0
    canary_retry_s: float = 5.0
    canary_deadline_s: float = 10.0
    canary_request_s: float = 1.0
    needs_first_answer: bool = False
    fault_window_s: float = 300.0
    dead_after_s: float = 120.0
    memory_floor_bytes: int | None = None
    memory_critical_bytes: int | None = None
    critical_s: float = 10.0

    def __post_init__(self) -> None:
        for name in (
            "period_s",
            "silent_s",
            "stall_s",
            "canary_every_s",
            "canary_retry_s",
            "canary_deadline_s",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}, not more than 0")
        if self.strikes < 1:
            raise ConfigError(f"strikes is {self.strikes}, less than 1")
        if (self.memory_critical_bytes or 0) > (self.memory_floor_bytes or 0):
            raise ConfigError(
                f"memory_critical_bytes is {self.memory_critical_bytes}, "
                f"more than memory_floor_bytes {self.memory_floor_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the gateway knows of its own requests, those of the canary not counted among answers and failures.

    `num_open` have been given to the engine and are not over; `num_waiting` of them wait for the engine's next chunk,
    the others for a slow client. `num_tokens_ahead` are prompt tokens of those that have no chunk yet.
    """

    num_open: int = 0
    num_waiting: int = 0
    num_tokens_ahead: int = 0
    num_chunks: int = 0
    num_answered: int = 0
    num_failed: int = 0
    num_failed_in_a_row: int = 0
    latest_failure: str | None = None


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """One generation that was only made to see whether the engine answers. `number` counts them, `at_s` is its end.

    `timed_out`: its time was over before anything was wrong with it.
    """

    number: int
    at_s: float
    took_s: float
    error: str | None
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Everything that is known at `now_s` of a monotonic clock. `stats` None: the engine could not be asked.

    `closed` is why somebody else lets nobody in.
    """

    now_s: float
    failure: str | None = None
    stats: EngineStats | None = field(default_factory=EngineStats)
    ranks: tuple[RankHealth, ...] = ()
    traffic: Traffic = field(default_factory=Traffic)
    canary: CanaryResult | None = None
    available_bytes: int | None = None
    closed: str | None = None


class Strikes:
    """How often in a row something was seen."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    def observe(self, is_bad: bool) -> bool:
        """Count, and say whether it is enough."""
        self.count = self.count + 1 if is_bad else 0
        return self.count >= self._limit


class Silence:
    """Ranks that do not report, or are no more although the engine has not said so."""

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._strikes: dict[int, Strikes] = {}
        self.is_silent = False

    def forgive(self) -> None:
        self._strikes.clear()

    def observe(self, sample: Sample) -> list[str]:
        reasons = []
        self.is_silent = False
        for rank in sample.ranks:
            age_s = rank.heartbeat_age_s
            is_late = age_s is not None and age_s > self._settings.silent_s
            is_bad = rank.state == "ended" or (is_late and rank.state != "loading")
            self.is_silent |= is_bad
            strikes = self._strikes.setdefault(rank.rank, Strikes(self._settings.strikes))
            if not strikes.observe(is_bad):
                continue
            if rank.state == "ended":
                reasons.append(f"the process of rank {rank.rank} has ended")
            else:
                reasons.append(
                    f"rank {rank.rank} has been silent for {age_s:.0f} s: its process is frozen or starved"
                )
        return reasons


class Stall:
    """Work that exists and does not move."""

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._strikes = Strikes(settings.strikes)
        self._position: object = None
        self._moved_s: float | None = None

    def forgive(self, now_s: float) -> None:
        self._strikes.count = 0
        self._moved_s = now_s

    def observe(self, sample: Sample) -> list[str]:
        position = _position(sample)
        if self._moved_s is None or position != self._position or not _is_awaited(sample):
            self._position, self._moved_s = position, sample.now_s
        quiet_s = sample.now_s - self._moved_s
        if self._settings.stall_s is None:
            return []
        limit_s = self._settings.stall_s + self._settings.prompt_token_s * _tokens_ahead(sample)
        if not self._strikes.observe(quiet_s > limit_s):
            return []
        where = ", ".join(f"rank {rank.rank} is in {rank.state}" for rank in sample.ranks)
        return [f"nothing has moved for {quiet_s:.0f} s while work exists" + (f" ({where})" if where else "")]


class Memory:
    """Memory that a host could still give, of the host that has least."""

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._low, self._enough = Strikes(settings.strikes), Strikes(settings.strikes)
        self._critical = Strikes(settings.strikes)
        self._exhausted_s: float | None = None  # since when it is critical with nothing left to fail
        self.is_low = False

    def forgive(self) -> None:
        self._low.count = self._enough.count = self._critical.count = 0

    def observe(self, sample: Sample) -> list[str]:
        name, available = _least_memory(sample)
        if available is None:
            return []
        floor = self._settings.memory_floor_bytes or 0
        if self._low.observe(available < floor):
            self.is_low = True
        if self._enough.observe(available > floor * _HYSTERESIS):
            self.is_low = False
        if not self.is_low:
            return []
        largest = max((rank for rank in sample.ranks if rank.memory_bytes), key=_memory_of, default=None)
        held = (
            ""
            if largest is None
            else f"; rank {largest.rank} holds most, {format_bytes(largest.memory_bytes or 0)}"
        )
        return [
            f"{format_bytes(available)} of memory are available on {name}, below the floor of "
            f"{format_bytes(floor)}: no new requests are taken{held}"
        ]

    def action(self, sample: Sample) -> Action:
        _, available = _least_memory(sample)
        is_critical = available is not None and available < (self._settings.memory_critical_bytes or 0)
        if not self._critical.observe(is_critical):
            if not is_critical:
                self._exhausted_s = None
            return "none"
        if sample.traffic.num_open:
            self._critical.count = 0  # one request at a time, and then see what it gave back
            self._exhausted_s = None
            return "relieve"
        if self._exhausted_s is None:
            self._exhausted_s = sample.now_s
        return "abandon" if sample.now_s - self._exhausted_s >= self._settings.critical_s else "none"


class Faults:
    """Requests that ended badly while others go on."""

    def __init__(self, settings: HealthSettings) -> None:
        self._window_s = settings.fault_window_s
        self._not_finite = _Recent(self._window_s)
        self._failed = _Recent(self._window_s)

    def observe(self, sample: Sample) -> list[str]:
        reasons = []
        if sample.stats is not None:
            self._not_finite.observe(sample.now_s, sample.stats.num_not_finite)
        self._failed.observe(sample.now_s, sample.traffic.num_failed)
        minutes = f"in the last {self._window_s / 60:.0f} minutes"
        if (num_bad := self._not_finite.count) >= 2:
            reasons.append(f"the logits of {num_bad} requests were not finite {minutes}")
        if (num_failed := self._failed.count) >= 2:
            latest = sample.traffic.latest_failure
            reasons.append(
                f"{num_failed} answers failed {minutes}" + (f", the latest: {latest}" if latest else "")
            )
        return reasons


class _Recent:
    """How much a counter has grown within a window. What it had before the first look does not count."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._total: int | None = None
        self._growth: deque[tuple[float, int]] = deque()
        self.count = 0

    def observe(self, now_s: float, total: int) -> None:
        if self._total is not None and total > self._total:
            self._growth.append((now_s, total - self._total))
            self.count += total - self._total
        self._total = total
        while self._growth and now_s - self._growth[0][0] > self._window_s:
            self.count -= self._growth.popleft()[1]


class Proof:
    """When the engine last answered as it should, a client or the canary, and when it last did not."""

    def __init__(self, settings: HealthSettings, now_s: float) -> None:
        self._settings = settings
        self._num_answered = 0
        self._num_chunks = 0
        self._number = 0
        self._active_s = now_s  # of the latest token or canary
        self._position: object = None
        self._moved_s = now_s
        self._tried_s: float | None = None
        self._answered_s: float | None = None
        self._misses = 0
        self._error: str | None = None
        self._num_failed = 0
        self._failed_s = float("-inf")  # of the latest answer that failed

    def after(self, at_s: float) -> bool:
        """Whether it has answered since `at_s`."""
        return self._answered_s is not None and self._answered_s > at_s

    def observe(self, sample: Sample) -> None:
        traffic, canary = sample.traffic, sample.canary
        if traffic.num_chunks != self._num_chunks:
            self._active_s = sample.now_s
        if (position := _position(sample)) != self._position:
            self._position, self._moved_s = position, sample.now_s
        if traffic.num_answered > self._num_answered:
            self._answered(sample.now_s)
        self._num_answered, self._num_chunks = traffic.num_answered, traffic.num_chunks
        if traffic.num_failed > self._num_failed:
            self._failed_s = sample.now_s
        self._num_failed = traffic.num_failed
        if canary is None or canary.number == self._number:
            return
        self._number = canary.number
        self._active_s = self._tried_s = canary.at_s
        if canary.error is None:
            self._answered(canary.at_s)
        elif not canary.timed_out or self._moved_s < canary.at_s - canary.took_s / 2:
            # One that ran out of time while others moved had to wait for them: that is being busy, not being stuck.
            self._error = canary.error
            # Clients have struck already: the canary only had to tell bad prompts from a bad engine.
            is_confirmed = traffic.num_failed_in_a_row >= self._settings.strikes
            self._misses = self._settings.strikes if is_confirmed else self._misses + 1

    def _answered(self, at_s: float) -> None:
        self._answered_s, self._misses, self._error = at_s, 0, None

    def failures(self) -> list[str]:
        """The reason why it does not answer, if it does not."""
        if self._misses < self._settings.strikes:
            return []
        return [f"{self._misses} canary generations failed in a row, the latest: {self._error}"]

    def doubts(self) -> list[str]:
        """What may become such a reason."""
        if 2 <= self._misses < self._settings.strikes:
            return [f"{self._misses} canary generations failed in a row, the latest: {self._error}"]
        return []

    def is_doubtful(self, sample: Sample) -> bool:
        """Whether a canary should tell what is the matter."""
        has_struck = sample.traffic.num_failed_in_a_row >= self._settings.strikes
        return self._misses > 0 or (has_struck and not self.after(self._failed_s))

    def is_due(self, sample: Sample, *, in_doubt: bool) -> bool:
        """Whether it is time for a canary."""
        if in_doubt:
            return self._tried_s is None or sample.now_s - self._tried_s >= self._settings.canary_retry_s
        every_s = self._settings.canary_every_s
        is_idle = sample.traffic.num_waiting == 0
        return every_s is not None and is_idle and sample.now_s - self._active_s >= every_s


def has_work(sample: Sample) -> bool:
    """Whether anything runs or waits, whoever asked for it."""
    stats = sample.stats
    return _is_awaited(sample) or (stats is not None and stats.num_running + stats.num_waiting > 0)


def _is_awaited(sample: Sample) -> bool:
    """Whether something must move soon: a request waits for the engine, or a rank says that it works.

    What the engine calls running does not count: it may wait for a client that does not read.
    """
    return sample.traffic.num_waiting > 0 or any(
        rank.state not in ("idle", "loading", "ended") for rank in sample.ranks
    )


def _position(sample: Sample) -> object:
    """Where everything is: as long as two samples differ in it, something moves."""
    stats = sample.stats
    return (
        sample.traffic.num_chunks,
        None if stats is None else (stats.num_steps, stats.num_generated_tokens, stats.num_finished),
        tuple((rank.num_steps, rank.num_moves) for rank in sample.ranks),
    )


def _tokens_ahead(sample: Sample) -> int:
    """Prompt tokens that may have to be run before something moves again.

    Ranks say what they run now. An engine that reports no steps shows nothing until the first prompt is through.
    """
    if sample.ranks:
        return max(rank.num_tokens for rank in sample.ranks)
    if sample.stats is not None and sample.stats.num_steps:
        return 0
    return sample.traffic.num_tokens_ahead


def _least_memory(sample: Sample) -> tuple[str, int | None]:
    known = [
        (f"the host of rank {rank.rank}", rank.host_available_bytes)
        for rank in sample.ranks
        if rank.host_available_bytes is not None
    ]
    if sample.available_bytes is not None:
        known.append(("this host", sample.available_bytes))
    return min(known, key=lambda each: each[1], default=("", None))


def _memory_of(rank: RankHealth) -> int:
    return rank.memory_bytes or 0


__all__ = [
    "Action",
    "CanaryResult",
    "Faults",
    "HealthSettings",
    "Memory",
    "Proof",
    "Sample",
    "Silence",
    "Stall",
    "Strikes",
    "Traffic",
    "has_work",
]
