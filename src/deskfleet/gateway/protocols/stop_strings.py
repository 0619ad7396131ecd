"""Stop strings over text that comes in pieces. Owns the search; knows nothing of tokens or protocols.

Text is held back for as long as it may be the beginning of a stop string, and no longer.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for the first of several strings. Of two that begin at one place the one that ends first counts."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, strings), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return what may be shown after `text`, and the string that ended it. Call it no more after that."""
        if not self._strings:
            return text, None
        self._held += text
        found = min(
            ((at, at + len(each), each) for each in self._strings if (at := self._held.find(each)) >= 0),
            default=None,
        )
        if found is not None:
            return self._held[: found[0]], found[2]
        num_held = next(
            (n for n in range(min(self._longest - 1, len(self._held)), 0, -1) if self._may_begin(n)), 0
        )
        shown = self._held[: len(self._held) - num_held]
        self._held = self._held[len(shown) :]
        return shown, None

    def finish(self) -> str:
        """Return what was held back, when nothing more comes."""
        return self._held

    def _may_begin(self, num_chars: int) -> bool:
        end = self._held[-num_chars:]
        return any(each.startswith(end) for each in self._strings)


__all__ = ["StopStrings"]
