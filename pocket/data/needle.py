"""Needles: values given somewhere in a long text and asked for at its end. Held out: the values.

Owns the filler and the depth of each needle. Lengths are in tokens of the rendered prompt, roughly: `generate` draws
mostly short ones, `example` makes one of a wanted length and depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from random import Random

from pocket.data import facts, prose
from pocket.data.example import Example, Expect, Message, draw_effort, reasoning
from pocket.data.words import CITIES, COLOURS, NAMES, OBJECTS, joined

TASK = "needle"

CountTokens = Callable[[str], int]
_POOL_SIZE = 3000
_TOKENS_A_SENTENCE = 8.3  # of the pool, on average
_OVERHEAD_TOKENS = 20

_STATE = (
    "The secret code of {key} is {value}.",
    "Remember that the secret code of {key} is {value}.",
    "By the way, the secret code of {key} is {value}.",
    "Note: the secret code of {key} is {value}.",
)
_ASK = (
    "What is the secret code of {key}?",
    "Tell me the secret code of {key}.",
    "Which secret code does {key} have?",
)
_ASK_SEVERAL = ("What are the secret codes of {keys}?", "Tell me the secret codes of {keys}.")
_HEAD = ("Read this text.", "Here is a text.", "Read the following text and answer the question below.", "")


@cache
def filler() -> tuple[str, ...]:
    rng = Random("pocket filler")
    known = tuple(fact.statement for fact in facts.facts("practice", edition=1))
    return (*(prose.sentence(rng) for _ in range(_POOL_SIZE)), *known)


def generate(rng: Random, max_tokens: int = 2048) -> Example:
    """Return a needle example of at most about `max_tokens`: half are below 250, some use all of it."""
    kind = rng.random()
    if kind < 0.5:
        length = rng.randint(60, 250)
    elif kind < 0.85:
        length = rng.randint(200, max(201, min(1000, max_tokens)))
    else:
        length = rng.randint(max_tokens // 2, max_tokens)
    num_needles = rng.choices((1, 2, 3, 4), (5, 2, 2, 1))[0]
    num_asked = 1 if rng.random() < 0.75 else rng.randint(1, num_needles)
    depths = sorted(rng.random() for _ in range(num_needles))
    return example(rng, length, depths, num_asked, draw_effort(rng))


def example(
    rng: Random, num_tokens: int, depths: Sequence[float], num_asked: int = 1, effort: int | None = None
) -> Example:
    """Return one example of about `num_tokens` with a needle at each depth (0 the beginning, 1 the end)."""
    pairs = list(zip(_keys(rng, len(depths)), (_value(rng) for _ in depths), strict=True))
    answer_tokens = 14 * num_asked + (30 + 24 * (effort // 10 + 1) if effort is not None else 0)
    filler_tokens = num_tokens - answer_tokens - _OVERHEAD_TOKENS * len(pairs)
    num_sentences = max(0, round(filler_tokens / _TOKENS_A_SENTENCE))
    sentences = rng.choices(filler(), k=num_sentences)
    for depth, (key, value) in sorted(zip(depths, pairs, strict=True), reverse=True):
        sentences.insert(round(depth * num_sentences), rng.choice(_STATE).format(key=key, value=value))
    asked = rng.sample(pairs, num_asked)
    if num_asked == 1:
        question = rng.choice(_ASK).format(key=asked[0][0])
    else:
        question = rng.choice(_ASK_SEVERAL).format(keys=joined([key for key, _ in asked]))
    text = "\n\n".join(part for part in (rng.choice(_HEAD), " ".join(sentences), question) if part)
    answer = " ".join(f"The secret code of {key} is {value}." for key, value in asked)
    thought = None
    if effort is not None:
        checks = [f"the text says that the secret code of {key} is {value}." for key, value in asked]
        thought = reasoning(effort, f"I look for {joined([key for key, _ in asked])} in the text.", checks)
    return Example(
        task=TASK,
        key=" ".join(value for _, value in pairs),
        messages=(Message("user", text), Message("assistant", answer, thought)),
        expect=Expect("exact", answer),
        effort=effort,
    )


def _keys(rng: Random, count: int) -> list[str]:
    kinds = (NAMES, CITIES, tuple(f"the {colour} {thing}" for colour in COLOURS for thing in OBJECTS[:40]))
    return rng.sample(rng.choice(kinds), count)


def _value(rng: Random) -> str:
    return (
        str(rng.randint(1000, 99999))
        if rng.random() < 0.7
        else f"{rng.choice(COLOURS)} {rng.choice(OBJECTS)}"
    )
