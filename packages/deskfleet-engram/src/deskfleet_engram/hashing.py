"""Row ids of every position: hashes of the n-grams that end there.

A pure function of compressed ids. Knows neither tokens nor files. Cutting a sequence into chunks changes
nothing as long as each chunk brings the `max_ngram_size - 1` ids before it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.errors import HistoryError
from deskfleet_engram.geometry import EngramGeometry

DEAD = -1
"""Stands for a position of an image span in a history of compressed ids: no n-gram reaches across it."""


def hash_ids(
    geometry: EngramGeometry,
    compressed_ids: NDArray[np.int64],
    *,
    start: int,
    position: int,
    pad_id: int,
) -> NDArray[np.int64]:
    """Return int64 [T - start, L, num_columns]: row ids for `compressed_ids[start:]` (specification §7.3).

    `compressed_ids` int64 [T] is a stretch of one sequence, DEAD at image positions; its first element stands
    at absolute `position` of that sequence. The first `start` ids are history only. A stretch that does
    not begin the sequence must carry at least `max_ngram_size - 1` ids of history, and then gives what the
    whole sequence would have given. `pad_id` is the compressed id of the pad token; looking
    back, it fills an n-gram's slots from the first one that lies before the sequence or is DEAD. At a DEAD
    position it fills them all; the ids are valid rows, and the caller drops what they fetch.

    Row ids count from the first row of the layer's table. Raises HistoryError when the history is too short,
    or an id lies outside the compressed vocabulary.
    """
    spec = geometry.spec
    total = check_stretch(geometry, compressed_ids, start=start, position=position, pad_id=pad_id)
    index = np.arange(start, total)
    blocked = np.zeros(total - start, dtype=np.bool_)
    mixed = np.zeros((total - start, len(spec.layer_ids)), dtype=np.int64)
    rows = np.empty((total - start, *geometry.primes.shape), dtype=np.int64)
    for lookback in range(spec.max_ngram_size):
        source = compressed_ids[np.maximum(index - lookback, 0)]
        # An index below the lookback is before the sequence: any other stretch carries enough history. Once
        # blocked, older slots stay so.
        blocked |= (index < lookback) | (source == DEAD)
        slot = np.where(blocked, pad_id, source)
        mixed ^= slot[:, None] * geometry.multipliers[:, lookback]
        if lookback:
            rows[:, :, lookback - 1] = mixed[:, :, None] % geometry.primes[:, lookback - 1]
    return rows.reshape(total - start, len(spec.layer_ids), spec.num_columns) + geometry.offsets


def check_stretch(
    geometry: EngramGeometry,
    compressed_ids: NDArray[np.int64],
    *,
    start: int,
    position: int,
    pad_id: int,
) -> int:
    """Return T, or raise HistoryError where `hash_ids` would."""
    spec = geometry.spec
    if compressed_ids.ndim != 1 or compressed_ids.dtype != np.int64:
        raise HistoryError(
            f"compressed ids must be int64 [T], not {compressed_ids.dtype} of shape {compressed_ids.shape}"
        )
    total = len(compressed_ids)
    if not 0 <= start <= total or position < 0:
        raise HistoryError(f"start {start} must be in 0..{total}, and position {position} not negative")
    needed = spec.max_ngram_size - 1
    if position > 0 and start < needed and start < total:
        raise HistoryError(
            f"{start} ids of history before position {position + start}; hashing needs {needed} unless the "
            "ids begin the sequence"
        )
    if not 0 <= pad_id < spec.compressed_vocab_size:
        raise HistoryError(f"pad id {pad_id} is outside 0..{spec.compressed_vocab_size - 1}")
    outside = (compressed_ids < DEAD) | (compressed_ids >= spec.compressed_vocab_size)
    if outside.any():
        where = int(outside.argmax())
        raise HistoryError(
            f"compressed id {compressed_ids[where]} at position {position + where} is outside "
            f"0..{spec.compressed_vocab_size - 1}"
        )
    return total


__all__ = ["DEAD", "check_stretch", "hash_ids"]
