"""What is looked up: row ids of real text, by the published hash over a table of another size.

The text is the Python standard library's own source, which every machine that runs this has. Pieces of a regular
expression stand for the tokenizer's, which comes only with a checkpoint: what matters here is how often n-grams
repeat. Knows nothing of files with rows, nor of reading.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.format import RowFormat
from deskfleet_engram.geometry import EngramGeometry
from deskfleet_engram.native_functions import hash_ids

_PIECES = re.compile(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]+|\s+")
CORPUS = "sources of the Python standard library, cut by a regular expression"


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """`ids` int64 [T]: compressed ids of one long text."""

    ids: NDArray[np.int64]

    @classmethod
    def read(cls, num_tokens: int, vocab_size: int) -> Corpus:
        """Return the first tokens of the library's modules in alphabetical order, repeated if there are too few."""
        numbers: dict[str, int] = {}
        ids: list[int] = []
        for text in _texts():
            ids += [numbers.setdefault(piece, len(numbers)) % vocab_size for piece in _PIECES.findall(text)]
            if len(ids) >= num_tokens:
                break
        return cls(np.resize(np.array(ids, dtype=np.int64), num_tokens))

    def rows(self, geometry: EngramGeometry, begin: int, num_tokens: int) -> NDArray[np.int64]:
        """Return the rows int64 [num_tokens, num_columns] of the first layer, for tokens from `begin` on."""
        history = min(begin, geometry.spec.max_ngram_size - 1)
        ids = self.ids[begin - history : begin + num_tokens]
        pad_id = geometry.spec.pad_token_id
        rows = hash_ids(geometry, ids, start=history, position=begin - history, pad_id=pad_id)
        return np.ascontiguousarray(rows[:, 0])


def blocks_of(geometry: EngramGeometry, rows: RowFormat, row_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each row id of the first layer a number that says in which block of which column it lies."""
    columns = np.searchsorted(geometry.offsets[0], row_ids, side="right") - 1
    within = (row_ids - geometry.offsets[0][columns]) // rows.rows_per_block
    most = int(geometry.primes[0].max()) // rows.rows_per_block + 1
    return np.asarray(columns * most + within, dtype=np.int64)


def distinct_batches(row_ids: NDArray[np.int64], blocks: NDArray[np.int64], batch: int) -> NDArray[np.int64]:
    """Return int64 [N, batch]: rows in the order of the text, no two of a batch in one block.

    A batch then costs exactly `batch` reads, which is what fio is asked for. Repeats within so few tokens are rare.
    """
    found: list[list[int]] = []
    current: list[int] = []
    seen: set[int] = set()
    for row, block in zip(row_ids.tolist(), blocks.tolist(), strict=True):
        if block in seen:
            continue
        seen.add(block)
        current.append(row)
        if len(current) == batch:
            found.append(current)
            current, seen = [], set()
    return np.array(found, dtype=np.int64).reshape(-1, batch)


def _texts() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


__all__ = ["CORPUS", "Corpus", "blocks_of", "distinct_batches"]
