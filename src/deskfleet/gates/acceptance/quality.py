"""Acceptance gates of quality: four small suites of our own, judged as `deskfleet eval` judges.

Owns which questions a suite has for each family. For Pocket they are those of `deskfleet.evaluation`, which its
training never saw; big models get generated ones of the same kinds, and the same battery of tools. They tell a broken
set-up from a sound one, not a good model from a better one: for that there is the adapter to lm-evaluation-harness.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from random import Random

from deskfleet.client import Reply
from deskfleet.evaluation.questions import Question, questions
from deskfleet.gates.contract import Finding, Gate, failed, passed
from deskfleet.gates.family import of_each_family
from deskfleet.gates.puzzle import Check, Puzzle, expects, last_number, says
from deskfleet.gates.questions import codes, user
from deskfleet.gates.subject import Answered, Subject, cause_of, first_wrong
from deskfleet.model.embedded import POCKET

_AT_ONCE = 4
_LONG = (500, 1000, 2000, 4000)

Suite = Callable[[Subject, int], list[Puzzle]]
"""Of so many questions."""

_SUITES = 4  # side by side
_LEAST_QUESTIONS = 3


async def _run(subject: Subject, suite: Suite) -> Finding:
    """Ask what time allows. A suite fails by all of its questions only: of three, a single slip is too many."""
    await subject.measure_text()
    puzzles = suite(subject, subject.limits.num_questions)
    num_first = _num_affordable(puzzles, await subject.affordable_tokens(subject.limits.ladder_s))
    least = subject.questions.least_quality
    answers: list[Answered] = []
    for start in range(0, len(puzzles), _AT_ONCE):
        if len(answers) >= num_first and _share(answers) >= least:
            break
        answers += await subject.ask_all(puzzles[start : start + _AT_ONCE], _AT_ONCE)
        subject.report(len(answers), max(num_first, len(answers)), "questions")
    share = _share(answers)
    measured = f"{sum(answered.is_right for answered in answers)} of {len(answers)} right ({share:.0%})"
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


def _share(answers: Sequence[Answered]) -> float:
    return sum(answered.is_right for answered in answers) / len(answers)


def _num_affordable(puzzles: Sequence[Puzzle], most_tokens: float | None) -> int:
    """Return how many of the first puzzles a suite may ask whose texts, with other suites', have so many tokens."""
    if most_tokens is None:
        return len(puzzles)
    read = accumulate(puzzle.asked_tokens or 0 for puzzle in puzzles)
    return max(_LEAST_QUESTIONS, sum(num_tokens <= most_tokens / _SUITES for num_tokens in read))


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


def _arithmetic(subject: Subject, count: int) -> list[Puzzle]:
    if subject.questions.name == POCKET:
        return _from_evaluation(("arithmetic",), subject, count)
    rng, found = subject.rng, []
    for number in range(count):
        sign = "+-*"[number % 3]
        most = 99 if sign == "*" else 9999
        found.append(subject.questions.sum_of(rng.randint(11, most), sign, rng.randint(11, most)))
    return found


def _instructions(subject: Subject, count: int) -> list[Puzzle]:
    if subject.questions.name == POCKET:
        return _from_evaluation(("spell", "count", "json", "json-format"), subject, count)
    return [_INSTRUCTIONS[number % len(_INSTRUCTIONS)](subject.rng) for number in range(count)]


def _tools(subject: Subject, count: int) -> list[Puzzle]:
    return _from_evaluation(("tool-calls", "parallel-calls"), subject, count)


def _long_context(subject: Subject, count: int) -> list[Puzzle]:
    """Return codes in long texts, several in each: the one that is asked for and others that are not."""
    limit = (subject.max_model_len or 8192) - 128
    lengths = [length for length in _LONG if length <= limit] or [limit]
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
        threshold=f"share right: {of_each_family(lambda questions: f'{questions.least_quality:.0%}')}",
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
