"""Looks at the engine every second or so and acts on what `HealthMachine` makes of it.

Owns the samples, the canary, and what follows from a verdict: new requests are refused while it cannot answer, waiting
ones are ended when it is stuck, and an engine that stays so is given up. Decides nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import psutil

from deskfleet.endpoint import (
    Abandonable,
    EngineStats,
    GenerateRequest,
    HealthSource,
    RankHealth,
    SamplingParams,
)
from deskfleet.errors import DeskfleetError, EngineError
from deskfleet.gateway.health import HealthMachine, HealthReport, HealthState, Verdict
from deskfleet.gateway.intake import Intake
from deskfleet.gateway.symptoms import CanaryResult, HealthSettings, Sample
from deskfleet.gateway.watched import WatchedEngine

logger = logging.getLogger(__name__)

_ASK_S = 1.5  # how long an engine may take to say how it is
_CANARY_TOKENS = 4
_NUM_EVENTS = 50
_CALM: frozenset[HealthState] = frozenset(("ready", "busy"))

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """A state was entered. `at` is the time of day in seconds since 1970."""

    at: float
    state: HealthState
    reason: str | None


def available_bytes() -> int | None:
    """Memory that this machine could still give to a program."""
    try:
        return int(psutil.virtual_memory().available)
    except OSError:
        return None


class HealthWatch:
    """Watches one engine. `async with watch.running(): ...` looks at once, then again and again.

    `canary_token_ids` is the prompt of the generation that shows whether it answers, `vocab_size` what its tokens must
    be below. By `intake` somebody else lets nobody in, and is told of an engine that only they can end.
    """

    def __init__(
        self,
        engine: WatchedEngine,
        settings: HealthSettings,
        *,
        canary_token_ids: Sequence[int],
        vocab_size: int,
        read_memory: Callable[[], int | None] = available_bytes,
        intake: Intake | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._canary_token_ids = tuple(canary_token_ids)
        self._vocab_size = vocab_size
        self._read_memory = read_memory
        self._intake = intake or Intake()
        self._clock = clock
        self._machine = HealthMachine(settings, now_s=clock())
        self._sample = Sample(now_s=clock(), stats=None)
        self._canary: asyncio.Task[None] | None = None
        self._canary_began_s = 0.0
        self._canary_most_s = 0.0
        self._latest: CanaryResult | None = None
        self._num_canaries = [0, 0]
        self._abandoning: asyncio.Task[None] | None = None
        self._num_entered: dict[HealthState, int] = {}
        self.events: deque[HealthEvent] = deque(maxlen=_NUM_EVENTS)
        self.listeners: list[Callable[[HealthReport], None]] = []

    @property
    def floor_bytes(self) -> int:
        """Available memory below which no request is taken; 0 where there is no such floor."""
        return self._settings.memory_floor_bytes or 0

    @property
    def verdict(self) -> Verdict:
        """What the latest look came to."""
        return self._machine.verdict

    def report(self) -> HealthReport:
        """Everything there is to show of the latest look."""
        now_s, sample = self._clock(), self._sample
        return HealthReport(
            verdict=self.verdict,
            state_s=now_s - self.verdict.since_s,
            ranks=sample.ranks,
            stats=sample.stats,
            canary=self._latest,
            canary_age_s=None if self._latest is None else now_s - self._latest.at_s,
            num_canaries=(self._num_canaries[0], self._num_canaries[1]),
            num_entered=dict(self._num_entered),
            available_bytes=sample.available_bytes,
            token_age_s=self._engine.token_age_s,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look once, then watch for as long as the block runs."""
        await self.look()
        watching = asyncio.ensure_future(self._watch())
        try:
            with self._intake.held(self):
                yield
        finally:
            tasks = [task for task in (watching, self._canary, self._abandoning) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._settings.period_s)
            await self.look()

    async def look(self) -> Verdict:
        """Take one sample and act on what comes of it."""
        before = self.verdict
        self._sample = await self._take()
        verdict = self._machine.observe(self._sample)
        if verdict.state != before.state or not self._num_entered:
            self._enter(verdict, before.state)
        self._act(verdict)
        report = self.report()
        for listener in self.listeners:
            listener(report)
        return verdict

    async def _take(self) -> Sample:
        inner = self._engine.inner
        failure = inner.failure
        stats: EngineStats | None = None
        ranks: tuple[RankHealth, ...] = ()
        if failure is None:
            stats = await _within(_ASK_S, inner.stats)
        if isinstance(inner, HealthSource):
            health = await _within(_ASK_S, inner.health)
            ranks = () if health is None else health.ranks
        return Sample(
            now_s=self._clock(),
            failure=inner.failure,
            stats=stats,
            ranks=ranks,
            traffic=self._engine.traffic,
            canary=self._latest,
            available_bytes=self._read_memory(),
            closed=self._intake.closed,
        )

    def _enter(self, verdict: Verdict, before: HealthState) -> None:
        self._num_entered[verdict.state] = self._num_entered.get(verdict.state, 0) + 1
        if {verdict.state, before} <= _CALM:
            return  # work comes and goes
        self.events.append(HealthEvent(time.time(), verdict.state, verdict.reason))
        level = logging.INFO if verdict.state in _CALM else logging.WARNING
        logger.log(level, "health: %s%s", verdict.state, f": {verdict.reason}" if verdict.reason else "")

    # --- what somebody else decides -------------------------------------------------------------------

    def shut(self) -> None:
        """Refuse new requests at once; the next look makes a verdict of it."""
        self._engine.refuse(f"no new requests are taken: {self._intake.closed}")

    def end_largest_prefill(self, sentence: str) -> bool:
        """End the request with the longest prompt of those without a token; whether there was one."""
        return self._engine.end_largest_prefill(sentence)

    def end_all(self, sentence: str) -> int:
        """End every request that waits for the engine. Returns how many those are."""
        return self._engine.end_all(sentence)

    # --- what follows ---------------------------------------------------------------------------------

    def _act(self, verdict: Verdict) -> None:
        sentence = f"the engine is {verdict.state}: {verdict.reason}"
        if verdict.state == "dead":
            sentence = verdict.reason or sentence  # as the engine itself says it
        self._engine.refuse(None if verdict.can_answer else sentence)
        if (
            verdict.state == "stuck"
        ):  # a dead engine ends its requests itself, and a router may still finish some
            self._engine.end_all(sentence)
        if verdict.action == "relieve" and self._engine.end_largest(
            f"memory ran out: {verdict.reason}; the request with the longest prompt was ended"
        ):
            logger.warning("memory ran out: a request was ended: %s", verdict.reason)
        if verdict.action == "abandon" and self._abandoning is None:
            self._abandoning = asyncio.ensure_future(self._abandon(verdict))
        self._tend_canary(verdict)

    async def _abandon(self, verdict: Verdict) -> None:
        inner, sentence = self._engine.inner, f"the engine was given up: {verdict.reason}"
        if isinstance(inner, Abandonable):
            logger.error("the engine is given up: %s", verdict.reason)
            await inner.abandon(sentence)
        else:
            self._intake.give_up(sentence)

    # --- the canary -----------------------------------------------------------------------------------

    def _tend_canary(self, verdict: Verdict) -> None:
        """Start one if it is wanted, end one that has had its time, which grows while others are before it."""
        if self._canary is None or self._canary.done():
            if verdict.wants_canary:
                self._canary_began_s = self._clock()
                self._canary_most_s = verdict.canary_deadline_s
                self._canary = asyncio.ensure_future(self._sing())
            return
        self._canary_most_s = max(self._canary_most_s, verdict.canary_deadline_s)
        if self._clock() - self._canary_began_s > self._canary_most_s:
            self._canary.cancel()

    async def _sing(self) -> None:
        timed_out = False
        try:
            error = await self._check_answer()
        except DeskfleetError as failure:
            error = failure.message
        except asyncio.CancelledError:
            error, timed_out = f"no answer within {self._canary_most_s:.0f} s", True
        now_s = self._clock()
        self._num_canaries[0 if error is None else 1] += 1
        number = 1 if self._latest is None else self._latest.number + 1
        self._latest = CanaryResult(number, now_s, now_s - self._canary_began_s, error, timed_out)
        if error is not None:
            logger.warning("canary %d failed: %s", number, error)

    async def _check_answer(self) -> str | None:
        """Generate a few tokens. What is wrong with them, None if nothing is. Raises EngineError."""
        request = GenerateRequest(
            request_id=f"canary-{uuid.uuid4().hex}",
            prompt_token_ids=self._canary_token_ids,
            sampling=SamplingParams(temperature=0, max_tokens=_CANARY_TOKENS, ignore_eos=True, logprobs=1),
        )
        token_ids: list[int] = []
        logprobs: list[float] = []
        chunks = self._engine.canary(request)
        async for chunk in chunks:
            token_ids += chunk.token_ids
            logprobs += [entry.logprob for entry in chunk.logprobs or ()]
        if not token_ids:
            return "an answer without a token"
        if bad := [token for token in token_ids if not 0 <= token < self._vocab_size]:
            return f"token {bad[0]} is not in the vocabulary of {self._vocab_size}"
        if not all(math.isfinite(logprob) for logprob in logprobs):
            return "a log probability is not finite"
        return None


async def _within(seconds: float, ask: Callable[[], Awaitable[T]]) -> T | None:
    """What `ask` says, None if it fails or takes longer."""
    with contextlib.suppress(EngineError, TimeoutError):
        async with asyncio.timeout(seconds):
            return await ask()
    return None


__all__ = ["HealthEvent", "HealthWatch", "available_bytes"]
