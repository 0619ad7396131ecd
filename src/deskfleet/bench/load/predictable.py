"""How predictable a text is: what a drafter guesses for free, and no user ever asks for.

Owns the two measures and the shares from which a number counts as inflated. Pure functions of text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_WINDOW = 8
_WORD = re.compile(r"\w+")
_MARK = re.compile(r"\S")
_FEWEST_WORDS = 24
_FEWEST_MARKS = 200

REPEATED_SHARE = 0.5
COUNTED_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Predictability:
    """`repeated` is the share of windows of eight words that have come before, `counted` that of words that go on
    counting. Both are 0 for a text too short to say anything."""

    repeated: float
    counted: float

    @property
    def is_inflating(self) -> bool:
        """Whether speculation is faster on such text than on what people write."""
        return self.repeated >= REPEATED_SHARE or self.counted >= COUNTED_SHARE

    def __str__(self) -> str:
        return f"{self.repeated:.0%} of it repeats itself, {self.counted:.0%} of it counts"


def predictability(text: str) -> Predictability:
    """Measure a text."""
    # Words alone: between them, the punctuation of JSON is the same in every record, its values are not.
    words = _WORD.findall(text)
    if len(words) < _FEWEST_WORDS:
        words = _MARK.findall(text)
        if len(words) < _FEWEST_MARKS:
            return Predictability(0.0, 0.0)
    windows = [tuple(words[at : at + _WINDOW]) for at in range(len(words) - _WINDOW + 1)]
    return Predictability(1 - len(set(windows)) / len(windows), _counted_share(words))


def _counted_share(words: list[str]) -> float:
    """Share of words that are a number one more than the number before them, whatever few words lie between."""
    num_counted = 0
    last: int | None = None
    for word in words:
        if word.isdecimal() and len(word) < 10:
            number = int(word)
            num_counted += last is not None and number == last + 1
            last = number
    return num_counted / len(words)


__all__ = ["COUNTED_SHARE", "REPEATED_SHARE", "Predictability", "predictability"]
