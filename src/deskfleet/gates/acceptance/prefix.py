"""Acceptance gate `prefix-cache`: a text that comes back, at once or after others, is answered as when it was new."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from deskfleet.client import Reply
from deskfleet.gates.contract import Decided, Finding, Gate, failed, passed, skipped
from deskfleet.gates.garble import first_difference
from deskfleet.gates.puzzle import Puzzle
from deskfleet.gates.questions import codes
from deskfleet.gates.subject import Subject

_LENGTHS = (300, 900, 1800)
_BETWEEN = 4


async def _run(subject: Subject) -> Finding:
    await subject.measure_text()
    limit = subject.max_model_len or max(_LENGTHS) + 256
    cached, told = [], True
    for length in (length for length in _LENGTHS if length + 128 < limit):
        first = await subject.ask_text(partial(_text, subject), length)
        if first.reply is None or not first.is_right:
            return first.finding()
        puzzle, cold = first.puzzle, first.reply
        if cold.num_cached_tokens:
            return failed(f"cache hits in a prompt never sent before: {cold.num_cached_tokens} tokens")
        for when in ("at once", "after others"):
            if when == "after others":
                await _others(subject)
            warm = await _warm(subject, puzzle, cold, when)
            told = told and warm.num_cached_tokens is not None
            cached.append(warm.num_cached_tokens or 0)
    measured = f"cached tokens {', '.join(f'{count:,}' for count in cached)}"
    if not told:
        return skipped("the server does not tell cached tokens: whether anything was warm is unknown")
    if not any(cached):
        return skipped(
            "no prompt that came back was found in a cache: it is off, or never hits", measured=measured
        )
    return passed(f"warm = cold, {measured}", cached=cached)


def _text(subject: Subject, length: int) -> Puzzle:
    return codes(subject.ruler, length, subject.rng, depths=(0.3, 0.7), spare_tokens=subject.spare_tokens)


async def _warm(subject: Subject, puzzle: Puzzle, cold: Reply, when: str) -> Reply:
    """Ask again. An answer that is wrong, or not the cold one to the byte, decides the gate."""
    answered = await subject.ask(replace(puzzle, label=f"{puzzle.label}, again {when}"))
    warm = answered.reply
    if warm is None:
        raise Decided(answered.finding())
    hit = f"{warm.num_cached_tokens} of {warm.num_prompt_tokens} tokens cached"
    if answered.wrong is not None:
        raise Decided(failed(f"a warm prefix is answered wrongly ({when}, {hit}): {answered.wrong}"))
    if warm.content != cold.content:
        fault = (
            f"warm and cold answers differ ({when}, {hit}): {first_difference(cold.content, warm.content)}"
        )
        subject.remark(answered, fault)
        raise Decided(failed(fault))
    return warm


async def _others(subject: Subject) -> None:
    puzzles = [
        codes(subject.ruler, 120, subject.rng, spare_tokens=subject.spare_tokens) for _ in range(_BETWEEN)
    ]
    await subject.ask_all(puzzles, _BETWEEN)


PREFIX_CACHE = Gate(
    name="prefix-cache",
    question="Is a prompt that comes back answered as it was when it was new?",
    protects="from text salad on a prefix hit whose window is gone",
    threshold="the bytes of the cold answer, with cached tokens above 0",
    when="acceptance",
    run=_run,
    alone=True,
)

__all__ = ["PREFIX_CACHE"]
