"""What the device is told of block tables: every place of every step, though most of it was told before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers", reason="checkpoints are opened with their tokenizer")

from deskfleet.engine.batch import Segment
from deskfleet.engine.cuda.pages import DevicePages
from deskfleet.engine.tables import NULL_BLOCK, BlockTables, TableUpdate
from deskfleet.model.cache_formats import CacheFormats
from deskfleet.model.limits import RunnerLimits
from tests.engine.golden import checkpoint

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore")]

SLOTS, SIZE, LENGTH = 4, 8, 96


def test_tables_of_the_device_are_those_of_the_host(device: torch.device) -> None:
    """Requests that begin, go on by one row or several, lose window blocks and give their slot to another. Blocks are
    numbers of a few, so that a slot's next request may have the same ones."""
    rng = np.random.default_rng(8)
    limits = RunnerLimits(SLOTS, LENGTH, SIZE, num_blocks=40, num_window_blocks=40)
    pages = DevicePages(
        CacheFormats(checkpoint().config, SIZE, with_drafts=False), limits, max_step_tokens=64, device=device
    )
    tables = BlockTables(num_slots=SLOTS, max_model_len=LENGTH, block_size=SIZE)
    done = np.zeros(SLOTS, int)
    for _ in range(300):
        updates, segments = [], []
        for slot in rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].tolist():
            count = int(rng.choice([1, 1, 1, 3, 20]))
            if done[slot] + count > LENGTH or rng.random() < 0.02:
                done[slot] = 0
            first, stop = int(done[slot]) // SIZE, -(-(int(done[slot]) + count) // SIZE)
            fresh = first if done[slot] % SIZE == 0 or rng.random() < 0.1 else first + 1
            if fresh < stop:
                blocks = [rng.integers(low, 5, stop - fresh).astype("<i4") for low in (1, NULL_BLOCK)]
                updates.append(TableUpdate(slot, fresh, *(ids.tobytes() for ids in blocks)))
            nothing = np.zeros(count, np.int64)
            segments.append(
                Segment(slot, int(done[slot]), nothing, nothing, nothing[:0], np.zeros(count, bool))
            )
            done[slot] += count
        for update in updates:
            tables.apply(update)
        told = [update for update in updates if rng.random() < 0.8]  # a caller may set tables itself
        pages.prepare(tables, told, segments)
        passage = []
        for one in segments:
            own = slice(one.start // SIZE, -(-(one.start + one.num_tokens) // SIZE))
            entries = pages.pages.entry_table[one.slot, own].cpu().numpy()
            assert np.array_equal(entries, tables.global_blocks[one.slot, own])
            windows, wanted = (
                pages.pages.window_table[one.slot, own].cpu().numpy(),
                tables.window_blocks[one.slot, own],
            )
            assert np.array_equal(windows[wanted != NULL_BLOCK], wanted[wanted != NULL_BLOCK])
            passage += (windows[wanted == NULL_BLOCK] * SIZE).tolist()
        assert len(set(passage)) == len(passage)
        assert all(row >= pages.first_passage_row for row in passage)
