"""Engram rows of DeepSeek-V4.1: which rows a position needs, and their bytes from disk.

Geometry (columns, primes, multipliers), the token map, hashing and a portable reader. Imports nothing of
deskfleet, no torch and no CUDA.
"""

from __future__ import annotations

from deskfleet_engram.errors import EngramError, GeometryError, HistoryError, RowError
from deskfleet_engram.geometry import EngramGeometry, EngramSpec, table_rows
from deskfleet_engram.hashing import DEAD, hash_ids
from deskfleet_engram.portable import (
    NOT_MINE,
    NOT_MINE_SCALE,
    PortableStore,
    ReadCounters,
    RowSource,
    decode_rows,
)
from deskfleet_engram.tokens import check_size, compressed_token_map

__all__ = [
    "DEAD",
    "NOT_MINE",
    "NOT_MINE_SCALE",
    "EngramError",
    "EngramGeometry",
    "EngramSpec",
    "GeometryError",
    "HistoryError",
    "PortableStore",
    "ReadCounters",
    "RowError",
    "RowSource",
    "check_size",
    "compressed_token_map",
    "decode_rows",
    "hash_ids",
    "table_rows",
]
