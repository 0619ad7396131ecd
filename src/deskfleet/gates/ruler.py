"""How many tokens a server counts in a long text, learnt from what it said of earlier ones. Owns that line's fit.

Lengths are asked for in the tokens of `deskfleet.evaluation.questions.hide`; other tokenizers count others, in
proportion. A server that cuts prompts silently counts fewer than the line says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_TEMPLATE_TOKENS = 10.0  # what a prompt has beside its text, roughly


@dataclass(slots=True)
class TokenRuler:
    """Pairs of tokens asked for and tokens counted, and the line through them."""

    pairs: list[tuple[int, int]] = field(default_factory=list)

    def observe(self, asked: int, counted: int) -> None:
        """Remember that a text made for `asked` tokens had `counted`."""
        self.pairs.append((asked, counted))

    def expected(self, asked: int) -> int:
        """Return what a server should count in a text made for `asked` tokens."""
        offset, slope = self._line()
        return round(offset + slope * asked)

    def to_ask(self, wanted: int) -> int:
        """Return what to ask for so that the server counts about `wanted`."""
        offset, slope = self._line()
        return max(1, round((wanted - offset) / slope))

    def _line(self) -> tuple[float, float]:
        longest = max(self.pairs, default=None)
        shortest = min(self.pairs, default=None)
        if longest is None or shortest is None:
            return _TEMPLATE_TOKENS, 1.0
        offset = _TEMPLATE_TOKENS
        if longest[0] >= 2 * shortest[0]:
            slope = (longest[1] - shortest[1]) / (longest[0] - shortest[0])
            offset = shortest[1] - slope * shortest[0]
        else:
            slope = (longest[1] - offset) / longest[0]
        return offset, max(slope, 0.05)


__all__ = ["TokenRuler"]
