"""Engram reads and load times, against published figures."""

from __future__ import annotations

from fractions import Fraction

import pytest

from deskfleet.errors import ConfigError
from deskfleet.planner.cluster import Disk
from deskfleet.planner.disk import (
    SPLIT_READS,
    chunk_reads,
    read_s,
    row_reads,
    serial_read_s,
    staging_bytes,
    straddling_reads,
)
from deskfleet.planner.inventory import EngramTables
from deskfleet.planner.loading import (
    GIB,
    LOCAL_NVME,
    LOCAL_NVME_THREE_NODES,
    NFS,
    ROW_COPY,
    SECOND_PASS,
    SWITCHED_FLEET,
    load_s,
)

TABLES = EngramTables(
    layers=(1, 14),
    rows=(384_006_168, 384_016_682),
    column_rows=((16_000_257,) * 24, (16_000_695,) * 24),
    row_bytes=264,
    row_dim=256,
    format="fp8",
)
DISK = Disk(bytes_per_s=6e9, iops=112_000, qd1_iops=3_500)


@pytest.mark.parametrize(("num_ranks", "published"), [(1, 288), (4, 72), (3, 96)])
def test_m63_rows_of_a_decode_step(num_ranks: int, published: int) -> None:
    assert row_reads(TABLES, 6, num_ranks) == published


def test_rows_of_a_mean_rank_may_be_broken() -> None:
    assert row_reads(TABLES, 1, 5) == Fraction(48, 5)


def test_m64_staging_buffer() -> None:
    assert staging_bytes(8192, 6, 264) == 12_976_128


@pytest.mark.parametrize(("rows", "published_ms"), [(72, 0.64), (96, 0.86), (144, 1.29)])
def test_m65_reads_at_depth(rows: int, published_ms: float) -> None:
    assert 1000 * read_s(rows, DISK) == pytest.approx(published_ms, abs=0.005)


def test_m65_reads_one_after_another() -> None:
    assert 1000 * serial_read_s(72, DISK) == pytest.approx(20.6, abs=0.05)


def test_a_few_reads_take_no_less_than_one() -> None:
    assert read_s(0, DISK) == 0
    assert read_s(2, DISK) == 1 / 3_500


def test_m66_a_chunk_hides_its_reads_barely() -> None:
    reads = chunk_reads(TABLES, 4, 4096, 5_900, DISK)
    assert reads.num_rows == 49_152
    assert reads.disk_s == pytest.approx(0.44, abs=0.005)
    assert reads.compute_s == pytest.approx(0.69, abs=0.005)
    assert reads.is_hidden
    # M-67: with codes and scales apart each row takes two reads, and 0.88 s are no longer hidden.
    assert not chunk_reads(TABLES, 4, 4096, 5_900, DISK, reads_per_row=SPLIT_READS).is_hidden


def test_rows_end_to_end_straddle_pages() -> None:
    # Counted: of 4,096 rows of 264 B, which fill 264 pages, those that begin and end in different ones.
    straddling = sum(row * 264 // 4096 != (row * 264 + 263) // 4096 for row in range(4096))
    assert straddling_reads(264) == pytest.approx(1 + straddling / 4096, abs=0.002)


@pytest.mark.parametrize(
    ("path", "num_readers", "gib", "published_s"),
    [
        pytest.param(NFS, 3, 81.6, 341, id="M-88"),
        pytest.param(SECOND_PASS, 1, 81.6, 100, id="M-88 again"),
        pytest.param(ROW_COPY, 1, 47.2, 5.6 * 60, id="M-89"),
        pytest.param(LOCAL_NVME_THREE_NODES, 1, 476, 480, id="M-90"),
        pytest.param(LOCAL_NVME, 1, 196, 250, id="M-91 head"),
        pytest.param(SWITCHED_FLEET, 1, 475.26 / 4, 53, id="M-92"),
    ],
)
def test_published_load_times(path: object, num_readers: int, gib: float, published_s: float) -> None:
    assert load_s(int(gib * GIB), path, num_readers) == pytest.approx(published_s, rel=0.01)  # type: ignore[arg-type]


def test_m88_m90_m91_published_rates() -> None:
    assert NFS.rate_bytes_per_s(3) / GIB == pytest.approx(0.239, abs=0.0005)
    assert 3 * NFS.rate_bytes_per_s(3) / GIB == pytest.approx(0.72, abs=0.005)
    assert LOCAL_NVME_THREE_NODES.rate_bytes_per_s() / GIB == pytest.approx(1.0, rel=0.01)
    assert LOCAL_NVME.rate_bytes_per_s() / GIB == pytest.approx(0.80, rel=0.03)


def test_m91_a_single_reader_of_another_recipe_is_within_a_tenth() -> None:
    assert load_s(196 * GIB, NFS, 1) == pytest.approx(15 * 60, rel=0.1)


def test_more_readers_share_the_server() -> None:
    assert NFS.rate_bytes_per_s(6) == pytest.approx(NFS.rate_bytes_per_s(3) / 2)
    with pytest.raises(ConfigError, match="num_readers"):
        NFS.rate_bytes_per_s(0)
