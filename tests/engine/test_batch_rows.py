"""Engram rows of many segments at once are those of each by itself."""

from __future__ import annotations

import numpy as np

from deskfleet.engine.batch import BatchBuilder, Segment
from deskfleet.engine.tables import BlockTables
from deskfleet.model.engram import engram_geometry
from deskfleet_engram.hashing import DEAD
from tests.engine.golden import checkpoint, token_map


def segment(rng: np.random.Generator, slot: int, start: int, count: int) -> Segment:
    """Random tokens, one in five of an image."""
    ids = rng.integers(0, len(token_map()), start + count)
    compressed = token_map()[ids]
    compressed[rng.random(len(ids)) < 0.2] = DEAD
    history = max(start - 3, 0)
    mask = compressed[start:] == DEAD
    return Segment(slot, start, ids[start:], compressed[start:], compressed[history:start], mask)


def test_rows_of_segments_do_not_reach_into_each_other() -> None:
    """Some at the beginning of their sequence, whose history is short or missing; few rows and many."""
    config, rng = checkpoint().config, np.random.default_rng(3)
    tables = BlockTables(num_slots=80, max_model_len=256, block_size=16)
    builder = BatchBuilder(config, engram_geometry(config), tables, pad_compressed_id=2)
    shapes = [(0, 1), (1, 1), (2, 3), (3, 1), (0, 40), (100, 7)]
    for more in (0, 70):  # by either of the two that hash
        segments = [segment(rng, n, *shape) for n, shape in enumerate(shapes + [(50, 1)] * more)]
        together = builder.engram_ids(segments)
        alone = np.concatenate([builder.engram_ids([one]) for one in segments])
        assert np.array_equal(together, alone)
