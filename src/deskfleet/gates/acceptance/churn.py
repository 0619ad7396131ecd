"""Acceptance gate `churn`: clients that leave in the middle, while others must be answered as if nothing happened."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from random import Random

from deskfleet.errors import EngineError, RequestError
from deskfleet.gates.company import judge_company
from deskfleet.gates.contract import Decided, Finding, Gate, failed, passed
from deskfleet.gates.questions import codes, count_on
from deskfleet.gates.subject import Answered, Subject

_WITNESSES = 2
_SLOWER = 4.0
_RUNNING = ("deskfleet_engine_running", "vllm:num_requests_running", "sglang:num_running_reqs")


async def _run(subject: Subject) -> Finding:
    await subject.measure_text()
    before_s = await _first_token_s(subject)
    leaving, left = subject.limits.num_churned, 0
    done = asyncio.Event()
    witnesses = [asyncio.create_task(_witness(subject, number, done)) for number in range(_WITNESSES)]
    try:
        while left < leaving:
            wave = min(subject.limits.concurrency, leaving - left)
            await asyncio.gather(*(_leave(subject, left + number) for number in range(wave)))
            left += wave
            subject.report(left, leaving, "clients")
    finally:
        done.set()
        answers = [answered for task in witnesses for answered in await task]
    company = await judge_company(subject, answers)
    if company.fault is not None:
        return failed(
            f"while others left: {company.fault}",
            measured=f"{sum(each.is_right for each in answers)} of {len(answers)} right",
            cause=company.cause,
        )
    held_s, running = await _until_free(subject)
    if running:
        return failed(
            f"places are not freed: {running:.0f} requests still run {held_s:.0f} s after all {left} clients left",
            running=running,
        )
    return await _afterwards(subject, left, len(answers), before_s)


async def _afterwards(subject: Subject, left: int, num_witnessed: int, before_s: float) -> Finding:
    """See that the server takes as many as before, and answers as soon."""
    puzzles = [
        codes(subject.ruler, 70, subject.rng, spare_tokens=subject.spare_tokens)
        for _ in range(subject.limits.concurrency)
    ]
    company = await judge_company(subject, await subject.ask_all(puzzles, len(puzzles)))
    if company.fault is not None:
        return failed(f"after {left} clients left: {company.fault}", cause=company.cause)
    after_s = await _first_token_s(subject)
    if after_s > _SLOWER * before_s + 1.0:
        return failed(
            f"after {left} clients left, the first token takes {after_s:.2f} s instead of {before_s:.2f} s: "
            "places are not freed",
            cause="pace",
        )
    return passed(
        f"{left} clients left, {num_witnessed} answers beside them right, first token {after_s:.2f} s after and "
        f"{before_s:.2f} s before",
        num_left=left,
        before_s=before_s,
        after_s=after_s,
    )


async def _first_token_s(subject: Subject) -> float:
    reply = await subject.right(subject.questions.sums()[0])
    return reply.first_token_s


async def _witness(subject: Subject, number: int, done: asyncio.Event) -> list[Answered]:
    rng = Random(f"{subject.session.seed} churn witness {number}")
    answers: list[Answered] = []
    while not done.is_set():
        answers.append(await subject.ask(codes(subject.ruler, 70, rng, spare_tokens=subject.spare_tokens)))
        if answers[-1].reply is None:
            break
    return answers


async def _leave(subject: Subject, number: int) -> None:
    """Begin a long answer and leave: at once, before the first token, or after a few pieces."""
    rng = Random(f"{subject.session.seed} churn {number}")
    pieces, patience_s = rng.randint(0, 6), rng.uniform(0.005, 0.1)
    body = subject.body(count_on(rng.randint(1, 200), 240))
    with suppress(RequestError, EngineError, TimeoutError):
        async with asyncio.timeout(patience_s if pieces == 0 else subject.limits.patience_s):
            async with aclosing(subject.client.stream(body)) as stream:
                async for _ in stream:
                    pieces -= 1
                    if pieces <= 0:
                        break


async def _until_free(subject: Subject) -> tuple[float, float]:
    """Wait until nothing runs. Return how long that took and what still runs (0 where the server does not tell)."""
    begin = time.monotonic()
    while True:
        counters = await subject.client.counters()
        running = next((counters[name] for name in _RUNNING if name in counters), 0.0)
        waited_s = time.monotonic() - begin
        if not running or waited_s > subject.limits.freed_s:
            return waited_s, running
        if subject.session.gone is not None:
            raise Decided(failed(f"the server is gone: {subject.session.gone}", cause="server"))
        await asyncio.sleep(0.1)


CHURN = Gate(
    name="churn",
    question="Do clients that leave free their places, and do those that stay get right answers?",
    protects="from batches whose state follows the row and not the request, and from places that are never freed",
    threshold="every other answer right, nothing running afterwards, the first token as soon as before",
    when="acceptance",
    run=_run,
    alone=True,
)

__all__ = ["CHURN"]
