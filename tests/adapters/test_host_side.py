"""What both plug-ins share beside the rows: counters for the engines' metrics, hints, and pages given back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from deskfleet_engram import _native
from deskfleet_engram.errors import FormatError, RowError
from deskfleet_engram.host import HostRows
from deskfleet_engram.host_metrics import METRICS, FileCollector, RankCounters, read_counters
from deskfleet_engram.host_prefetch import Prefetcher
from deskfleet_engram.host_residency import MappedPages, Trimmer
from deskfleet_engram.host_split import open_split, write_split
from deskfleet_engram.native import NativeOptions
from deskfleet_engram.pack import pack
from deskfleet_engram.row_cache import RowCache
from deskfleet_engram.source import Source
from tests.engram.pack_fixtures import make_checkpoint, rows_of

LAYERS = (1, 3)
NUM_COLUMNS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Source:
    directory = tmp_path_factory.mktemp("host")
    source = make_checkpoint(directory / "model", n_heads=8, vocab_size=1009, layer_ids=LAYERS)
    pack(source, directory / "model" / "pack")
    return source


def opened(checkpoint: Source, options: NativeOptions | None = None) -> HostRows:
    return HostRows.open(
        checkpoint.directory / "pack",
        checkpoint.directory,
        rank=0,
        world_size=1,
        columns=range(NUM_COLUMNS),
        options=options,
        cache=RowCache(4 << 20),
    )


@pytest.fixture
def rows(checkpoint: Source) -> Iterator[HostRows]:
    with opened(checkpoint) as found:
        yield found


def drawn(rows: HostRows, tokens: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    tables = rows.tables.values()
    return np.stack(
        [random.integers(table.first_row, table.end_row, (tokens, NUM_COLUMNS)) for table in tables], axis=1
    )


def test_what_is_fetched_ahead_needs_no_read_and_is_no_lookup(rows: HostRows, checkpoint: Source) -> None:
    ids = drawn(rows, 5, seed=1)
    prefetcher = Prefetcher(rows)
    prefetcher.ask(lambda: ids)
    prefetcher.wait()
    before = rows.counters()
    assert before["num_reads"] > 0
    for position, (layer, table) in enumerate(rows.tables.items()):
        np.testing.assert_array_equal(
            table.rows(ids[:, position]), rows_of(checkpoint, layer)[ids[:, position]]
        )
    assert rows.counters()["num_reads"] == before["num_reads"]
    assert rows.counters()["num_cache_hits"] - before["num_cache_hits"] == rows.counters()["num_unique"] / 2


def test_a_hint_that_fails_harms_nobody_and_the_lookup_says_why(checkpoint: Source) -> None:
    with opened(checkpoint, NativeOptions(faults="seed=1,eio=1", retries=0)) as rows:
        ids = drawn(rows, 2, seed=2)
        prefetcher = Prefetcher(rows)
        prefetcher.ask(lambda: ids)
        prefetcher.wait()
        with pytest.raises(RowError, match=r"L01/c\d\d\.egp.*Input/output error") as caught:
            rows.tables[1].rows(ids[:, 0])
        assert caught.value.kind == "io"
    prefetcher.ask(lambda: ids)  # of a reader that is closed
    prefetcher.wait()


def test_the_hints_of_a_step_leave_most_of_the_cache_to_what_was_looked_up(rows: HostRows) -> None:
    ids = drawn(rows, 200, seed=3)
    num_rows = Prefetcher(rows, cache_bytes=4 << 20).start(ids)
    assert 0 < num_rows <= (4 << 20) // 264 // 10


def test_the_metrics_of_a_server_are_those_of_all_its_ranks(
    rows: HostRows, checkpoint: Source, tmp_path: Path
) -> None:
    counters = RankCounters(rows, "vllm", tmp_path)
    counters.publish()
    with opened(checkpoint, NativeOptions(faults="seed=3,eio=0.05", retries=9)) as second:
        second.rank, second.world_size = 1, 2
        second.tables[1].rows(drawn(second, 30, seed=4)[:, 0])
        RankCounters(second, "vllm", tmp_path).publish()
        wanted = second.counters()
    for _ in range(3):
        rows.tables[3].rows(drawn(rows, 2, seed=5)[:, 1])
    counters.publish()
    (tmp_path / "vllm-rank7-counters.json").write_text("{")
    (tmp_path / "vllm-rank0-receipt.json").write_text("{}")
    old = json.loads((tmp_path / "vllm-rank0-counters.json").read_text())
    (tmp_path / "vllm-rank5-counters.json").write_text(
        json.dumps({**old, "rank": 5, "written_unix_s": time.time() - 3600})
    )
    registry = CollectorRegistry()
    registry.register(FileCollector(tmp_path, "vllm"))
    said = generate_latest(registry).decode()
    assert 'deskfleet_engram_lookups_total{rank="0"} 3.0' in said
    assert f'deskfleet_engram_rows_total{{rank="1"}} {wanted["num_rows"]:.1f}' in said
    assert f'deskfleet_engram_errors_total{{kind="io",rank="1"}} {wanted["errors"]["io"]:.1f}' in said
    assert 'rank="5"' not in said
    assert all(f"# TYPE {name}_total counter" in said for name, _ in METRICS.values())
    document = next(iter(read_counters(tmp_path, "vllm")))
    assert document["counters"]["wait_s"] > 0
    assert list(read_counters(tmp_path / "nothing", "vllm")) == []


SHARING = """
import sys
from pathlib import Path
from deskfleet_engram.host import HostRows
from deskfleet_engram.host_metrics import RankCounters
rows = HostRows.open(Path(sys.argv[1]), Path(sys.argv[2]), rank=0, world_size=1, columns=range(24))
counters = RankCounters(rows, "sglang", None)
for _ in range(2):
    rows.tables[1].rows(__import__("numpy").arange(10))
    counters.publish()
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_an_engine_whose_processes_share_metrics_has_them_too(checkpoint: Source, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHARING, str(checkpoint.directory / "pack"), str(checkpoint.directory)],
        env={
            **os.environ,
            "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
            "DESKFLEET_ENGRAM_LIBRARY": _native.library()._name,
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert 'deskfleet_engram_lookups_total{rank="0"} 2.0' in done.stdout
    assert 'deskfleet_engram_rows_total{rank="0"} 20.0' in done.stdout


def resident_bytes(address: int) -> int:
    """What the kernel says of the mapping that begins there."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    return next(int(line.split()[1]) * 1024 for line in lines[begin:] if line.startswith("Rss:"))


def test_a_mapping_that_grew_is_given_back_and_read_again(
    rows: HostRows, checkpoint: Source, tmp_path: Path
) -> None:
    table = rows.tables[1]
    write_split(table, rows.manifest.identity.sha256.hex(), tmp_path)
    split = open_split(table, rows.manifest.identity.sha256.hex(), tmp_path)
    pages = MappedPages(split, table.head_dim, table.num_scales)
    wanted = rows_of(checkpoint, 1)
    codes = split.content[: table.num_rows * 256].reshape(-1, 256)
    num_bytes = len(split.content)
    watched, unwatched = Trimmer(lambda: [pages], num_bytes // 2), Trimmer(lambda: [pages], num_bytes * 9)
    pages.give_back()
    assert not watched.trim()
    np.testing.assert_array_equal(codes, wanted[:, :256])  # touches every page
    assert not unwatched.trim()
    assert resident_bytes(split.address) > num_bytes * 0.9
    assert watched.trim()
    assert resident_bytes(split.address) < num_bytes * 0.1
    assert not watched.trim()
    np.testing.assert_array_equal(codes, wanted[:, :256])

    first = np.array([0, 1, table.num_rows - 1])
    assert pages.will_need(first) == 3  # where codes begin, where they end and scales begin, where those end
    prefetcher = Prefetcher(rows, {1: pages})
    before = rows.counters()["num_reads"]
    assert prefetcher.start(np.full((1, 2, NUM_COLUMNS), -1)) == 0
    ids = np.stack([first + table.first_row] * 2, axis=0)[None]
    assert prefetcher.start(np.where(np.arange(2)[None, :, None] == 0, ids, -1)) == 3
    assert rows.counters()["num_reads"] == before, "mapped rows are not read by the reader"
    split.path.unlink()
    with pytest.raises(FormatError, match="cannot open"):
        MappedPages(split, table.head_dim, table.num_scales)
