"""The text that the tokenizer is trained on: examples of every task, always the same.

Owns the shares. The committed tokenizer was made from it, so it does not follow every change of a task. Text of the
interpreter's standard library is left out, because it differs between versions, and of the invented facts only the
syllables of names are in it, because a name must stay two tokens long.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from random import Random

from pocket.data import (
    arithmetic,
    chat,
    code,
    count,
    facts,
    json_objects,
    needle,
    primality,
    prose,
    spell,
    tools,
    vision,
    words,
    world,
)
from pocket.data.example import Example, draw
from pocket.data.render import EFFORT_TEXT, calls_markup, tools_block

_SHARES = (
    (count.generate, 150),
    (spell.generate, 600),
    (partial(arithmetic.generate, direct_digits=3), 300),
    (primality.generate, 200),
    (needle.generate, 60),
    (tools.generate, 700),
    (json_objects.generate, 700),
    (world.generate, 400),
    (vision.generate, 200),
    (chat.generate, 700),
)
_NUM_STORIES, _NUM_FUNCTIONS, _NUM_SENTENCES, _NUM_SYLLABLE_ROUNDS = 2500, 700, 4000, 6


def tokenizer_corpus() -> Iterator[str]:
    """Yield the training text of the tokenizer."""
    rng = Random("pocket tokenizer")
    for generate, number in _SHARES:
        for _ in range(number):
            example = draw(generate, rng, "train")
            if isinstance(example, Example):
                yield from _texts(example)
    for _ in range(_NUM_STORIES):
        yield prose.story(rng)
    for _ in range(_NUM_SENTENCES):
        yield prose.sentence(rng)
    for _ in range(_NUM_FUNCTIONS):
        yield code.function(rng)[2]
    for _ in range(_NUM_SYLLABLE_ROUNDS):
        yield from facts.syllables()
    for word in words.COMMON:
        yield f"{word} {word.capitalize()} {words.plural(word)}\n{word}"


def _texts(example: Example) -> Iterator[str]:
    if example.effort is not None:
        yield EFFORT_TEXT.format(effort=example.effort)
    if example.tools:
        yield tools_block(example.tools)
    if example.response_schema is not None:
        yield json.dumps(example.response_schema)
    for message in example.messages:
        yield message.content
        if message.reasoning:
            yield message.reasoning
        if message.calls:
            yield calls_markup(message.calls)
