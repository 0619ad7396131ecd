"""Tokens to say: ordinary words of a checkpoint's vocabulary, in an order of its own for each answer.

One word over and over would be taken for a loop and cut short, as it should.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random

from deskfleet.errors import ConfigError
from deskfleet.model.tokenizer import load_tokenizer

_WORD = re.compile(r" ?[a-z]{2,}")
_NUM_WORDS = 128


@dataclass(frozen=True, slots=True)
class Words:
    """Token ids and what each spells."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]

    @classmethod
    def of(cls, checkpoint: Path) -> Words:
        """Return words of the checkpoint's tokenizer. Raises CheckpointError when it cannot be read, ConfigError
        when it has too few."""
        tokenizer = load_tokenizer(checkpoint)
        found: list[tuple[int, str]] = []
        for token_id in range(tokenizer.get_vocab_size()):
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            if _WORD.fullmatch(text):
                found.append((token_id, text))
            if len(found) == _NUM_WORDS:
                break
        if len(found) < _NUM_WORDS:
            raise ConfigError(f"{checkpoint} has {len(found)} words, fewer than {_NUM_WORDS}")
        ids, texts = zip(*found, strict=True)
        return cls(ids, texts)

    def draw(self, seed: int, num_tokens: int) -> list[int]:
        """Return indices of words for an answer of so many tokens."""
        return Random(seed).choices(range(len(self.ids)), k=num_tokens)


__all__ = ["Words"]
