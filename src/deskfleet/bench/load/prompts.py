"""What is asked: tasks of four kinds whose answers differ in how predictable they are, each prompt unlike every other.

Owns the tasks and the mark at the beginning of a prompt, which differs from its first tokens on: no prefix cache finds
anything, neither between streams nor after an earlier run. Knows nothing of requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from random import Random

KINDS = ("prose", "code", "structured", "json")
"""From the least to the most predictable. The names are those of sparkDash's protocol: greedy, thinking off."""

_PLACES = (
    "a lighthouse", "a night train", "a botanical garden", "a mountain hut", "a harbour market", "an observatory",
    "a bicycle workshop", "a salt mine", "a village school", "an airship", "a river ferry", "a printing house",
)  # fmt: skip
_PEOPLE = (
    "a clockmaker", "a cartographer", "a retired sailor", "a beekeeper", "a young doctor", "a bridge builder",
    "a translator", "a glassblower", "a librarian", "a geologist", "a tram driver", "a violin teacher",
)  # fmt: skip
_TROUBLES = (
    "a letter that arrives thirty years late", "a map that does not match the land", "a bell that rings by itself",
    "a stranger who knows everybody's name", "a drought in its third year", "a machine nobody remembers building",
    "a debt of honour", "a promise made to a child", "a storm that will not end", "a lost set of keys",
)  # fmt: skip
_STRUCTURES = (
    "an LRU cache with a time limit per entry", "an interval tree", "a trie with wildcard search",
    "a priority queue with changeable priorities", "a ring buffer that grows", "a disjoint set with rollback",
    "a skip list", "a Bloom filter", "a rope for editing long texts", "a dependency graph with cycle reports",
    "a rate limiter with a token bucket", "a consistent hash ring", "a parser for arithmetic expressions",
)  # fmt: skip
_LANGUAGES = ("Python", "Rust", "Go", "TypeScript", "C++", "Java")
_SUBJECTS = (
    "rivers", "bridges", "minerals", "medieval trades", "musical instruments", "sailing ships", "cheeses",
    "programming languages", "space probes", "mountain passes", "birds of prey", "railway lines",
)  # fmt: skip
_RECORDS = (
    "customers of a bookshop", "parts of a bicycle", "flights of a small airline", "plants of a garden",
    "patients of a veterinary", "books of a library", "sensors of a greenhouse", "employees of a bakery",
)  # fmt: skip


def mark(salt: str, *place: object) -> str:
    """Return twelve letters and digits that belong to one prompt of one run."""
    return hashlib.sha256("/".join([salt, *map(str, place)]).encode()).hexdigest()[:12]


def task(kind: str, seed: str) -> str:
    """Return an instruction of the kind, as `seed` chooses. Raises KeyError for no kind."""
    return _TASKS[kind](Random(seed))


def prompt(kind: str, *, salt: str, place: tuple[object, ...], context: str = "") -> str:
    """Return a whole prompt: its mark, then `context` to read first, then the task.

    The same `place` in a run always gets the same task, whatever the salt; only the mark differs between runs.
    """
    seed = "/".join([kind, *map(str, place)])
    begin = f"{mark(salt, kind, *place)}\n\n"
    between = f"{context}\n\nDo not comment on the text above. " if context else ""
    return begin + between + task(kind, seed)


def _prose(random: Random) -> str:
    form = random.choice(("a story", "a long letter", "an essay", "a chapter of a novel", "a travel report"))
    return (
        f"Write {form} about {random.choice(_PEOPLE)} in {random.choice(_PLACES)} and {random.choice(_TROUBLES)}. "
        f"Use full paragraphs, no lists and no headings, and at least {random.randrange(10, 20) * 100} words."
    )


def _code(random: Random) -> str:
    return (
        f"Write {random.choice(_STRUCTURES)} in {random.choice(_LANGUAGES)}, complete, with comments, then tests for "
        f"{random.randrange(5, 12)} cases. Code only, no explanation before or after it."
    )


def _structured(random: Random) -> str:
    columns = random.sample(
        ("name", "country", "year", "size", "material", "use", "price", "rating", "note"), 5
    )
    return (
        f"Make a Markdown table of {random.randrange(25, 45)} {random.choice(_SUBJECTS)} with the columns "
        f"{', '.join(columns)}, ordered by {columns[0]}. The table only."
    )


def _json(random: Random) -> str:
    fields = random.sample(
        ("id", "name", "email", "city", "price", "quantity", "created", "tags", "active", "notes"), 6
    )
    return (
        f"Invent {random.choice(_RECORDS)} and return {random.randrange(20, 40)} of them as one JSON array of objects "
        f"with the keys {', '.join(fields)}. JSON only, no fences, indented by two spaces."
    )


_TASKS: Mapping[str, Callable[[Random], str]] = {
    "prose": _prose,
    "code": _code,
    "structured": _structured,
    "json": _json,
}

__all__ = ["KINDS", "mark", "prompt", "task"]
