"""Any result file as series of raw samples under conditions, so that two files can be compared.

Owns what of each kind of result is a series, what is a condition that must be equal, and what is only told. Samples
that were taken together are one cluster: what disturbs one disturbs all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deskfleet.bench.load.record import NAME as LOAD
from deskfleet.bench.load.record import Condition, LoadResult
from deskfleet.bench.provenance import Provenance
from deskfleet.bench.result import Result
from deskfleet.bench.serving import PREFIX, SPECULATION, WaysResult
from deskfleet.errors import ConfigError

_UNESSENTIAL = frozenset({"rounds"})


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one quantity, by cluster: a round, or a batch."""

    name: str
    unit: str
    higher_is_better: bool
    clusters: tuple[tuple[float, ...], ...]

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(value for cluster in self.clusters for value in cluster)


@dataclass(frozen=True, slots=True)
class Comparable:
    """A result as it is compared. `refused` are series that the file holds but nobody may use."""

    path: Path
    kind: str
    provenance: Provenance
    conditions: dict[str, Condition]
    series: tuple[Series, ...]
    refused: tuple[str, ...] = ()


class _Named(msgspec.Struct):
    name: str


def read_comparable(path: Path) -> Comparable:
    """Return the result in a file. Raises ConfigError when it is none, or of a kind that has no series."""
    try:
        name = msgspec.json.decode(path.read_bytes(), type=_Named).name
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read the result {path}: {error}") from error
    if name == LOAD:
        return _of_load(path, LoadResult.read(path))
    if name in (PREFIX, SPECULATION):
        return _of_ways(path, WaysResult.read(path))
    if name == "cpu-decode":
        return _of_engine(path, Result.read(path))
    raise ConfigError(
        f"{path} holds {name!r}, which cannot be compared",
        hint="its own page shows its ratios, made side by side",
    )


def _of_load(path: Path, result: LoadResult) -> Comparable:
    series = []
    for setup in result.setups():
        batches, title = result.of(setup), setup.title
        if not batches:
            continue
        streams = [batch.answered for batch in batches]
        if setup.part == "prefill":
            series.append(_series(title, "prefill tok/s", [[b.prefill_tok_s] for b in batches]))
        else:
            series.append(_series(title, "tok/s per stream", [[s.tok_s for s in each] for each in streams]))
            series.append(_series(title, "tok/s aggregate", [[b.aggregate_tok_s] for b in batches]))
            ms = [[_ms(s.tpot_s) for s in each] for each in streams]
            series.append(_series(title, "TPOT ms", ms, higher_is_better=False))
        ms = [[_ms(s.ttft_s) for s in each] for each in streams]
        series.append(_series(title, "TTFT ms", ms, higher_is_better=False))
    refused = tuple(f"{setup.title}: {caveat.kind}" for setup, caveat in result.refusals())
    labels = ",".join(sorted(label.kind for label in result.all_labels() if label.kind in _DECIDING))
    conditions = {**result.conditions, **({"labels": labels} if labels else {})}
    return Comparable(
        path, LOAD, result.provenance, conditions, tuple(each for each in series if each.values), refused
    )


_DECIDING = frozenset({"filler", "client-on-server", "cached", "shared-prefix", "repetitive-prompt"})
"""Labels that make another measurement of it, not only a worse one."""


def _of_ways(path: Path, result: WaysResult) -> Comparable:
    series = [
        Series(
            f"{result.name}, {way}",
            "tok/s" if result.name == SPECULATION else "ms",
            result.name == SPECULATION,
            tuple(
                ((sample.tok_s if result.name == SPECULATION else 1000 * sample.seconds_s),)
                for sample in result.samples
                if sample.way == way
            ),
        )
        for way in result.ways()
    ]
    return Comparable(path, result.name, result.provenance, _essential(result.settings), tuple(series))


def _of_engine(path: Path, result: Result) -> Comparable:
    series = []
    for tp_size, batch in result.configurations():
        samples = [s for s in result.samples if (s.tp_size, s.batch) == (tp_size, batch)]
        title = f"TP {tp_size}, batch {batch}"
        series.append(_series(title, "tok/s aggregate", [[s.aggregate_tok_s] for s in samples]))
        series.append(_series(title, "tok/s per stream", [s.stream_tok_s for s in samples]))
    return Comparable(path, result.name, result.provenance, _essential(result.settings), tuple(series))


def _essential(settings: dict[str, str | int | float | None]) -> dict[str, Condition]:
    return {name: value for name, value in settings.items() if name not in _UNESSENTIAL}


def _series(
    title: str, unit: str, clusters: Iterable[Iterable[float | None]], *, higher_is_better: bool = True
) -> Series:
    known = (tuple(value for value in cluster if value is not None) for cluster in clusters)
    return Series(title, unit, higher_is_better, tuple(cluster for cluster in known if cluster))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


__all__ = ["Comparable", "Series", "read_comparable"]
