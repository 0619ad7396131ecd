"""Launch gates of reasoning: `thinking` (on, off, apart from the answer) and `effort` (more when more is asked for)."""

from __future__ import annotations

import re
from dataclasses import replace

from deskfleet.client import Reply
from deskfleet.gates.contract import Finding, Gate, failed, passed
from deskfleet.gates.family import of_each_family
from deskfleet.gates.garble import shown
from deskfleet.gates.puzzle import Puzzle, anything
from deskfleet.gates.subject import Answered, Subject

_SUM = (47, "+", 38)
_MARKUP = re.compile(r"</?think>")


async def _thinking(subject: Subject) -> Finding:
    without = await subject.ask(subject.questions.sum_of(*_SUM))
    off = without.reply
    if off is not None and (off.reasoning.strip() or _MARKUP.search(off.content)):
        fault = f"thinking is switched off and goes on: {shown(off.reasoning or off.content)}"
        subject.remark(without, fault)
        return failed(fault)
    if not without.is_right:
        return without.finding()
    puzzle = subject.questions.sum_of(*_SUM, effort=subject.questions.low_effort)
    answered = await subject.ask(replace(puzzle, check=anything))
    if answered.reply is None:
        return answered.finding()
    on = answered.reply
    if (leak := _leak(on)) is not None:
        subject.remark(answered, leak)
        return failed(leak)
    if not on.reasoning.strip():
        return failed(f"thinking is switched on and no reasoning came: {shown(on.content)}")
    if (wrong := puzzle.check(on)) is not None:
        subject.remark(answered, wrong)
        return failed(f"with thinking on, {puzzle.label}: {wrong}")
    told = "" if on.num_reasoning_tokens is None else f" ({on.num_reasoning_tokens} tokens)"
    return passed(f"off: none; on: {len(on.reasoning)} characters{told}, apart from the answer")


def _leak(reply: Reply) -> str | None:
    """Return a sentence when reasoning stands in the content: as markup, or as text that the reasoning repeats."""
    if _MARKUP.search(reply.content):
        return f"reasoning leaked into content, markup included: {shown(reply.content)}"
    if not reply.reasoning.strip() and len(reply.content) > 120:
        return f"reasoning leaked into content: no reasoning apart, and {len(reply.content)} characters of answer"
    lines = [line for line in reply.reasoning.splitlines() if len(line) > 12]
    if lines and sum(line in reply.content for line in lines) > len(lines) / 2:
        return f"reasoning leaked into content: the answer repeats it ({shown(reply.content)})"
    return None


THINKING = Gate(
    name="thinking",
    question="Does thinking go on and off, and does reasoning stay out of the answer?",
    protects="front-ends that show the answer, and users who pay for tokens they switched off",
    threshold="off: no reasoning; on: some, apart from a right answer",
    when="launch",
    run=_thinking,
)


async def _effort(subject: Subject) -> Finding:
    """Compare the length of the reasoning at two efforts, over the same sums."""
    low = subject.questions.low_effort
    sums = [subject.questions.sum_of(*each) for each in (_SUM, (56, "+", 27))]
    thought: dict[str, int] = {}
    for efforts in ((low,), subject.questions.high_efforts):
        for effort in efforts:
            asked = [
                replace(puzzle, effort=effort, check=anything, max_tokens=_room(subject, puzzle))
                for puzzle in sums
            ]
            answers = await subject.ask_all(asked, len(asked))
            refused = any(answered.cause == "refusal" for answered in answers)
            if not refused or effort == efforts[-1]:
                break
        missing = next((answered for answered in answers if answered.reply is None), None)
        if missing is not None:
            return missing.finding()
        thought[str(effort)] = sum(map(_thought_tokens, answers))
    (least, most), names = thought.values(), list(thought)
    ratio = most / max(least, 1)
    measured = f"effort {names[0]}: {least} tokens, {names[1]}: {most} ({ratio:.2f} times)"
    if most == 0:
        return failed(f"no reasoning came at any effort: {measured}", measured=measured)
    if ratio < subject.questions.effort_ratio:
        return failed(f"effort is ignored: {measured}", measured=measured, ratio=ratio)
    return passed(measured, ratio=ratio, low=least, high=most)


def _room(subject: Subject, puzzle: Puzzle) -> int:
    return puzzle.max_tokens + subject.questions.reasoning_tokens


def _thought_tokens(answered: Answered) -> int:
    """Return how long the reasoning is: as told, else all tokens, since the answers are the same."""
    reply = answered.reply
    if reply is None:
        return 0
    return reply.num_completion_tokens if reply.num_reasoning_tokens is None else reply.num_reasoning_tokens


EFFORT = Gate(
    name="effort",
    question="Is there more reasoning at a high effort than at a low one?",
    protects="from a setting that is taken and dropped",
    threshold=f"times the tokens: {of_each_family(lambda questions: f'{questions.effort_ratio:g}')}",
    when="launch",
    run=_effort,
)

__all__ = ["EFFORT", "THINKING"]
