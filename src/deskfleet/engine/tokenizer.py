"""The checkpoint's own tokenizer, read from its directory. Owns nothing but the error."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from deskfleet.errors import CheckpointError

TOKENIZER_NAME = "tokenizer.json"


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read tokenizer.json in `directory`. Raises CheckpointError when it is missing or no tokenizer."""
    path = directory / TOKENIZER_NAME
    if not path.is_file():
        raise CheckpointError(f"no {TOKENIZER_NAME} in {directory}", hint="fetch it with the checkpoint")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} is no tokenizer: {error}", hint="fetch it again") from error


__all__ = ["TOKENIZER_NAME", "load_tokenizer"]
