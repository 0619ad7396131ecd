"""Acceptance gate `soak`: streams that ask one question after the other, every answer checked, for as long as wished.

Owns the mix, a tally whose size does not grow with the hours, and the reading of it: answers that carry another's
value, answers that are wrong only in company, what the model gets wrong anyway, starved streams, a falling rate.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from random import Random

from deskfleet.gates.company import crossed_tag, judge_wrong, own_errors
from deskfleet.gates.contract import Figure, Finding, Gate, Series, failed, passed
from deskfleet.gates.machine import OtherWork
from deskfleet.gates.puzzle import Puzzle
from deskfleet.gates.questions import codes, timer
from deskfleet.gates.subject import Answered, Subject

_SHORT, _LONG = 70, 400
_STARVED = 1 / 3
_SLOWED = 0.5
_LEAST_ANSWERS, _LEAST_S = 24, 30.0  # before rates of thirds are compared
_BINS = 60  # a multiple of three
_RECENT, _KEPT_WRONG = 256, 200


@dataclass(slots=True)
class Tally:
    """What came of a soak of `soak_s` so far. Times count from its beginning, at `began_s` of the run.

    `counts` are answers of each stream; `tokens` those that arrived in each equal part of the time.
    """

    counts: list[int]
    soak_s: float
    began_s: float
    num_wrong: int = 0
    wrong: list[Answered] = field(default_factory=list)
    crossed: str | None = None
    tokens: list[float] = field(default_factory=lambda: [0.0] * _BINS)
    recent: deque[Answered] = field(default_factory=lambda: deque(maxlen=_RECENT))
    suspects: deque[Answered] = field(default_factory=lambda: deque(maxlen=_RECENT))

    @property
    def num_answers(self) -> int:
        """Answers of all streams."""
        return sum(self.counts)

    def add(self, stream: int, answered: Answered) -> None:
        """Take an answer in."""
        self.counts[stream] += 1
        self.recent.append(answered)
        if not answered.is_right:
            self.num_wrong += 1
            self.suspects.append(answered)
            if len(self.wrong) < _KEPT_WRONG:
                self.wrong.append(answered)
        self._find_crossed(answered)
        self._count_tokens(answered)

    def _find_crossed(self, answered: Answered) -> None:
        """See whether two answers of the same time were exchanged; whichever ends later completes the pair."""
        if self.crossed is None and not answered.is_right:
            self.crossed = crossed_tag(answered, self.recent)
        for suspect in self.suspects:
            if self.crossed is None:
                self.crossed = crossed_tag(suspect, (answered,))

    def _count_tokens(self, answered: Answered) -> None:
        if answered.reply is None or not answered.reply.arrivals_s:
            return
        share = answered.reply.num_completion_tokens / len(answered.reply.arrivals_s)
        begin_s = answered.began_s - self.began_s
        for arrived_s in answered.reply.arrivals_s:
            # What is still arriving when the time is over counts to its last part.
            place = int((begin_s + arrived_s) / self.soak_s * _BINS)
            self.tokens[min(max(place, 0), _BINS - 1)] += share

    def rates(self, parts: int) -> list[float]:
        """Return tokens a second of all streams in equal parts of the time."""
        size = _BINS // parts
        width_s = self.soak_s / parts
        return [sum(self.tokens[part * size : (part + 1) * size]) / width_s for part in range(parts)]


async def _run(subject: Subject) -> Finding:
    await subject.measure_text()
    streams, soak_s = subject.limits.concurrency, subject.limits.soak_s
    tally = Tally([0] * streams, soak_s, time.monotonic() - subject.session.began)
    begin = time.monotonic()
    watch = asyncio.create_task(_watch(subject, begin))
    async with OtherWork(subject.client.url) as machine:
        try:
            await asyncio.gather(
                *(_stream(subject, number, begin + soak_s, tally) for number in range(streams))
            )
        finally:
            watch.cancel()
    return await _judge(subject, tally, machine)


async def _watch(subject: Subject, begin: float) -> None:
    while True:
        subject.report(min(time.monotonic() - begin, subject.limits.soak_s), subject.limits.soak_s, "s")
        await asyncio.sleep(1.0)


async def _stream(subject: Subject, number: int, end: float, tally: Tally) -> None:
    rng = Random(f"{subject.session.seed} soak {number}")
    while time.monotonic() < end and subject.session.gone is None:
        answered = await subject.ask(_draw(subject, rng))
        tally.add(number, answered)
        if answered.reply is None:
            await asyncio.sleep(0.2)  # a server that refuses at once is not to be asked thousands of times


def _draw(subject: Subject, rng: Random) -> Puzzle:
    kind = rng.choices(("short", "long", "tool", "sum"), (5, 2, 1, 1))[0]
    if kind == "tool":
        return timer(rng.randint(2, 99), subject.spare_tokens)
    if kind == "sum":
        return rng.choice(subject.questions.sums())
    num_tokens = _SHORT if kind == "short" else _LONG
    return codes(subject.ruler, num_tokens, rng, spare_tokens=subject.spare_tokens)


async def _judge(subject: Subject, tally: Tally, machine: OtherWork) -> Finding:
    total = tally.num_answers
    if not total:
        return failed("nothing was answered", cause="time")
    rate = sum(tally.tokens) / tally.soak_s
    measured = (
        f"{total - tally.num_wrong} of {total} right, {len(tally.counts)} streams for {tally.soak_s:.0f} s, "
        f"{rate:.1f} tok/s together"
    )
    figure = _figure(tally)
    company = await judge_wrong(
        subject, tally.wrong, num_wrong=tally.num_wrong, num_asked=total, crossed=tally.crossed
    )
    if company.fault is not None:
        return failed(company.fault, figure, measured=measured, cause=company.cause)
    if (unfair := _starved(tally)) is not None:
        return failed(unfair, figure, measured=measured, cause="pace")
    if (slower := _slowed(tally)) is not None:
        return machine.finding(slower, figure, measured=measured)
    own = own_errors(tally.num_wrong)
    return passed(f"{measured}{own}", figure, num_answers=total, tok_s=rate, num_wrong=tally.num_wrong)


def _starved(tally: Tally) -> str | None:
    median, least = statistics.median(tally.counts), min(tally.counts)
    if median >= 3 and least < _STARVED * median:
        return f"one stream starved: {least} answers, where the median stream got {median:.0f}"
    return None


def _slowed(tally: Tally) -> str | None:
    if tally.num_answers < _LEAST_ANSWERS or tally.soak_s < _LEAST_S:
        return None
    first, _, last = tally.rates(3)
    if last >= _SLOWED * first:
        return None
    return f"slower with time: {first:.1f} tok/s in the first third, {last:.1f} in the last"


def _figure(tally: Tally) -> Figure:
    parts = 12
    width_s = tally.soak_s / parts
    rates = tally.rates(parts)
    points = tuple((round((number + 0.5) * width_s, 2), round(rate, 3)) for number, rate in enumerate(rates))
    return Series("Tokens a second, all streams", "seconds", "tok/s", (("all streams", points),))


SOAK = Gate(
    name="soak",
    question="Is every answer right while all streams are busy for a long time?",
    protects="from what only company and time bring out: mixed streams, leaks, starvation, slow decay",
    threshold="none wrong beside others that is right alone, none mixed up, no stream below a third of the median",
    when="acceptance",
    run=_run,
    alone=True,
)

__all__ = ["SOAK", "Tally"]
