"""Acceptance gate `long-prompt`: the longest prompt while others are answered, and a server that lives afterwards."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random

from deskfleet.gates.company import judge_company
from deskfleet.gates.contract import Decided, Finding, Gate, failed, passed
from deskfleet.gates.launch.context import longest_prompt, needle
from deskfleet.gates.questions import codes
from deskfleet.gates.subject import Answered, Subject

_BESIDE = 2
_UNKNOWN_LIMIT = 8192
_SHARE_OF_LADDER = 0.5


async def _run(subject: Subject) -> Finding:
    limit = subject.max_model_len or _UNKNOWN_LIMIT
    longest = longest_prompt(limit, subject.spare_tokens)
    await subject.right(subject.questions.sums()[0])  # what is wrong already, no long prompt did
    await subject.measure_text(longest)
    affordable = await subject.affordable_tokens(subject.limits.ladder_s)
    if affordable is not None:
        # Others take their share of the machine meanwhile.
        longest = min(longest, max(int(affordable * _SHARE_OF_LADDER), 1000))
    done = asyncio.Event()
    beside = [asyncio.create_task(_beside(subject, number, done)) for number in range(_BESIDE)]
    try:
        answered = await subject.ask_text(partial(needle, subject, 0.2), longest)
    finally:
        done.set()
        others = [each for task in beside for each in await task]
    return await _judge(subject, answered, others, limit, longest)


async def _beside(subject: Subject, number: int, done: asyncio.Event) -> list[Answered]:
    rng = Random(f"{subject.session.seed} beside a long prompt {number}")
    answers: list[Answered] = []
    while not done.is_set() and subject.session.gone is None:
        answers.append(await subject.ask(codes(subject.ruler, 70, rng, spare_tokens=subject.spare_tokens)))
        if answers[-1].reply is None:
            await asyncio.sleep(0.2)
    return answers


async def _judge(
    subject: Subject, answered: Answered, others: list[Answered], limit: int, longest: int
) -> Finding:
    try:
        await subject.right(subject.questions.sums()[0])
    except Decided as failure:
        raise Decided(
            failed(
                f"a prompt of about {longest:,} tokens killed the server, or left it useless: "
                f"{failure.finding.reason}; the prompt itself: {answered.wrong or 'answered'}",
                cause="server",
            )
        ) from failure
    if answered.reply is None:
        return failed(
            f"a prompt of about {longest:,} tokens does not survive: {answered.wrong}",
            cause=answered.cause or "server",
        )
    counted = answered.reply.num_prompt_tokens
    if not answered.is_right:
        return failed(f"a prompt of {counted:,} tokens: {answered.wrong}")
    company = await judge_company(subject, others)
    if company.fault is not None:
        return failed(f"beside a prompt of {counted:,} tokens: {company.fault}", cause=company.cause)
    slowest = max((each.reply.first_token_s for each in others if each.reply), default=0.0)
    return passed(
        f"{counted:,} of {limit:,} tokens in {answered.reply.total_s:.1f} s; beside it {len(others)} answers right, "
        f"first token after at most {slowest:.1f} s",
        num_prompt_tokens=counted,
        slowest_first_token_s=slowest,
    )


LONG_PROMPT = Gate(
    name="long-prompt",
    question="Does the server survive its longest prompt, with others beside it?",
    protects="from running out of memory at a depth that is advertised, and from starving everybody else",
    threshold="the prompt answered rightly, so are those beside it, and the server lives",
    when="acceptance",
    run=_run,
    alone=True,
)

__all__ = ["LONG_PROMPT"]
