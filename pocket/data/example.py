"""What a task produces: conversations with a known good ending, or plain text.

Owns `Example`, its parts, and the split into training and evaluation. Knows neither tokens nor tasks.

The split is a hash of the task's name and the example's `key`: what a task must generalise over (the operands
of a sum, the numbers of a count) or, where the items themselves are finite (facts), the wording of the prompt.
So no key of the evaluation is ever trained on, whatever the seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "eval"]
Json = dict[str, Any]

_EVAL_SHARE = 10  # every tenth key


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of an assistant."""

    name: str
    arguments: Json


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `images`, uint8 [H, W, 3] each, stand before the text; tool messages answer calls in order."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    images: tuple[NDArray[np.uint8], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Expect:
    """What a right answer is. `kind`:

    exact: the answer is `text`; contains: it contains `text`; calls: it makes exactly `calls`; json: it is an
    object equal to `value`; none: nothing to check.
    """

    kind: Literal["exact", "contains", "calls", "json", "none"] = "none"
    text: str = ""
    calls: tuple[Call, ...] = ()
    value: Json | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation. The last message is the assistant's, and it is what `expect` describes.

    `effort` 1-100 is the reasoning effort, None means that thinking is off. `response_schema` is rendered as the
    codec renders a json_schema response format. `always_train` marks prompts that must be learned as they
    are, whatever their key; the evaluation never holds them.
    """

    task: str
    key: str
    messages: tuple[Message, ...]
    expect: Expect = Expect()
    effort: int | None = None
    tools: tuple[Json, ...] = ()
    response_schema: Json | None = None
    prompt_weight: float = 0.0
    always_train: bool = False


@dataclass(frozen=True, slots=True)
class PlainText:
    """A document without turns: prose, documentation, code. Every token weighs `weight`."""

    task: str
    key: str
    text: str
    weight: float = 0.3
    always_train: bool = False


DRAWN = -1
"""Stands for an effort that is left to chance."""

Generator = Callable[[Random], Example | PlainText]


def split_of(example: Example | PlainText) -> Split:
    """Return which split the example's key belongs to."""
    if example.always_train:
        return "train"
    digest = hashlib.blake2b(f"{example.task}\0{example.key}".encode(), digest_size=4).digest()
    return "eval" if int.from_bytes(digest, "little") % _EVAL_SHARE == 0 else "train"


def draw(generate: Generator, rng: Random, split: Split, *, attempts: int = 1000) -> Example | PlainText:
    """Return an example of `split`, drawing again while the other one comes. Raises ValueError after `attempts`."""
    for _ in range(attempts):
        example = generate(rng)
        if split_of(example) == split:
            return example
    raise ValueError(f"{generate.__module__} gave no {split} example in {attempts} attempts")


def draw_effort(rng: Random) -> int | None:
    """Return an effort: None (thinking off) in 45 of 100, else a tier or the whole range."""
    if rng.random() < 0.45:
        return None
    return rng.choice(_TIERS) if rng.random() < 0.5 else rng.randint(1, 100)


_TIERS = (10, 25, 50, 50, 75, 75, 100)


def num_checks(effort: int) -> int:
    """Return how many checks a reasoning of `effort` holds: 1 to 11, one more for every ten."""
    return 1 + effort // 10


_ROUNDS: tuple[str, ...] = (
    "",
    *(f"{words}, " for words in ("again", "once more", "still", "yes", "indeed", "as said", "surely")),
)
_ROUNDS += ("as before, ", "no doubt, ", "and so, ")


def reasoning(effort: int, work: str, checks: Sequence[str]) -> str:
    """Return `work` followed by numbered checks, as many as `effort` asks for.

    `checks` are used in turn, each round with words of its own, so that no line comes twice. How many will come is
    said first, so that a model reads the effort once and counts from there.
    """
    count = num_checks(effort)
    lines = [f"I will check {count} times." if count > 1 else "I will check once."]
    lines += [work] if work else []
    for index in range(count):
        round_number, which = divmod(index, len(checks))
        lines.append(f"Check {index + 1}: {_ROUNDS[round_number]}{checks[which]}")
    return "\n".join(lines)


__all__ = [
    "DRAWN",
    "Call",
    "Example",
    "Expect",
    "Generator",
    "Json",
    "Message",
    "PlainText",
    "Role",
    "Split",
    "draw",
    "draw_effort",
    "num_checks",
    "reasoning",
    "split_of",
]
