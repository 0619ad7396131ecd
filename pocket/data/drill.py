"""Many short exchanges in one conversation, without thinking: the same number of tokens teaches several times as much.

Owns the sequence. Every exchange is one that its own task would train on, so nothing that is held out is among them; a
drill as a whole is never part of an evaluation.
"""

from __future__ import annotations

from random import Random

from pocket.data import arithmetic, facts, primality, quote, spell, world
from pocket.data.example import Example, Generator, Message, draw

TASK = "drill"
_FEWEST, _MOST = 3, 14

_OF: tuple[tuple[Generator, float], ...] = (
    (arithmetic.generate, 0.5),
    (quote.generate, 0.2),
    (spell.generate, 0.12),
    (facts.generate_practice, 0.08),
    (world.generate, 0.05),
    (primality.generate, 0.05),
)
"""Which task a drill is of, by its share of drills."""


def generate(rng: Random) -> Example:
    """Return a conversation of one task's exchanges."""
    (generator,) = rng.choices([each for each, _ in _OF], [share for _, share in _OF])
    messages: list[Message] = []
    for _ in range(rng.randint(_FEWEST, _MOST)):
        messages += _exchange(generator, rng).messages
    return Example(task=TASK, key="", messages=tuple(messages), always_train=True)


def _exchange(generator: Generator, rng: Random) -> Example:
    """Return an example without thinking of the training split."""
    while True:
        example = draw(generator, rng, "train")
        if isinstance(example, Example) and example.effort is None:
            return example
