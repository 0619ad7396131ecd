"""Tokens to say: ordinary words of a checkpoint's vocabulary, in an order of its own for each answer.

One word over and over would be taken for a loop and cut short, as it should.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from deskfleet.errors import ConfigError

_WORD = re.compile(r" ?[a-z]{2,}")
_NUM_WORDS = 128


@dataclass(frozen=True, slots=True)
class Words:
    """Token ids and what each spells."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]

    @classmethod
    def of(cls, checkpoint: Path) -> Words:
        """Return words of the checkpoint's tokenizer. Raises ConfigError when it cannot be read or has too few."""
        path = checkpoint / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"cannot read {path}: {error}") from error
        found: list[tuple[int, str]] = []
        for token_id in range(tokenizer.get_vocab_size()):
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            if _WORD.fullmatch(text):
                found.append((token_id, text))
            if len(found) == _NUM_WORDS:
                break
        if len(found) < _NUM_WORDS:
            raise ConfigError(f"{path} has {len(found)} words, fewer than {_NUM_WORDS}")
        ids, texts = zip(*found, strict=True)
        return cls(ids, texts)

    def draw(self, seed: int, num_tokens: int) -> list[int]:
        """Return indices of words for an answer of so many tokens."""
        return Random(seed).choices(range(len(self.ids)), k=num_tokens)


__all__ = ["Words"]
