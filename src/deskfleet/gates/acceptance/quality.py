"""Acceptance gates of quality: four small suites of our own, judged as `deskfleet eval` judges.

Owns which questions a suite has for each family. For Pocket they are those of `deskfleet.evaluation`, which its
training never saw; big models get generated ones of the same kinds, and the same battery of tools. They tell a broken
set-up from a sound one, not a good model from a better one: for that there is the adapter to lm-evaluation-harness.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from deskfleet.client import Reply
from deskfleet.evaluation.questions import Question, questions
from deskfleet.gates.contract import Finding, Gate, failed, passed
from deskfleet.gates.puzzle import Check, Puzzle, expects, last_number, says
from deskfleet.gates.questions import codes, user
from deskfleet.gates.subject import Answered, Subject, cause_of, first_wrong
from deskfleet.model.embedded import POCKET

_AT_ONCE = 4
_LONG = (500, 1000, 2000, 4000)

Suite = Callable[[Subject, int, float | None], list[Puzzle]]
"""Of so many questions, whose prompts together may have so many tokens (None: any number)."""

_SUITES = 4  # side by side


async def _run(subject: Subject, suite: Suite) -> Finding:
    await subject.measure_text()
    affordable = await subject.affordable_tokens(subject.limits.ladder_s)
    puzzles = suite(subject, subject.limits.num_questions, affordable)
    answers: list[Answered] = []
    for start in range(0, len(puzzles), _AT_ONCE):
        answers += await subject.ask_all(puzzles[start : start + _AT_ONCE], _AT_ONCE)
        subject.report(len(answers), len(puzzles), "questions")
    right = sum(answered.is_right for answered in answers)
    share = right / len(answers)
    least = subject.questions.least_quality
    measured = f"{right} of {len(answers)} right ({share:.0%})"
    unanswered = [answered for answered in answers if answered.reply is None]
    if unanswered:
        return failed(
            f"{len(unanswered)} were not answered: {unanswered[0].sentence}",
            measured=measured,
            cause=cause_of(unanswered),
        )
    wrong = first_wrong(answers)
    if wrong is not None and share < least:
        return failed(f"{measured}, at least {least:.0%} are expected; {wrong.sentence}", measured=measured)
    return passed(measured, share=share)


def _from_evaluation(tasks: Sequence[str], subject: Subject, count: int) -> list[Puzzle]:
    """Return the questions of tasks of `deskfleet.evaluation`, thinking off, about as many of each."""
    each = -(-count // len(tasks))
    found = [
        question
        for task in tasks
        for question in questions(task, thinking=False, count=each, seed=subject.session.seed % 1000)
    ]
    return [_puzzle(question, subject.spare_tokens) for question in found[:count]]


def _puzzle(question: Question, spare_tokens: int) -> Puzzle:
    return Puzzle(
        f"{question.task}: {question.text.splitlines()[-1][-80:]}",
        question.request,
        expects(question.expected),
        question.max_tokens + spare_tokens,
    )


def _arithmetic(subject: Subject, count: int, affordable: float | None) -> list[Puzzle]:
    if subject.questions.name == POCKET:
        return _from_evaluation(("arithmetic",), subject, count)
    rng, found = subject.rng, []
    for number in range(count):
        sign = "+-*"[number % 3]
        most = 99 if sign == "*" else 9999
        found.append(subject.questions.sum_of(rng.randint(11, most), sign, rng.randint(11, most)))
    return found


def _instructions(subject: Subject, count: int, affordable: float | None) -> list[Puzzle]:
    if subject.questions.name == POCKET:
        return _from_evaluation(("spell", "count", "json", "json-format"), subject, count)
    return [_INSTRUCTIONS[number % len(_INSTRUCTIONS)](subject.rng) for number in range(count)]


def _tools(subject: Subject, count: int, affordable: float | None) -> list[Puzzle]:
    return _from_evaluation(("tool-calls", "parallel-calls"), subject, count)


def _long_context(subject: Subject, count: int, affordable: float | None) -> list[Puzzle]:
    """Return codes in long texts, several in each: the one that is asked for and others that are not."""
    limit = (subject.max_model_len or 8192) - 128
    lengths = [length for length in _LONG if length <= limit] or [limit]
    if affordable is not None:
        count = max(3, min(count, int(affordable / _SUITES / (sum(lengths) / len(lengths)))))
    return [
        codes(
            subject.ruler,
            lengths[number % len(lengths)],
            subject.rng,
            depths=sorted(subject.rng.random() for _ in range(3)),
            ask=number % 3,
            spare_tokens=subject.spare_tokens,
        )
        for number in range(count)
    ]


_WORDS = ("stone", "river", "candle", "window", "garden", "silver", "market", "bridge")


def _exactly(text: str) -> Check:
    def check(reply: Reply) -> str | None:
        said = reply.content.strip().strip("\"'`.").strip()
        return None if said == text else f"{said[:60]!r} instead of {text!r}"

    return check


def _lines(count: int) -> Check:
    def check(reply: Reply) -> str | None:
        lines = [line for line in reply.content.splitlines() if line.strip()]
        numbered = sum(bool(re.match(r"\s*(\d+[.)]|[-*•])", line)) for line in lines)
        if len(lines) == count and not numbered:
            return None
        return f"{len(lines)} lines, {numbered} of them numbered, instead of {count} plain ones"

    return check


def _instruction(label: str, text: str, check: Check) -> Puzzle:
    return Puzzle(f"instruction: {label}", {"messages": user(text)}, check, 160)


def _capitals(rng: Random) -> Puzzle:
    word = rng.choice(_WORDS)
    text = f"Reply with the word {word} in capital letters and nothing else."
    return _instruction("capitals", text, _exactly(word.upper()))


def _repeat(rng: Random) -> Puzzle:
    words = " ".join(rng.sample(_WORDS, 4))
    return _instruction("repeat", f"Repeat these words exactly, nothing else: {words}", _exactly(words))


def _fruits(rng: Random) -> Puzzle:
    count = rng.randint(3, 7)
    text = f"List exactly {count} fruits, one on each line, without numbers, bullets or other text."
    return _instruction("lines", text, _lines(count))


def _yes_or_no(rng: Random) -> Puzzle:
    one, other = rng.sample(range(10, 99), 2)
    answer = "yes" if one > other else "no"
    text = f"Answer with yes or no only: is {one} greater than {other}?"
    return _instruction("yes or no", text, says(answer, but_not=("no" if answer == "yes" else "yes",)))


def _sorted(rng: Random) -> Puzzle:
    numbers = rng.sample(range(10, 99), 5)
    wanted = ", ".join(map(str, sorted(numbers)))
    text = f"Sort these numbers from small to large, separated by commas, nothing else: {', '.join(map(str, numbers))}"
    return _instruction("sort", text, _exactly(wanted))


def _spelled(rng: Random) -> Puzzle:
    word = rng.choice(_WORDS)
    text = f'Spell the word "{word}" with a hyphen between letters, nothing else.'
    return _instruction("spell", text, _exactly("-".join(word)))


def _longest(rng: Random) -> Puzzle:
    words = [
        *rng.sample(("sun", "cat", "red", "ice", "oak"), 3),
        rng.choice(("elephant", "mountain", "umbrella")),
    ]
    rng.shuffle(words)
    text = f"Which of these words is the longest? Answer with the word only: {', '.join(words)}"
    return _instruction("longest", text, says(max(words, key=len)))


def _how_many(rng: Random) -> Puzzle:
    count = rng.randint(3, 9)
    text = f"How many stars are here? {' '.join('*' * count)} Answer with the number only."
    return _instruction("how many", text, last_number(count))


_INSTRUCTIONS = (_capitals, _repeat, _fruits, _yes_or_no, _sorted, _spelled, _longest, _how_many)


def _gate(name: str, question: str, suite: Suite) -> Gate:
    async def run(subject: Subject) -> Finding:
        return await _run(subject, suite)

    asked: Callable[[Subject], Awaitable[Finding]] = run
    return Gate(
        name=name,
        question=question,
        protects="from set-ups that answer one question well and most of them badly (formats, scales, wrong kernels)",
        threshold="half right (Pocket), four in five (others)",
        when="acceptance",
        run=asked,
    )


QUALITY: tuple[Gate, ...] = (
    _gate("quality-arithmetic", "Are sums, differences and products right?", _arithmetic),
    _gate("quality-instructions", "Are instructions about the form of an answer followed?", _instructions),
    _gate("quality-tools", "Are the right tools called with the right arguments?", _tools),
    _gate("quality-long-context", "Is the right one of several values found in long texts?", _long_context),
)

__all__ = ["QUALITY"]
