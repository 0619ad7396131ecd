"""Acceptance gates of pace: `fairness` between equal streams, `steady-speed` over time, `speed-at-depth` of the prompt.

Owns what is compared: rates of one run with each other, never with a number from elsewhere. Tokens are the server's
count, times are this client's.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

from deskfleet.client import Reply
from deskfleet.gates.contract import Decided, Finding, Gate, Series, failed, passed, skipped
from deskfleet.gates.launch.context import longest_prompt
from deskfleet.gates.machine import OtherWork
from deskfleet.gates.puzzle import Puzzle, anything
from deskfleet.gates.questions import codes, count_on
from deskfleet.gates.subject import Subject

_TOKENS = 64
_LEAST_TOKENS = 16
_UNFAIR = 0.4
_ROUNDS = 9
_SLOWED = 0.5
_AT_DEPTH = 0.2
_DEPTHS = (1 / 16, 1 / 4, 1.0)


def _rate(reply: Reply) -> float:
    """Return tokens a second of one stream from its request to its end, so that waiting counts."""
    return reply.num_completion_tokens / max(reply.total_s, 1e-6)


async def _fairness(subject: Subject) -> Finding:
    streams = max(subject.limits.concurrency, 2)
    puzzles = [count_on(11 + 7 * number, _TOKENS) for number in range(streams)]
    answers = await subject.ask_all(puzzles, streams)
    missing = next((answered for answered in answers if answered.reply is None), None)
    if missing is not None:
        return missing.finding()
    replies = [answered.reply for answered in answers if answered.reply is not None]
    if min(reply.num_completion_tokens for reply in replies) < _LEAST_TOKENS:
        return skipped("an answer was too short to tell a rate", cause="tool")
    rates = [_rate(reply) for reply in replies]
    median, least = statistics.median(rates), min(rates)
    measured = f"{streams} streams, slowest {least:.1f} tok/s, median {median:.1f}"
    if least < _UNFAIR * median:
        slow = answers[rates.index(least)]
        fault = f"one stream starved: {least:.1f} tok/s beside a median of {median:.1f} ({slow.puzzle.label})"
        subject.remark(slow, fault)
        return failed(fault, measured=measured, cause="pace", slowest=least, median=median)
    return passed(measured, slowest=least, median=median)


FAIRNESS = Gate(
    name="fairness",
    question="Do equal streams get equal shares?",
    protects="from one session that stands still while the sum of all looks well",
    threshold="the slowest stream at least 0.4 of the median",
    when="acceptance",
    run=_fairness,
    alone=True,
)


async def _steady(subject: Subject) -> Finding:
    """Ask for the same long answer again and again, and compare the first third with the last, of rounds and within."""
    replies: list[Reply] = []
    async with OtherWork(subject.client.url) as machine:
        for number in range(_ROUNDS):
            answered = await subject.ask(count_on(20 + number, _TOKENS))
            if answered.reply is None:
                return answered.finding()
            replies.append(answered.reply)
            subject.report(number + 1, _ROUNDS, "answers")
    if min(reply.num_completion_tokens for reply in replies) < _LEAST_TOKENS:
        return skipped("an answer was too short to tell a rate", cause="tool")
    rates = [reply.tok_s or 0.0 for reply in replies]
    figure = Series(
        "Tokens a second of one stream",
        "answer",
        "tok/s",
        (("alone", tuple((float(number + 1), round(rate, 2)) for number, rate in enumerate(rates))),),
    )
    third = _ROUNDS // 3
    first, last = statistics.median(rates[:third]), statistics.median(rates[-third:])
    measured = f"{first:.1f} tok/s at first, {last:.1f} at last"
    if last < _SLOWED * first:
        return machine.finding(
            f"slower with time: {measured}", figure, measured=measured, first=first, last=last
        )
    within = statistics.median(map(_slowing, replies))
    if within < _SLOWED:
        return failed(
            f"each answer slows down as it goes: to {within:.2f} of its rate",
            figure,
            cause="pace",
            within=within,
        )
    return passed(measured, figure, first=first, last=last, within=within)


def _slowing(reply: Reply) -> float:
    """Return the rate of the last third of an answer over that of its first."""
    gaps = [after - before for before, after in zip(reply.arrivals_s, reply.arrivals_s[1:], strict=False)]
    third = len(gaps) // 3
    if third < 2:
        return 1.0
    return sum(gaps[:third]) / max(sum(gaps[-third:]), 1e-6)


STEADY_SPEED = Gate(
    name="steady-speed",
    question="Is the hundredth answer as fast as the first?",
    protects="from caches, fragments and leaks that make everything slower with time",
    threshold="the last third at least half as fast as the first, between answers and within one",
    when="acceptance",
    run=_steady,
    alone=True,
)


async def _at_depth(subject: Subject) -> Finding:
    """Compare the decoding rate behind prompts of three lengths, the longest as long as the time given allows."""
    limit = subject.max_model_len or 8192
    longest = longest_prompt(limit, 2 * _TOKENS)
    await subject.measure_text(longest)
    affordable = await subject.affordable_tokens(subject.limits.ladder_s)
    if affordable is not None:
        longest = min(longest, max(1600, int(affordable / 3)))
    rates: list[tuple[int, float]] = []
    for share in _DEPTHS:
        answered = await subject.ask_text(partial(_several_codes, subject), max(64, int(longest * share)))
        if answered.reply is None:
            return answered.finding()
        if answered.reply.num_completion_tokens < _LEAST_TOKENS or answered.reply.tok_s is None:
            raise Decided(skipped("an answer was too short to tell a rate", cause="tool"))
        rates.append((answered.reply.num_prompt_tokens, answered.reply.tok_s))
    measured = ", ".join(f"{rate:.1f} tok/s behind {length:,} tokens" for length, rate in rates)
    if rates[-1][1] < _AT_DEPTH * rates[0][1]:
        return failed(f"decoding is slow at depth: {measured}", measured=measured, cause="pace")
    return passed(measured, rates=dict(rates))


def _several_codes(subject: Subject, num_tokens: int) -> Puzzle:
    """Return a long text that ends with a question for three codes: a long text has long answers to nothing else."""
    puzzle = codes(
        subject.ruler, num_tokens, subject.rng, depths=(0.2, 0.5, 0.8), ask=None, spare_tokens=_TOKENS
    )
    return replace(puzzle, label=f"three codes in {num_tokens:,} tokens", check=anything)


SPEED_AT_DEPTH = Gate(
    name="speed-at-depth",
    question="Is decoding behind a long prompt nearly as fast as behind a short one?",
    protects="from a slow kernel that is picked silently for long contexts",
    threshold="at least 0.2 of the rate behind a short prompt",
    when="acceptance",
    run=_at_depth,
    alone=True,
)

__all__ = ["FAIRNESS", "SPEED_AT_DEPTH", "STEADY_SPEED"]
