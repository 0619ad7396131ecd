"""What a rank's reader did, where others find it: a file, and the metrics that an engine's processes share.

The file is `ENGINE-rankN-counters.json`: the head of a receipt (`format`, `pid`, `host`, `written_unix_s`), `engine`,
`rank`, `world_size`, and `counters`, numbers since the reader was opened, which never fall:

    num_lookups        finished lookups, each of one layer and one step; rows that are only fetched ahead are none
    wait_s             seconds from their ids to their rows, summed; a step waits so long at most, and less where it
                       has other work. The portable reader is not timed: both are 0
    num_rows           rows asked for, be it ahead; num_unique: repeats within a request left out
    num_cache_hits     of the unique ones, those that memory answered; num_fallback_rows: a second source
    num_reads          reads of the disk; read_bytes: what they brought
    errors             faults by kind, also those that a retry repaired

Rows that a kernel takes from a mapped file are counted by nobody. Knows no engine; prometheus_client is the engine's.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deskfleet_engram.host import HostRows, write_receipt

MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Set by an engine whose processes share their metrics through files of prometheus_client."""

STALE_S = 60.0
"""A file that was not written for so long is of a process that has ended."""

METRICS: Mapping[str, tuple[str, str]] = {
    "num_lookups": ("deskfleet_engram_lookups", "Lookups of Engram rows, each of one layer and one step"),
    "wait_s": ("deskfleet_engram_wait_seconds", "Seconds that lookups of Engram rows took"),
    "num_rows": ("deskfleet_engram_rows", "Engram rows asked for"),
    "num_unique": (
        "deskfleet_engram_unique",
        "Engram rows asked for, repeats within a request left out",
    ),
    "num_cache_hits": ("deskfleet_engram_cache_hits", "Engram rows that memory answered"),
    "num_fallback_rows": ("deskfleet_engram_fallback_rows", "Engram rows that the second source answered"),
    "num_reads": ("deskfleet_engram_reads", "Reads of the disk for Engram rows"),
    "read_bytes": ("deskfleet_engram_read_bytes", "Bytes read for Engram rows"),
}
"""Name and help by key; each has the label `rank`. They are named as those of deskfleet's own engine."""

ERRORS = ("deskfleet_engram_errors", "Faults met while reading Engram rows, repaired ones included")
"""With the labels `rank` and `kind`."""

_FILE = re.compile(r"(?P<engine>\w+)-rank\d+-counters\.json")

_shared: dict[str, Any] = {}
"""Counters of prometheus_client that this process made: a name can be registered once."""


def counters_name(engine: str, rank: int) -> str:
    """Return the name of a rank's file."""
    return f"{engine}-rank{rank}-counters.json"


def counters_of(rows: HostRows) -> dict[str, Any]:
    """Return `counters`, as in the file. Raises RowError when the reader is closed."""
    found = rows.counters()
    native = next(iter(rows.tables.values())).store.native
    timed = None if native is None else native.reader.counters
    return {
        "num_lookups": 0 if timed is None else timed.num_decode_tickets,
        "wait_s": 0.0 if timed is None else timed.decode_us / 1e6,
        **found,
    }


class RankCounters:
    """Publishes one rank's counters whenever it is told to. Not for several threads at once."""

    def __init__(self, rows: HostRows, engine: str, directory: Path | None) -> None:
        """`directory` None: no file. Nothing is written yet."""
        self._rows = rows
        self._engine = engine
        self._directory = directory
        self._told: dict[tuple[str, str], float] = {}

    def publish(self) -> None:
        """Write the file, and count in the engine's shared metrics if it has such. Raises ContractError, RowError."""
        counters = counters_of(self._rows)
        if MULTIPROCESS_VARIABLE in os.environ:
            self._share(counters)
        if self._directory is not None:
            document = {
                "engine": self._engine,
                "rank": self._rows.rank,
                "world_size": self._rows.world_size,
                "counters": counters,
            }
            write_receipt(self._directory, counters_name(self._engine, self._rows.rank), document)

    def _share(self, counters: Mapping[str, Any]) -> None:
        rank = str(self._rows.rank)
        for key, (name, text) in METRICS.items():
            self._count(_shared_counter(name, text, ["rank"]).labels(rank), (name, ""), counters[key])
        for kind, count in counters["errors"].items():
            name, text = ERRORS
            labelled = _shared_counter(name, text, ["rank", "kind"]).labels(rank, kind)
            self._count(labelled, (name, kind), count)

    def _count(self, counter: Any, key: tuple[str, str], value: float) -> None:
        counter.inc(value - self._told.get(key, 0))
        self._told[key] = value


class FileCollector:
    """A collector of prometheus_client: the counters of all ranks of this machine, read from their files when asked."""

    def __init__(self, directory: Path, engine: str) -> None:
        self._directory = directory
        self._engine = engine

    def describe(self) -> list[Any]:
        """Nothing, so that registering it reads no file."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield a family per metric, with a sample per rank whose file is fresh."""
        core = importlib.import_module("prometheus_client.core")
        documents = list(read_counters(self._directory, self._engine))
        for key, (name, text) in METRICS.items():
            family = core.CounterMetricFamily(name, text, labels=["rank"])
            for document in documents:
                family.add_metric([str(document["rank"])], document["counters"][key])
            yield family
        family = core.CounterMetricFamily(*ERRORS, labels=["rank", "kind"])
        for document in documents:
            for kind, count in document["counters"]["errors"].items():
                family.add_metric([str(document["rank"]), kind], count)
        yield family


def read_counters(directory: Path, engine: str) -> Iterator[dict[str, Any]]:
    """Yield the documents of an engine's ranks on this machine, by name; stale ones are left out."""
    try:
        paths = sorted(directory.iterdir())
    except OSError:
        return
    for path in paths:
        match = _FILE.fullmatch(path.name)
        if match is None or match["engine"] != engine:
            continue
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # removed meanwhile, or none of ours: what is there is told
            continue
        if time.time() - document["written_unix_s"] < STALE_S:
            yield document


def _shared_counter(name: str, text: str, labels: list[str]) -> Any:
    if name not in _shared:
        _shared[name] = importlib.import_module("prometheus_client").Counter(name, text, labels)
    return _shared[name]


__all__ = [
    "ERRORS",
    "METRICS",
    "MULTIPROCESS_VARIABLE",
    "STALE_S",
    "FileCollector",
    "RankCounters",
    "counters_name",
    "counters_of",
    "read_counters",
]
