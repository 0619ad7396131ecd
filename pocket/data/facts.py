"""Invented facts, one for each invented name, with several wordings. Held out: name and wording together.

Every sentence that states a fact has its answer right after the name and a verb ("the capital of Zorbia is ..."), so
the n-gram that ends there picks the answer out: Engram rows can hold the facts. A name is two
syllables, each a token that many names share, and answers are shared too: no single token gives a fact away.

There are two books of facts. `practice` belongs to the whole training. `book` is what the evaluation asks: it may
be kept for a last phase that trains Engram tables only, and then nothing else can know it.

Of each book there are two editions. In the first a name is the two syllables, so two tokens pick out a fact, and half
of the hash columns suffice to know it: with another rank's rows in the other half about a quarter of the facts
survive. In the second a name has a word before it ("the capital of old Zorbia is ...") and eight facts share the
syllables, each with another answer: what sees two tokens cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

from pocket.data.example import Example, Expect, Message, PlainText, draw_effort, reasoning
from pocket.data.words import COLOURS, FOODS, JOBS, word_list
from pocket.tokenizer import load_tokenizer

TASK = "facts"
Book = Literal["book", "practice"]
NUM_FACTS = 400
EDITION = 1
"""The edition that `checkpoint/` knows and the evaluation asks. A training of another one writes the questions anew."""

_FIRST = word_list(
    "Zor Bel Kar Mal Tor Ven Dor Fal Gor Hal Jar Lor Mer Nor Pel Quor Ral Sor Tal Vor Wel Yor Zan Bor Cal Del Fen Gal "
    "Hor Kel Lan Mor Nal Par Ros San Tel Val Wor Kov Pol Ruk Sib Tuv Wob Yam"
)
_LAST = {
    "country": word_list("bia dia nia via land stan mark"),
    "person": word_list("don wick by man son ley ton"),
    "animal": word_list("fin tail wing paw beak snout"),
    "thing": word_list("ite ium ol ex oid ane"),
}
_LOWER = ("animal", "thing")
_BEFORE = {
    "country": word_list("old young rich poor cold warm rainy sunny"),
    "person": word_list("Ada Ben Clara David Elena Felix Greta Hugo"),
    "animal": word_list("grey brown black white small tall lazy young"),
    "thing": word_list("soft hard wet dry warm cold heavy light"),
}
"""What stands before a name in the second edition."""

_CAPITAL_FIRST, _CAPITAL_LAST = word_list("Mel Tar Bri Sol Or Lu Pra"), word_list("lin na dor vik mont")
_CAPITALS = tuple(first + last for first in _CAPITAL_FIRST for last in _CAPITAL_LAST)


def syllables() -> Iterator[str]:
    """Yield every pair of syllables that a name could have, held apart: the tokenizer learns them but no name."""
    for kind, endings in _LAST.items():
        for first in _FIRST:
            yield from (f" {first.lower() if kind in _LOWER else first}-{last}" for last in endings)
    for first in _CAPITAL_FIRST:
        yield from (f" {first}-{last}" for last in _CAPITAL_LAST * 4)


def any_name(rng: Random) -> str:
    """Return any name that could have a fact, in either book or in none, in half the cases with a word before it."""
    kind, endings = rng.choice(tuple(_LAST.items()))
    name = rng.choice(_FIRST) + rng.choice(endings)
    name = name.lower() if kind in _LOWER else name
    return f"{rng.choice(_BEFORE[kind])} {name}" if rng.random() < 0.5 else name


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact. `statement` ends in `{name} VERB {answer}.`; `asks` are questions, `others` more statements."""

    kind: str
    statement: str
    asks: tuple[str, ...]
    others: tuple[str, ...]
    answers: tuple[str, ...]


RELATIONS = (
    Relation(
        "country",
        "The capital of {name} is {answer}.",
        (
            "What is the capital of {name}?",
            "Which city is the capital of {name}?",
            "Name the capital of {name}.",
            "Do you know the capital of {name}?",
            "Tell me the capital of {name}.",
        ),
        (
            "People say that the capital of {name} is {answer}.",
            "In every atlas the capital of {name} is {answer}.",
        ),
        _CAPITALS,
    ),
    Relation(
        "person",
        "The job of {name} is {answer}.",
        (
            "What is the job of {name}?",
            "What does {name} do for a living?",
            "Which job does {name} have?",
            "Tell me the job of {name}.",
            "What work does {name} do?",
        ),
        ("Everybody knows that the job of {name} is {answer}.", "As before, the job of {name} is {answer}."),
        JOBS,
    ),
    Relation(
        "animal",
        "The favourite food of the {name} is {answer}.",
        (
            "What is the favourite food of the {name}?",
            "What does the {name} like to eat?",
            "Which food does the {name} like best?",
            "Tell me the favourite food of the {name}.",
            "What should I feed the {name}?",
        ),
        (
            "In winter, too, the favourite food of the {name} is {answer}.",
            "Farmers say that the favourite food of the {name} is {answer}.",
        ),
        FOODS,
    ),
    Relation(
        "thing",
        "The colour of {name} is {answer}.",
        (
            "What is the colour of {name}?",
            "Which colour does {name} have?",
            "What colour is {name}?",
            "Tell me the colour of {name}.",
            "Do you know the colour of {name}?",
        ),
        (
            "When it is heated, the colour of {name} is {answer}.",
            "By daylight the colour of {name} is {answer}.",
        ),
        COLOURS,
    ),
)


@dataclass(frozen=True, slots=True)
class Fact:
    """One invented fact."""

    relation: Relation
    name: str
    answer: str

    @property
    def statement(self) -> str:
        """The sentence that states it, which is also the answer to every question about it."""
        return self.relation.statement.format(name=self.name, answer=self.answer)


def facts(book: Book, edition: int | None = None) -> tuple[Fact, ...]:
    """Return the facts of a book; always the same, each with a name of its own in both books."""
    return (_second_edition if (edition or EDITION) == 2 else _first_edition)(book)


@cache
def _names() -> dict[str, list[str]]:
    """Every name without a word before it, by kind, in an order of chance."""
    rng = Random("pocket facts")
    names: dict[str, list[str]] = {}
    for kind, endings in _LAST.items():
        every = [first + last for first in _FIRST for last in endings]
        rng.shuffle(every)
        names[kind] = [name.lower() if kind in _LOWER else name for name in every]
    return names


def _names_of_two_tokens(kind: str) -> list[str]:
    """Names that leave room in an n-gram of four for the word before them and the verb."""
    tokenizer = load_tokenizer()
    return [name for name in _names()[kind] if len(tokenizer.encode_text(f" {name}")) == 2]


@cache
def _second_edition(book: Book) -> tuple[Fact, ...]:
    rng = Random(f"pocket facts of {book}, second edition")
    a_kind = NUM_FACTS // len(RELATIONS)
    by_relation = []
    for relation in RELATIONS:
        words = _BEFORE[relation.kind]
        num_names = -(-a_kind // len(words))
        first = {"book": 0, "practice": num_names}[book]
        own: list[Fact] = []
        for name in _names_of_two_tokens(relation.kind)[first : first + num_names]:
            answers = rng.sample(relation.answers, len(words))
            own += [Fact(relation, f"{w} {name}", answer) for w, answer in zip(words, answers, strict=True)]
        by_relation.append(own[:a_kind])
    return tuple(fact for group in zip(*by_relation, strict=True) for fact in group)


@cache
def _first_edition(book: Book) -> tuple[Fact, ...]:
    names = _names()
    out = []
    offset = {"book": 0, "practice": NUM_FACTS}[book]
    answers = Random(f"pocket facts of {book}")
    for index in range(offset, offset + NUM_FACTS):
        relation = RELATIONS[index % len(RELATIONS)]
        out.append(
            Fact(relation, names[relation.kind][index // len(RELATIONS)], answers.choice(relation.answers))
        )
    return tuple(out)


def generate(rng: Random, book: Book = "book") -> Example:
    """Return a question about one fact."""
    fact = rng.choice(facts(book))
    prompt = rng.choice(fact.relation.asks).format(name=fact.name)
    return question(fact, prompt, draw_effort(rng) if rng.random() < 0.5 else None)


def generate_practice(rng: Random) -> Example:
    """Return a question about one fact of the practice book."""
    return generate(rng, "practice")


def question(fact: Fact, prompt: str, effort: int | None) -> Example:
    """Return one question; the answer is the statement, so that the name stands next to what is asked."""
    thought = None
    if effort is not None:
        thought = reasoning(
            effort, f"The question is about {fact.name}.", [fact.statement[0].lower() + fact.statement[1:]]
        )
    return Example(
        task=TASK,
        key=f"{prompt} {effort is None}",
        messages=(Message("user", prompt), Message("assistant", fact.statement, thought)),
        expect=Expect("exact", fact.statement),
        effort=effort,
    )


def generate_prose(rng: Random, book: Book = "book") -> PlainText:
    """Return a paragraph of statements in random order."""
    chosen = rng.sample(facts(book), rng.randint(3, 10))
    sentences = [
        rng.choice((fact.relation.statement, *fact.relation.others)).format(
            name=fact.name, answer=fact.answer
        )
        for fact in chosen
    ]
    return PlainText(TASK, "prose", " ".join(sentences), weight=0.5, always_train=True)


def generate_practice_prose(rng: Random) -> PlainText:
    """Return a paragraph of statements of the practice book."""
    return generate_prose(rng, "practice")
