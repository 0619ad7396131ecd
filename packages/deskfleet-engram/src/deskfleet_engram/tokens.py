"""The token map: raw token ids onto the smaller vocabulary that Engram hashes.

Tokens that read alike after normalisation (case, accents, width, white space) share one compressed id. The
map depends on the Unicode tables of the installed `tokenizers`, so its size is checked against the checkpoint
and a caller may keep the array. Knows nothing of tables or rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from deskfleet_engram.errors import GeometryError

_BROKEN_UTF8 = "\N{REPLACEMENT CHARACTER}"
_LONE_SPACE = "\ue000"  # private use: keeps a token that is one space from being stripped to nothing


def compressed_token_map(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return int32 [len(tokenizer)]: the compressed id of every raw id (specification §7.1).

    Compressed ids count up from 0 in order of first appearance, so their number is `map.max() + 1`.
    Takes about a second for 129,280 tokens; the same tokenizer always gives the same array.
    """
    normalizer = _normalizer()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[token_id] for token_id in range(size)], skip_special_tokens=False)
    seen: dict[str, int] = {}
    compressed = np.empty(size, dtype=np.int32)
    for token_id, text in enumerate(texts):
        key = _key(tokenizer, normalizer, token_id, text)
        compressed[token_id] = seen.setdefault(key, len(seen))
    return compressed


def check_size(compressed: NDArray[np.int32], expected: int) -> None:
    """Raise GeometryError unless the map yields exactly `expected` compressed ids.

    Every hash multiplier depends on that number: a map of another size reads unrelated rows.
    """
    found = int(compressed.max()) + 1 if compressed.size else 0
    if found != expected:
        raise GeometryError(
            f"the tokenizer gives {found} compressed ids, but engram_compressed_vocab_size says {expected}"
        )


def _key(tokenizer: Tokenizer, normalizer: normalizers.Sequence, token_id: int, text: str) -> str:
    if _BROKEN_UTF8 in text:  # part of a character: only the token's own spelling tells it apart
        return tokenizer.id_to_token(token_id) or text
    return normalizer.normalize_str(text) or text


def _normalizer() -> normalizers.Sequence:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


__all__ = ["check_size", "compressed_token_map"]
