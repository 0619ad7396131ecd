"""Pocket's tokenizer: byte-level BPE of 4,096 entries with DeepSeek's special tokens, every digit on its own.

Owns how the tokenizer is trained and written, and how text is encoded for training. The training text comes
from the data generator, so the same version of the repository and of `tokenizers` gives the same file. The
file in use is committed next to this module: training must not depend on the machine.

`python -m pocket.tokenizer DIRECTORY` writes tokenizer.json and tokenizer_config.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from deskfleet.testing.tiny_tokenizer import (
    ADDED_TOKENS,
    ASSISTANT,
    BASE_TOKENS,
    BOS,
    END_THINK,
    EOS,
    IMAGE,
    PAD,
    SYSTEM,
    THINK,
    USER,
)

VOCAB_SIZE = 4096
MAX_POSITIONS = 8192
DIRECTORY = Path(__file__).parent / "spelling"
"""Where the committed tokenizer.json and tokenizer_config.json are."""

_NUM_BYTES = 256
_SPECIAL = frozenset((*BASE_TOKENS, *ADDED_TOKENS[ADDED_TOKENS.index(IMAGE) + 1 :]))


class PocketTokenizer:
    """Encodes plain text without looking for special tokens in it, and knows the ids of special tokens."""

    def __init__(self, text: str) -> None:
        spelled = json.loads(text)
        self._special: dict[str, int] = {token["content"]: token["id"] for token in spelled["added_tokens"]}
        self._full = Tokenizer.from_str(text)
        self._plain = Tokenizer.from_str(json.dumps(spelled | {"added_tokens": []}))

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of plain text; a special token spelled in it stays text."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def special_id(self, token: str) -> int:
        """Return the id of a special token."""
        return self._special[token]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self._full.decode([int(token_id) for token_id in token_ids], skip_special_tokens=False)


@cache
def load_tokenizer() -> PocketTokenizer:
    """Return the committed tokenizer."""
    return PocketTokenizer((DIRECTORY / "tokenizer.json").read_text(encoding="utf-8"))


def build_tokenizer(corpus: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a tokenizer of exactly `vocab_size` ids: begin, end, pad, 256 bytes, merges, added tokens.

    Digits never merge, neither with each other nor with anything else. Raises ValueError when the corpus has
    too few merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED_TOKENS),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in BASE_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=text in _SPECIAL, normalized=False) for text in ADDED_TOKENS]
    )
    reached = tokenizer.get_vocab_size(with_added_tokens=True)
    if reached != vocab_size:
        raise ValueError(f"the corpus yields {reached} ids, not {vocab_size}: it has too few different words")
    return tokenizer


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the contents of tokenizer.json and tokenizer_config.json."""
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": MAX_POSITIONS,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def main(directory: Path) -> None:
    """Train the tokenizer on the generator's text and write its files to `directory`."""
    from pocket.data.corpus import (
        tokenizer_corpus,
    )  # the generator, which itself needs a tokenizer to pack rows

    directory.mkdir(parents=True, exist_ok=True)
    for name, text in tokenizer_files(build_tokenizer(tokenizer_corpus())).items():
        (directory / name).write_text(text, encoding="utf-8")


__all__ = [
    "ASSISTANT",
    "BOS",
    "DIRECTORY",
    "END_THINK",
    "EOS",
    "IMAGE",
    "MAX_POSITIONS",
    "PAD",
    "SYSTEM",
    "THINK",
    "USER",
    "VOCAB_SIZE",
    "PocketTokenizer",
    "build_tokenizer",
    "load_tokenizer",
    "tokenizer_files",
]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY)
