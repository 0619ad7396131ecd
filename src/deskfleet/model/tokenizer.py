"""The checkpoint's own tokenizer, read from its directory. Owns its errors, and the spelling of control tokens."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from deskfleet.errors import CheckpointError

TOKENIZER_NAME = "tokenizer.json"
DSML = "｜DSML｜"
"""The token that tool-call markup is made of."""


class ThinkingTokens(NamedTuple):
    """Ids of `<think>` and `</think>`."""

    start: int
    end: int


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read tokenizer.json in `directory`. Raises CheckpointError when it is missing or no tokenizer."""
    path = directory / TOKENIZER_NAME
    if not path.is_file():
        raise CheckpointError(f"no {TOKENIZER_NAME} in {directory}", hint="fetch it with the checkpoint")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} is no tokenizer: {error}", hint="fetch it again") from error


def thinking_tokens(tokenizer: Tokenizer) -> ThinkingTokens | None:
    """The marks of a thought, or None when this tokenizer lacks one of them."""
    start, end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
    return None if start is None or end is None else ThinkingTokens(start, end)


__all__ = ["DSML", "TOKENIZER_NAME", "ThinkingTokens", "load_tokenizer", "thinking_tokens"]
