"""Spelling: the letters of a word, forwards and backwards, and how many. Held out: word and question together."""

from __future__ import annotations

from random import Random

from pocket.data.example import Example, Expect, Message, draw_effort, reasoning
from pocket.data.words import COMMON

TASK = "spell"

_SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeio")

_FORWARD = (
    'Spell the word "{word}".',
    'Spell "{word}".',
    'How do you spell "{word}"?',
    'Give me the letters of "{word}".',
)
_BACKWARD = (
    'Spell the word "{word}" backwards.',
    'Spell "{word}" in reverse.',
    'Give me the letters of "{word}" in reverse order.',
)
_LENGTH = ('How many letters does the word "{word}" have?', 'How many letters are in "{word}"?')
_ENDS = ('What is the first letter of "{word}"?', 'What is the last letter of "{word}"?')


def generate(rng: Random) -> Example:
    """Return a spelling example; one word in five is invented."""
    word = "".join(rng.choices(_SYLLABLES, k=rng.randint(2, 3))) if rng.random() < 0.2 else rng.choice(COMMON)
    kind = rng.choices(("forward", "backward", "length", "ends"), (4, 4, 2, 1))[0]
    template = rng.choice(
        {"forward": _FORWARD, "backward": _BACKWARD, "length": _LENGTH, "ends": _ENDS}[kind]
    )
    prompt = template.format(word=word)
    letters = "-".join(word)
    if kind == "forward":
        answer = letters
    elif kind == "backward":
        answer = "-".join(reversed(word))
    elif kind == "length":
        answer = f"{word} has {len(word)} letters."
    else:
        answer = word[0] if "first" in template else word[-1]
    effort = draw_effort(rng)
    thought = None
    if effort is not None:
        work = f"The letters of {word} are {letters}."
        checks = [f"letter {index + 1} is {letter}." for index, letter in enumerate(word)]
        checks += [
            f"letter {index + 1} from the end is {letter}." for index, letter in enumerate(reversed(word))
        ]
        thought = reasoning(effort, work, checks)
    return Example(
        task=TASK,
        key=f"{prompt} {effort is None}",
        messages=(Message("user", prompt), Message("assistant", answer, thought)),
        expect=Expect("exact", answer),
        effort=effort,
    )
