"""Engram rows that engines elsewhere read through our adapters: what each rank counted, for GET /metrics.

Owns where the numbers come from: an engine's own Prometheus text has those of ranks on its machine, and for ranks on
others there are the files that they write (`deskfleet_engram.host_metrics` owns names and keys of both), brought into a
directory of this machine by whoever can. Both are counted from a rank's start. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from deskfleet_engram.host_metrics import ERRORS, METRICS, read_counters

_PREFIX = b"deskfleet_engram_"
_NAMES = {name: key for key, (name, _) in METRICS.items()}
_LABELS = ("upstream", "rank")


@dataclass(frozen=True, slots=True)
class RankRows:
    """One rank of the engine at `upstream`: `counters` by their key in METRICS, `errors` by kind."""

    upstream: str
    rank: str
    counters: Mapping[str, float]
    errors: Mapping[str, float]


@runtime_checkable
class CountsRows(Protocol):
    """An engine that may tell of rows, beside what `TokenEngine` asks of it."""

    @property
    def rows(self) -> Sequence[RankRows]:
        """What its ranks had counted when they were last asked; empty where no adapter is at work."""


def rows_of(engine: object) -> Sequence[RankRows]:
    """Return what `engine` tells of rows, if it is one that does."""
    return engine.rows if isinstance(engine, CountsRows) else ()


def read_exposed(text: bytes, upstream: str) -> tuple[RankRows, ...]:
    """Return the ranks of which an engine's Prometheus text tells. Raises ValueError for other text."""
    lines = [line for line in text.splitlines() if line.startswith((_PREFIX, b"# TYPE " + _PREFIX))]
    counters: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(b"\n".join(lines).decode()):
        for sample in family.samples:
            name, rank = sample.name.removesuffix("_total"), sample.labels.get("rank")
            if rank is None or sample.name.endswith("_created"):
                continue
            if name in _NAMES:
                counters.setdefault(rank, {})[_NAMES[name]] = sample.value
            elif name == ERRORS[0]:
                errors.setdefault(rank, {})[sample.labels.get("kind", "")] = sample.value
    return tuple(RankRows(upstream, rank, counters[rank], errors.get(rank, {})) for rank in sorted(counters))


def read_files(directory: Path, upstream: str, known: Sequence[RankRows]) -> tuple[RankRows, ...]:
    """Return the ranks of the engine at `upstream` that have a fresh file in `directory` and are not `known`."""
    told = {each.rank for each in known}
    found = [
        RankRows(upstream, str(each["rank"]), each["counters"], each["counters"]["errors"])
        for engine in ("vllm", "sglang")
        for each in read_counters(directory, engine)
    ]
    return tuple(each for each in found if each.rank not in told)


def row_families(ranks: Sequence[RankRows]) -> Iterator[Metric]:
    """The metrics, named as those of our own engine, with a sample for every rank."""
    for key, (name, text) in METRICS.items():
        family = CounterMetricFamily(name, text, labels=_LABELS)
        for each in ranks:
            if key in each.counters:
                family.add_metric((each.upstream, each.rank), each.counters[key])
        yield family
    family = CounterMetricFamily(*ERRORS, labels=(*_LABELS, "kind"))
    for each in ranks:
        for kind, count in each.errors.items():
            family.add_metric((each.upstream, each.rank, kind), count)
    yield family


__all__ = ["CountsRows", "RankRows", "read_exposed", "read_files", "row_families", "rows_of"]
