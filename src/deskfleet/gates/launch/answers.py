"""Launch gates of known answers: short ones, open text, prompts of several lengths, several at once.

Owns the reading of patterns: right alone but wrong beside others, right when short but wrong from some length on, one
answer that carries another's value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from deskfleet.gates.company import judge_company, own_errors
from deskfleet.gates.contract import Decided, Finding, Gate, failed, passed, skipped
from deskfleet.gates.puzzle import Puzzle
from deskfleet.gates.questions import codes, story
from deskfleet.gates.subject import Answered, Subject, cause_of, first_wrong

_SHORT_TOKENS = 64
_LENGTHS = (100, 300, 1200, 3600)
_FAST_TOK_S = 600.0  # the longest of these lengths is asked of servers that read as fast as this
_BESIDE_CHUNK = 48
_AT_ONCE = 3
_STORY_TOKENS = 40


async def _short(subject: Subject) -> Finding:
    answers = [await subject.ask(puzzle) for puzzle in subject.questions.sums()]
    wrong = [answered for answered in answers if not answered.is_right]
    longest = max((answered.reply.num_prompt_tokens for answered in answers if answered.reply), default=0)
    measured = f"{len(answers) - len(wrong)} of {len(answers)} right"
    if wrong:
        return failed(wrong[0].sentence, measured=measured, cause=cause_of(answers))
    if longest > 2 * _SHORT_TOKENS:
        return skipped(
            f"the server counts {longest} tokens in a question of a line: it is no short prompt",
            measured=measured,
            cause="tool",
        )
    return passed(f"{measured}, prompts of up to {longest} tokens", num_right=len(answers))


SHORT_ANSWERS = Gate(
    name="short-answers",
    question="Are sums right, one at a time, in prompts of a line?",
    protects="from garbage with status 200: the first thing that any fault of weights or kernels breaks",
    threshold="every answer right",
    when="launch",
    run=_short,
    alone=True,
)


async def _open_text(subject: Subject) -> Finding:
    answers = [await subject.ask(story(subject.rng, _STORY_TOKENS)) for _ in range(2)]
    if (wrong := first_wrong(answers)) is not None:
        return wrong.finding()
    words = sum(len(answered.reply.content.split()) for answered in answers if answered.reply)
    return passed(f"{words} words of English")


OPEN_TEXT = Gate(
    name="garble",
    question="Is text that is free to be anything language at all?",
    protects="from a constant token, another language, salad and leaked markup at full speed",
    threshold="no constant token, no other language or script, no control markup",
    when="launch",
    run=_open_text,
)


async def _by_length(subject: Subject) -> Finding:
    """Ask a line and longer prompts; the lengths that failed and those that did not are told."""
    short = await subject.ask(subject.questions.sums()[0])
    if short.reply is None:
        return short.finding()
    try:
        await subject.measure_text()
    except Decided as failure:
        return failed(
            f"no answer to a prompt of about 160 tokens, but one to {short.reply.num_prompt_tokens}: "
            f"{failure.finding.reason}",
            cause=failure.finding.cause or "server",
        )
    chunk = subject.limits.chunk_tokens
    lengths = {*_LENGTHS[:-1], chunk + _BESIDE_CHUNK}
    if (subject.session.read_tok_s or 0) >= _FAST_TOK_S:
        lengths.add(_LENGTHS[-1])
    limit = (subject.max_model_len or max(lengths) * 2) - 128
    asked = sorted(length for length in lengths if length <= limit)
    answers = [short]
    for length in asked:
        answers.append(await subject.ask_text(partial(_around, subject, chunk), length))
    wrong = [answered for answered in answers if not answered.is_right]
    right = [answered for answered in answers if answered.is_right]
    measured = f"right at {_tokens(right)} tokens"
    if wrong:
        reason = f"wrong in prompts of {_tokens(wrong)} tokens ({wrong[0].wrong})"
        return failed(f"{reason}, {measured}", measured=measured, cause=cause_of(answers))
    for length, answered in zip(asked, answers[1:], strict=True):
        counted = answered.reply.num_prompt_tokens if answered.reply else 0
        if not 0.7 * length <= counted <= 1.4 * length:
            return skipped(
                f"a prompt meant to have {length} tokens had {counted}", measured=measured, cause="tool"
            )
    return passed(f"{measured} (chunks of {chunk})")


def _around(subject: Subject, chunk: int, length: int) -> Puzzle:
    """Return a prompt whose code stands at the end of the first chunk, or in the middle of a shorter one."""
    depth = (chunk - 8) / length if length > chunk + 8 else 0.5
    return codes(subject.ruler, length, subject.rng, depths=(depth,), spare_tokens=subject.spare_tokens)


def _tokens(answers: Sequence[Answered]) -> str:
    lengths = [
        answered.reply.num_prompt_tokens if answered.reply else subject_length(answered)
        for answered in answers
    ]
    return ", ".join(f"{length:,}" for length in lengths) or "no"


def subject_length(answered: Answered) -> int:
    """Return how long a prompt was meant to be that nobody counted."""
    return answered.puzzle.asked_tokens or 0


BY_LENGTH = Gate(
    name="answers-by-length",
    question="Are answers right in prompts of a line, of 100 to 4,000 tokens, and across a chunk boundary?",
    protects="from kernels that are wrong for some numbers of rows (NaN only in prompts of 65 to 4,000 tokens)",
    threshold="every answer right, lengths counted by the server",
    when="launch",
    run=_by_length,
)


async def _at_once(subject: Subject) -> Finding:
    """Ask the same kind of question alone, three at a time, and as many as the server is to take."""
    await subject.measure_text()
    counts = sorted({1, _AT_ONCE, subject.limits.concurrency})
    answers: list[Answered] = []
    for at_once in counts:
        puzzles = [
            codes(subject.ruler, 60, subject.rng, spare_tokens=subject.spare_tokens) for _ in range(at_once)
        ]
        answers += await subject.ask_all(puzzles, at_once)
        found = await judge_company(subject, answers)
        if found.fault is not None:
            return failed(f"with {at_once} at once: {found.fault}", cause=found.cause)
    own = own_errors(found.num_own)
    return passed(f"right with {', '.join(map(str, counts))} at once{own}", at_once=counts[-1])


AT_ONCE = Gate(
    name="answers-at-once",
    question="Are answers right alone, with three at once, and with as many as will come (--concurrency)?",
    protects="from state that is mixed up between requests, and kernels that are wrong for some batch sizes",
    threshold="none wrong beside others that is right alone, none with another's value",
    when="launch",
    run=_at_once,
    alone=True,
)

__all__ = ["AT_ONCE", "BY_LENGTH", "OPEN_TEXT", "SHORT_ANSWERS"]
