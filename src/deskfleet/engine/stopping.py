"""Stop strings over a stream of tokens. Owns incremental decoding for the purpose; nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class StopStrings:
    """Watches one output for any of `stop`. Special tokens are part of the text."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(s for s in stop if s)
        self._stream = DecodeStream(skip_special_tokens=False)
        self._tail_length = max((len(s) for s in self._stop), default=1) - 1
        self._tail = ""

    def push(self, token_ids: Iterable[int]) -> bool:
        """Add tokens; True as soon as a stop string is complete."""
        for token_id in token_ids:
            piece = self._stream.step(self._tokenizer, token_id)
            if piece is None:  # an incomplete UTF-8 sequence: its text comes with a later token
                continue
            text = self._tail + piece
            if any(s in text for s in self._stop):
                return True
            self._tail = text[-self._tail_length :] if self._tail_length else ""
        return False


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text before the first stop string."""
    found = [text.index(s) for s in stop if s and s in text]
    return text[: min(found)] if found else text


__all__ = ["StopStrings", "cut_at_stop"]
