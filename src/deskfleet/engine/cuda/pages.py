"""The pages of a rank on its device, and the block tables that name them. Owns their memory and their upload.

Pages hold the records of engine/cache.py. Which block is whose is decided on rank 0 (engine/blocks.py) and kept on the
host (engine/tables.py); the device has a copy of both tables, and of it only what changed is sent. The tables have one
row more than there are slots: that of nobody, which has no blocks, so that nothing is written for rows in its name.

The kernels read window rows from pages alone, also those of the step itself. A chunk has blocks only for rows that a
later step sees; the others get one of the blocks of passage here, for as long as the step takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deskfleet.engine.batch import Segment
from deskfleet.engine.cache import num_open_rows
from deskfleet.engine.cuda.step import Pages
from deskfleet.engine.tables import NULL_BLOCK, BlockTables, TableUpdate
from deskfleet.errors import EngineError
from deskfleet.model.cache_formats import CacheFormats
from deskfleet.model.device import passage_blocks
from deskfleet.model.limits import RunnerLimits


class DevicePages:
    """Pages and tables of one rank. `nobody` is the slot without blocks."""

    def __init__(
        self, formats: CacheFormats, limits: RunnerLimits, *, max_step_tokens: int, device: torch.device
    ) -> None:
        """`max_step_tokens`: of all requests in one step; each may begin and end within a block."""
        config, size = formats.config, limits.block_size
        self.nobody = limits.max_num_seqs
        self._size = size
        self._first_passage = limits.num_window_blocks + 1
        self._num_passage = passage_blocks(
            max_step_tokens,
            limits.max_num_seqs,
            size,
            config.dspark_block_size if formats.with_drafts else 0,
        )
        self._device = device

        def rows(count: int, width: int) -> Tensor:
            return torch.zeros(count, width, dtype=torch.uint8, device=device)

        window_rows = (self._first_passage + self._num_passage) * size
        num_open = num_open_rows(2, config.dspark_block_size)
        entries, index_keys, open_rows = {}, {}, {}
        for source in config.kv_source_layer_ids:
            ratio = config.compress_ratios[source]
            count = (limits.num_blocks + 1) * formats.entries_per_block(ratio)
            entries[source] = rows(count, formats.entry_record_bytes)
            index_keys[source] = rows(count, formats.index_key_record_bytes)
            if ratio > 1:
                state = (limits.max_num_seqs + 1) * num_open
                open_rows[source] = torch.zeros(state, 2 * config.head_dim, device=device)
        shape = limits.max_num_seqs + 1, -(-limits.max_model_len // size)
        pinned = device.type == "cuda"
        self._host = [torch.zeros(shape, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        window_table, entry_table = (table.to(device, copy=True) for table in self._host)
        self.pages = Pages(
            [rows(window_rows, formats.window_record_bytes) for _ in range(formats.num_window_layers)],
            entries,
            index_keys,
            open_rows,
            window_table,
            entry_table,
            size,
            num_open,
        )

    @property
    def first_passage_row(self) -> int:
        """From here on window rows are a step's own; between steps, a block of drafts may have them."""
        return self._first_passage * self._size

    def entry_blocks(self, slot: int) -> np.ndarray:
        """Blocks of a slot's entries, int32 [B]."""
        blocks: np.ndarray = self._host[1].numpy()[slot]
        return blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the pages on the device, tables included."""
        p = self.pages
        groups = (p.entries, p.index_keys, p.open_rows)
        tables = p.window_table.nbytes + p.entry_table.nbytes
        return tables + sum(t.nbytes for t in p.windows) + sum(t.nbytes for g in groups for t in g.values())

    def prepare(
        self, tables: BlockTables, updates: Sequence[TableUpdate], segments: Sequence[Segment]
    ) -> None:
        """Send what `updates`, which `tables` has taken over, changed, and give every row of `segments` a place.

        The host's copies must be at rest: no earlier step is under way. Raises EngineError without a block of passage.
        """
        changed: dict[int, list[int]] = {}  # slot -> first block, end
        windows, entries = (table.numpy() for table in self._host)
        for update in updates:
            stop = update.first + len(update.global_blocks) // 4
            _extend(changed, update.slot, update.first, stop)
        spans = [
            (s.slot, s.start // self._size, -(-(s.start + s.num_tokens) // self._size)) for s in segments
        ]
        # Most rows that decode go where the one before them went: of their blocks nothing has to be sent.
        slot, first, last = np.array(spans).T
        last -= 1
        window = tables.window_blocks[slot, first]
        is_there = (first == last) & (window != NULL_BLOCK) & (window == windows[slot, first])
        is_there &= tables.global_blocks[slot, first] == entries[slot, first]
        spans = [span for span, there in zip(spans, is_there, strict=True) if not there]
        for span in spans:
            _extend(changed, *span)
        free = self._first_passage
        for own, (begin, end) in changed.items():
            windows[own, begin:end] = tables.window_blocks[own, begin:end]
            entries[own, begin:end] = tables.global_blocks[own, begin:end]
        for own, begin, end in spans:
            missing = begin + np.flatnonzero(windows[own, begin:end] == NULL_BLOCK)
            windows[own, missing] = free + np.arange(len(missing))
            free += len(missing)
        if free > self._first_passage + self._num_passage:
            raise EngineError(
                f"a step needs {free - self._first_passage} blocks of passage, and there are {self._num_passage}"
            )
        for own, (begin, end) in changed.items():
            for host, table in zip(
                self._host, (self.pages.window_table, self.pages.entry_table), strict=True
            ):
                table[own, begin:end].copy_(host[own, begin:end], non_blocking=True)


def _extend(changed: dict[int, list[int]], slot: int, first: int, stop: int) -> None:
    if stop <= first:
        return
    known = changed.setdefault(slot, [first, stop])
    known[0], known[1] = min(known[0], first), max(known[1], stop)


__all__ = ["DevicePages"]
