"""Checkpoints and packs for the native reader's tests, and what every answer must be.

Importing this fails where the native library is missing: its tests are not to be skipped in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pack_fixtures import TINY, make_checkpoint, rows_of

from deskfleet_engram import _native
from deskfleet_engram.errors import NativeError, RowError
from deskfleet_engram.format import NVFP4_FORMAT, RowFormat
from deskfleet_engram.native import NativeOptions, NativeReader, NativeStore, RowCache
from deskfleet_engram.pack import pack
from deskfleet_engram.source import Source, SourceTable, open_source
from deskfleet_engram.tables import TablePlace, place_of_pack, place_of_table

_native.library()


def _works(backend: str) -> bool:
    place = place_of_table(open_source(TINY).tables[0])
    try:
        NativeReader([place], NativeOptions(backend=backend), RowCache(0)).open().close()  # type: ignore[arg-type]
    except NativeError:
        return False
    return True


BACKENDS = tuple(name for name in ("io_uring", "aio", "pool") if _works(name))
"""What this machine and sandbox let us test; test_native_backends says what is missing."""

LAYER = 1
SOURCES = ("pack", "shard")
FORMATS = ("fp8", "nvfp4")
POISON = 0x7F
BF16_NAN = 0x7FC0


@dataclass(frozen=True)
class World:
    """One checkpoint with its pack, and layer 1's rows uint8 [rows, row_bytes]."""

    source: Source
    pack_dir: Path
    rows: NDArray[np.uint8]

    @property
    def table(self) -> SourceTable:
        return self.source.table(LAYER)

    @property
    def format(self) -> RowFormat:
        return self.table.rows

    def place(self, kind: str, *, second: str | None = None, layer: int = LAYER) -> TablePlace:
        """The pack or the shard, with the other as second source if asked for."""
        if kind == "pack":
            return place_of_pack(self.pack_dir, layer, second_source=None if second is None else self.source)
        place = place_of_table(self.source.table(layer))
        if second is None:
            return place
        packed = place_of_pack(self.pack_dir, layer)
        return TablePlace(
            place.layer, place.rows, place.num_rows, place.first, packed.first, place.global_scale
        )

    def expected(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Codes and scales of `ids`, -1 included."""
        rows = self.format
        table = np.vstack([self.rows, np.zeros((1, rows.row_bytes), np.uint8)])
        table[-1, rows.weight_bytes :] = 0x38 if rows.format_id == NVFP4_FORMAT else 127
        found = table[ids]  # -1 is the last one
        return found[..., : rows.weight_bytes], found[..., rows.weight_bytes :]


def make_world(directory: Path, row_format: str = "fp8", *, vocab_size: int = 701, seed: int = 0) -> World:
    source = make_checkpoint(directory / "model", row_format=row_format, vocab_size=vocab_size, seed=seed)
    pack(source, directory / "pack")
    return World(source, directory / "pack", rows_of(source, LAYER))


def open_reader(
    *places: TablePlace, cache_bytes: int = 0, options: NativeOptions | None = None
) -> NativeReader:
    """An open reader with a cache of its own, so that tests do not warm each other's."""
    row_bytes = max(place.rows.row_bytes for place in places)
    return NativeReader(places, options, RowCache(cache_bytes, row_bytes)).open()


def outputs(rows: RowFormat, *shape: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Buffers full of a pattern that no test expects back."""
    return (
        np.full((*shape, rows.weight_bytes), 0xAB, dtype=np.uint8),
        np.full((*shape, rows.scale_bytes), 0xCD, dtype=np.uint8),
    )


def gathered(store: NativeStore, ids: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    codes, scales = outputs(store.place.rows, *ids.shape)
    store.gather(ids, codes, scales)
    return codes, scales


def failure_of(call: Callable[[], object]) -> RowError | None:
    """Run `call`; return the RowError that it raised, if any."""
    try:
        call()
    except RowError as error:
        return error
    return None


def check_sums(reader: NativeReader) -> None:
    """Every row asked for came from somewhere, and every ticket was timed. All tickets must be finished."""
    counters = reader.counters
    assert counters.num_unique == (
        counters.num_cache_hits
        + counters.num_read_rows
        + counters.num_shared_rows
        + counters.num_fallback_rows
        + counters.num_failed_rows
    )
    assert sum(counters.wait_us) == counters.num_tickets
    assert counters.num_unique <= counters.num_rows


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bf16, ties to even, NaN to the one NaN of the library."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(BF16_NAN), rounded)
