"""How often Engram rows are read, and how long a disk takes for them.

Owns rows per step and chunk, staging buffers and read times. Knows no file format but by its reads for a row, and no
engine. Rows are counted before duplicates and caches, so times are upper bounds unless a share is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from deskfleet.planner.checks import above_zero, at_least
from deskfleet.planner.cluster import Disk
from deskfleet.planner.inventory import EngramTables

PAGE_BYTES = 4096

SPLIT_READS = 2
"""Reads for a row whose codes and scales lie apart, as in the published shards."""

BLOCK_READS = 1
"""Reads for a row in a pack of blocks: a row never leaves its 4 KiB block."""

UNIQUE_SHARE: Mapping[str, float] = MappingProxyType({"English": 0.52, "Python": 0.475})
"""Distinct rows among those that a chunk of 8,192 tokens asks for; measured on some million tokens of documentation and
source code with the model's own hash."""


def row_reads(tables: EngramTables, num_tokens: int, num_ranks: int = 1) -> Fraction:
    """Rows that one rank reads for `num_tokens` tokens: tokens * columns * tables / ranks, a mean.

    Tokens of a decode step are (drafts + 1) * requests. Published (M-63): 288 for six tokens, 72 a rank at four ranks,
    96 at three; (M-66) 49,152 for a chunk of 4,096 at four. Raises ConfigError.
    """
    at_least(1, num_ranks=num_ranks)
    at_least(0, num_tokens=num_tokens)
    return Fraction(num_tokens * tables.num_columns * len(tables.rows), num_ranks)


def straddling_reads(row_bytes: int) -> Fraction:
    """Mean 4 KiB reads for a row in a file of rows end to end: those over a page's edge take two (264 B: 1.064)."""
    at_least(1, row_bytes=row_bytes)
    return 1 + Fraction(row_bytes - 1, PAGE_BYTES)


def staging_bytes(num_tokens: int, num_columns: int, row_bytes: int) -> int:
    """Bytes of one table's staging buffer: tokens * columns of the rank * bytes of a row.

    Published (M-64): 12,976,128 B for 8,192 tokens, 6 columns and 264 B. Raises ConfigError.
    """
    at_least(0, num_tokens=num_tokens, num_columns=num_columns, row_bytes=row_bytes)
    return num_tokens * num_columns * row_bytes


def read_s(num_rows: float | Fraction, disk: Disk, *, reads_per_row: float | Fraction = BLOCK_READS) -> float:
    """Seconds to read rows with many reads under way: reads / IOPS, but never less than one read alone.

    Published (M-65, M-66) at 112,000 IOPS: 72 rows 0.64 ms, 49,152 rows 0.44 s. Raises ConfigError.
    """
    above_zero(iops=disk.iops, qd1_iops=disk.qd1_iops, reads_per_row=float(reads_per_row))
    at_least(0, num_rows=float(num_rows))
    if not num_rows:
        return 0.0
    return max(1 / disk.qd1_iops, float(num_rows * reads_per_row) / disk.iops)


def serial_read_s(
    num_rows: float | Fraction, disk: Disk, *, reads_per_row: float | Fraction = BLOCK_READS
) -> float:
    """Seconds to read rows one after another. Published (M-65): 20.6 ms for 72 rows at 3,500 IOPS.

    Raises ConfigError.
    """
    above_zero(qd1_iops=disk.qd1_iops, reads_per_row=float(reads_per_row))
    at_least(0, num_rows=float(num_rows))
    return float(num_rows * reads_per_row) / disk.qd1_iops


@dataclass(frozen=True, slots=True)
class ChunkReads:
    """A prefill chunk's rows on one rank: how many are read, the disk's time, and the time the chunk computes."""

    num_rows: float
    disk_s: float
    compute_s: float

    @property
    def is_hidden(self) -> bool:
        """Whether reading the next chunk's rows ends before this chunk's computation does."""
        return self.disk_s <= self.compute_s


def chunk_reads(
    tables: EngramTables,
    num_ranks: int,
    chunk_tokens: int,
    prefill_tokens_per_s: float,
    disk: Disk,
    *,
    reads_per_row: float | Fraction = BLOCK_READS,
    unique_share: float = 1.0,
) -> ChunkReads:
    """Compare a chunk's reads with its computation at a prefill rate.

    `unique_share` of the rows are read, 1.0 without looking for duplicates. Published (M-66): 0.44 s against 0.69 s for
    4,096 tokens at 5,900 tok/s. Raises ConfigError.
    """
    above_zero(prefill_tokens_per_s=prefill_tokens_per_s, unique_share=unique_share)
    num_rows = float(row_reads(tables, chunk_tokens, num_ranks)) * unique_share
    disk_s = read_s(num_rows, disk, reads_per_row=reads_per_row)
    return ChunkReads(num_rows, disk_s, chunk_tokens / prefill_tokens_per_s)


__all__ = [
    "BLOCK_READS",
    "PAGE_BYTES",
    "SPLIT_READS",
    "UNIQUE_SHARE",
    "ChunkReads",
    "chunk_reads",
    "read_s",
    "row_reads",
    "serial_read_s",
    "staging_bytes",
    "straddling_reads",
]
