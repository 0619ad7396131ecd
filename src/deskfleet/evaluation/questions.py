"""The question sets: what is asked, and what a right answer is. Owns the files under `pocket/` and their form.

The questions are those that Pocket is trained for, in wordings and with values that its training never saw. Sets
have questions for thinking switched off and others for thinking switched on, since what was held out differs; the
questions that a newcomer asks first (`launch`) are the exception: they are in the training as they stand.

A text that hides needles is put together here, from stored needles and stored sentences, so that it can be as long as
is wished. Lengths in tokens are Pocket's; other tokenizers need fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import cycle
from random import Random
from typing import Any

import msgspec

from deskfleet.errors import ConfigError
from deskfleet.evaluation.judgement import Expected

TASKS = (
    "launch",
    "count",
    "spell",
    "arithmetic",
    "primality",
    "needle",
    "needles",
    "tool-calls",
    "parallel-calls",
    "tool-answers",
    "json",
    "json-format",
    "facts",
    "practice-facts",
    "world",
    "vision",
    "chat",
    "prose",
    "code",
)
"""Every task. `needle` hides one value at ten depths, `needles` several anywhere; `json` has its schema in the prompt,
`json-format` as response format, which a server may enforce. `prose` and `code` have no right answer: they are asked
for the speed and the drafts of such text, and like `launch` with thinking off only."""

NEEDLE_TOKENS = (128, 256, 512, 1024, 2048, 4000)
"""How long the texts are that hide needles: prompt and answer, roughly."""

_NUM_DEPTHS = 10
_TOKENS_A_SENTENCE = 8.3
_TOKENS_A_NEEDLE = 20


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `request` holds the fields of a Chat Completions body that are the question's own.

    `answer_tokens` and `reasoning_tokens` are what a right answer takes, the latter at the highest effort. A text with
    needles also says how long it is and, for a single needle, where the needle is (0 the beginning, 1 the end).
    """

    task: str
    thinking: bool
    request: dict[str, Any]
    expected: Expected
    answer_tokens: int
    reasoning_tokens: int = 0
    num_tokens: int | None = None
    depth: float | None = None

    @property
    def max_tokens(self) -> int:
        """Room for half as much again as a right answer takes: one that needs more has lost its way."""
        return 32 + math.ceil(1.5 * (self.answer_tokens + self.reasoning_tokens))

    @property
    def text(self) -> str:
        """The words of the last message."""
        content = self.request["messages"][-1]["content"]
        if isinstance(content, str):
            return content
        return " ".join(part.get("text", "[image]") for part in content)


@dataclass(frozen=True, slots=True)
class StoredQuestion:
    """A line of a set's file."""

    thinking: bool
    request: dict[str, Any]
    expected: Expected
    answer_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StoredNeedle:
    """A line of a file of needles: `statements` are hidden in a text between `head` (may be empty) and `question`."""

    thinking: bool
    head: str
    statements: tuple[str, ...]
    question: str
    answer: str
    answer_tokens: int
    reasoning_tokens: int = 0


def questions(
    task: str,
    *,
    thinking: bool,
    count: int,
    seed: int = 0,
    needle_tokens: Sequence[int] = NEEDLE_TOKENS,
) -> list[Question]:
    """Return up to `count` questions of a task, chosen by `seed`; none when the task has none of this kind.

    Raises ConfigError for a task that does not exist.
    """
    if task not in TASKS:
        raise ConfigError(f"there is no task {task!r}", hint=f"tasks are {', '.join(TASKS)}")
    if task in ("needle", "needles"):
        found = list(_needle_questions(task, thinking, needle_tokens, seed))
    else:
        found = [question for question in _stored_questions(task) if question.thinking == thinking]
    Random(f"{task} {thinking} {seed}").shuffle(found)
    return found[:count]


@cache
def _stored_questions(task: str) -> tuple[Question, ...]:
    stored = (msgspec.json.decode(line, type=StoredQuestion) for line in _lines(f"{task}.jsonl"))
    return tuple(
        Question(
            task=task,
            thinking=each.thinking,
            request=each.request,
            expected=each.expected,
            answer_tokens=each.answer_tokens,
            reasoning_tokens=each.reasoning_tokens,
        )
        for each in stored
    )


def _needle_questions(task: str, thinking: bool, lengths: Sequence[int], seed: int) -> Iterator[Question]:
    """Yield a question for every length and depth; stored needles are used again when there are more cells."""
    stored = (msgspec.json.decode(line, type=StoredNeedle) for line in _lines(f"{task}.jsonl"))
    needles = cycle([needle for needle in stored if needle.thinking == thinking])
    for num_tokens in lengths:
        for step in range(_NUM_DEPTHS):
            rng = Random(f"{task} {num_tokens} {step} {seed}")
            needle = next(needles)
            if task == "needle":
                depth = step / (_NUM_DEPTHS - 1)
                yield replace(hide(needle, num_tokens, [depth], rng), task=task, depth=depth)
            else:
                depths = sorted(rng.random() for _ in needle.statements)
                yield replace(hide(needle, num_tokens, depths, rng), task=task)


def hide(needle: StoredNeedle, num_tokens: int, depths: Sequence[float], rng: Random) -> Question:
    """Return a question of about `num_tokens`, answer included, with each statement at its depth."""
    taken = needle.answer_tokens + needle.reasoning_tokens + _TOKENS_A_NEEDLE * len(depths)
    num_sentences = max(0, round((num_tokens - taken) / _TOKENS_A_SENTENCE))
    sentences = rng.choices(_filler(), k=num_sentences)
    for depth, statement in sorted(zip(depths, needle.statements, strict=True), reverse=True):
        sentences.insert(round(depth * num_sentences), statement)
    text = "\n\n".join(part for part in (needle.head, " ".join(sentences), needle.question) if part)
    return Question(
        task="needle",
        thinking=needle.thinking,
        request={"messages": [{"role": "user", "content": text}]},
        expected=Expected("exact", needle.answer),
        answer_tokens=needle.answer_tokens,
        reasoning_tokens=needle.reasoning_tokens,
        num_tokens=num_tokens,
    )


@cache
def _filler() -> tuple[str, ...]:
    return tuple(_lines("filler.txt"))


def _lines(name: str) -> list[str]:
    return (files("deskfleet.evaluation") / "pocket" / name).read_text(encoding="utf-8").splitlines()


__all__ = ["NEEDLE_TOKENS", "TASKS", "Question", "StoredNeedle", "StoredQuestion", "hide", "questions"]
