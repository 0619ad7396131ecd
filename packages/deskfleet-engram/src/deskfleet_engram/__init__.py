"""Engram rows of DeepSeek-V4.1: which rows a position needs, and their bytes from disk.

Geometry (columns, primes, multipliers), the token map, hashing, who owns which rows, and readers of published shards
and of packs, a native one and portable ones (`open_store`). Packing and verification are functions of
`deskfleet_engram.pack` and `deskfleet_engram.verify`. Imports nothing of deskfleet, no torch and no CUDA.
"""

from __future__ import annotations

from deskfleet_engram.errors import (
    EngramError,
    FormatError,
    GeometryError,
    HistoryError,
    IdentityError,
    NativeError,
    PackError,
    RowError,
    SourceError,
    SpaceError,
)
from deskfleet_engram.geometry import EngramGeometry, EngramSpec, table_rows
from deskfleet_engram.hashing import DEAD, hash_ids
from deskfleet_engram.native import IoClass, NativeOptions, NativeReader, NativeStore, RowCache, Ticket
from deskfleet_engram.ownership import PAD_COLUMN, ColumnOwnership, RowOwnership
from deskfleet_engram.portable import (
    NOT_MINE,
    NOT_MINE_NVFP4_SCALE,
    NOT_MINE_SCALE,
    PortableStore,
    ReadCounters,
    RowSource,
    decode_rows,
)
from deskfleet_engram.portable_pack import PackCounters, PortablePack, decode_nvfp4_rows
from deskfleet_engram.source import Source, SourceTable, open_source
from deskfleet_engram.store import (
    EngramStore,
    OpenStore,
    PackedLayer,
    StoreReport,
    open_store,
    open_stores,
)
from deskfleet_engram.tokens import check_size, compressed_token_map

__all__ = [
    "DEAD",
    "NOT_MINE",
    "NOT_MINE_NVFP4_SCALE",
    "NOT_MINE_SCALE",
    "PAD_COLUMN",
    "ColumnOwnership",
    "EngramError",
    "EngramGeometry",
    "EngramSpec",
    "EngramStore",
    "FormatError",
    "GeometryError",
    "HistoryError",
    "IdentityError",
    "IoClass",
    "NativeError",
    "NativeOptions",
    "NativeReader",
    "NativeStore",
    "OpenStore",
    "PackCounters",
    "PackError",
    "PackedLayer",
    "PortablePack",
    "PortableStore",
    "ReadCounters",
    "RowCache",
    "RowError",
    "RowOwnership",
    "RowSource",
    "Source",
    "SourceError",
    "SourceTable",
    "SpaceError",
    "StoreReport",
    "Ticket",
    "check_size",
    "compressed_token_map",
    "decode_nvfp4_rows",
    "decode_rows",
    "hash_ids",
    "open_source",
    "open_store",
    "open_stores",
    "table_rows",
]
