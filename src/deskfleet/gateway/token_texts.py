"""What each token is as bytes. Owns the byte alphabet of the tokenizer's vocabulary; knows nothing of prompts.

The publisher's library decodes too, but only whole chunks and only into its own parser. Finding markup needs the bytes
of each token before that, and plain completions have no parser at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from deskfleet.errors import CheckpointError


class AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int]


class _Decoder(msgspec.Struct, frozen=True):
    type: str
    decoders: list[_Decoder] = []


class TokenizerFile(msgspec.Struct, frozen=True):
    """The parts of tokenizer.json that say what tokens are."""

    added_tokens: list[AddedToken]
    model: _Model
    decoder: _Decoder | None = None


def token_texts(file: TokenizerFile) -> tuple[bytes, ...]:
    """Return the bytes of every token, by id; none for an id that is no token.

    Raises CheckpointError for a tokenizer whose vocabulary is not spelled in bytes.
    """
    decoder = file.decoder
    kinds = () if decoder is None else (decoder.type, *(each.type for each in decoder.decoders))
    if "ByteLevel" not in kinds:
        raise CheckpointError(
            f"the tokenizer's decoder is {kinds[0] if kinds else 'missing'}, not ByteLevel",
            hint="use the tokenizer.json that came with the checkpoint",
        )
    byte_of = _byte_alphabet()
    spelled = {token.id: token.content.encode() for token in file.added_tokens}
    texts = {token_id: _spelled_bytes(text, byte_of) for text, token_id in file.model.vocab.items()} | spelled
    return tuple(texts.get(token_id, b"") for token_id in range(max(texts, default=-1) + 1))


def _spelled_bytes(text: str, byte_of: Mapping[str, int]) -> bytes:
    try:
        return bytes([byte_of[char] for char in text])
    except KeyError:
        return text.encode()  # an added token that the vocabulary lists as well


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte, as byte-level vocabularies spell them: printable ones as themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def join(texts: tuple[bytes, ...], token_ids: Iterable[int]) -> bytes:
    """Return the bytes of several tokens; ids beyond the vocabulary have none."""
    size = len(texts)
    return b"".join([texts[token_id] if token_id < size else b"" for token_id in token_ids])


__all__ = ["AddedToken", "TokenizerFile", "join", "token_texts"]
