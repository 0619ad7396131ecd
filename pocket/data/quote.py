"""Words said again: repeated, quoted in a JSON list, put into an identifier. Held out: the words.

Owns no words. It teaches to copy whatever stands in the prompt, after a space or a quotation mark: the arguments of a
call, the values of an object, the name in an answer. Names are those of invented facts; the facts are not told.
"""

from __future__ import annotations

import json
from random import Random

from pocket.data.example import Example, Expect, Message
from pocket.data.facts import any_name
from pocket.data.words import CITIES, COMMON, MONTHS, NAMES, WEEKDAYS, joined

TASK = "quote"
_MOST_WORDS = 6
_WORDS = (*COMMON, *NAMES, *CITIES, *WEEKDAYS, *MONTHS)

_REPEAT = ("Repeat: {told}.", "Say again: {told}.", "Please repeat {told}.")
_LIST = ("Write as a JSON list: {told}.", "Make a JSON list of {told}.", "Put {told} into a JSON list.")
_OBJECT = ("Write JSON: {told}.", "As a JSON object: {told}.")
_IDENTIFIER = ("Write as one identifier: {told}.", "Join with underscores: {told}.")


def generate(rng: Random) -> Example:
    """Return words to copy in one of four forms."""
    words = [_word(rng) for _ in range(rng.randint(1, _MOST_WORDS))]
    kind = rng.choice(("repeat", "list", "object", "identifier"))
    if kind == "repeat":
        prompt, answer = rng.choice(_REPEAT).format(told=joined(words)), f"{joined(words)}."
    elif kind == "list":
        prompt, answer = rng.choice(_LIST).format(told=joined(words)), json.dumps(words)
    elif kind == "object":
        pairs = dict(zip(words[0::2], words[1::2], strict=False)) or {words[0]: words[0]}
        told = joined([f"{name} is {value}" for name, value in pairs.items()])
        prompt, answer = rng.choice(_OBJECT).format(told=told), json.dumps(pairs)
    else:
        prompt, answer = rng.choice(_IDENTIFIER).format(told=joined(words[:3])), "_".join(words[:3])
    return Example(
        task=TASK,
        key=answer,
        messages=(Message("user", prompt), Message("assistant", answer)),
        expect=Expect("exact", answer),
    )


def _word(rng: Random) -> str:
    """Return a common word, or one in four times an invented name."""
    return any_name(rng) if rng.random() < 0.25 else rng.choice(_WORDS)
