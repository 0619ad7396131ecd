"""Text to token ids, for engines that only send text. Not exact, and said so wherever it is used.

The ids decode to the text that came, but need not be the ids the model chose: another cut of the same text. What
counts tokens (usage, budgets, loop detection) is off by a little, and log probabilities cannot be given at all.
"""

from __future__ import annotations

import re

from deskfleet.gateway.upstream.vocabulary import Vocabulary


class Retokeniser:
    """One answer's text, in pieces, as ids. A piece that may be the beginning of a control token waits for the next."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._held = ""
        spellings = sorted(vocabulary.control, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, spellings)) or "(?!)")
        self._beginnings = {spelling[:length] for spelling in spellings for length in range(1, len(spelling))}
        self._longest = max(map(len, self._beginnings), default=0)

    def push(self, text: str) -> tuple[int, ...]:
        """Return the ids of what is certain by now."""
        whole = self._held + text
        cut = self._first_uncertain(whole)
        self._held = whole[cut:]
        return tuple(self._vocabulary.encode(whole[:cut])) if cut else ()

    def finish(self) -> tuple[int, ...]:
        """Return the ids of what was held back; the text is complete."""
        held, self._held = self._held, ""
        return tuple(self._vocabulary.encode(held)) if held else ()

    def _first_uncertain(self, text: str) -> int:
        """Where the rest of `text` may be the beginning of a control token. Never inside one that is complete."""
        spans = [match.span() for match in self._whole.finditer(text)]
        for start in range(max(len(text) - self._longest, 0), len(text)):
            is_inside = any(first < start < end for first, end in spans)
            if not is_inside and text[start:] in self._beginnings:
                return start
        return len(text)


__all__ = ["Retokeniser"]
