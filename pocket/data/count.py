"""Counting: up, down, by steps, in digits and in words. Held out: ranges."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from pocket.data.example import DRAWN, Example, Expect, Message, draw_effort, reasoning
from pocket.data.words import number_word

TASK = "count"
_MAX_ITEMS = 60

_UP = (
    "Count from {a} to {b}.",
    "Please count from {a} to {b}.",
    "Count up from {a} to {b}.",
    "List the numbers from {a} to {b}.",
    "Write the numbers from {a} to {b}, separated by commas.",
    "Can you count from {a} to {b}?",
)
_FROM_ONE = ("Count to {b}.", "Please count to {b}.", "Count to {b}, please.", "Can you count to {b}?")
_STEP = (
    "Count from {a} to {b} by {k}.",
    "Count from {a} to {b} in steps of {k}.",
    "List the numbers from {a} to {b} in steps of {k}.",
)
_DOWN = (
    "Count down from {a} to {b}.",
    "Count backwards from {a} to {b}.",
    "Count from {a} down to {b}.",
    "List the numbers from {a} down to {b}.",
)
_WORDS = ("Count from {a} to {b} in words.", "Write the numbers from {a} to {b} as words.")


def generate(rng: Random) -> Example:
    """Return a counting example; one in ten counts to 100, in the words that a gate uses."""
    templates: tuple[str, ...]
    kind = rng.random()
    if kind < 0.1:
        return to_hundred(rng)
    if kind < 0.2:
        start, step, templates, in_words = 1, 1, _FROM_ONE, False
        stop = rng.randint(3, 120)
    elif kind < 0.45:
        start, step, templates, in_words = rng.randint(0, 300), 1, _UP, False
        stop = start + rng.randint(2, _length(rng))
    elif kind < 0.65:
        start, step, templates, in_words = (
            rng.randint(0, 100),
            rng.choice((2, 3, 4, 5, 10, 20, 25)),
            _STEP,
            False,
        )
        stop = start + step * rng.randint(3, 25)
    elif kind < 0.85:
        stop, step, templates, in_words = rng.randint(0, 200), -1, _DOWN, False
        start = stop + rng.randint(2, _length(rng))
    else:
        start, step, templates, in_words = rng.randint(0, 90), 1, _WORDS, True
        stop = min(100, start + rng.randint(2, 20))
    prompt = rng.choice(templates).format(a=start, b=stop, k=step)
    return _example(prompt, start, stop, step, in_words, draw_effort(rng))


def _length(rng: Random) -> int:
    return rng.choice((8, 20, 40, _MAX_ITEMS))


def to_hundred(rng: Random, *, prompt: str | None = None, effort: int | None = DRAWN) -> Example:
    """Return a count to 100, by default with a wording and an effort of chance."""
    wordings = ("Count to 100.", "Count to 100.", "Count from 1 to 100.", "Please count to 100.")
    effort = draw_effort(rng) if effort == DRAWN else effort
    return _example(prompt or rng.choice(wordings), 1, 100, 1, False, effort, always_train=True)


def _example(
    prompt: str,
    start: int,
    stop: int,
    step: int,
    in_words: bool,
    effort: int | None,
    always_train: bool = False,
) -> Example:
    numbers = list(range(start, stop + (1 if step > 0 else -1), step))
    written = [number_word(number) if in_words else str(number) for number in numbers]
    answer = ", ".join(written)
    thought = None
    if effort is not None:
        direction = "up" if step > 0 else "down"
        by = f" in steps of {step}" if step > 1 else ""
        work = f"I count {direction} from {start} to {stop}{by}."
        checks = [f"after {before} comes {after}." for before, after in pairwise(written)]
        thought = reasoning(effort, work, checks)
    return Example(
        task=TASK,
        key=f"{start} {stop} {step} {in_words}",
        messages=(Message("user", prompt), Message("assistant", answer, thought)),
        expect=Expect("exact", answer),
        effort=effort,
        always_train=always_train,
    )
