"""What the samples say: a table of rates, and ratios with their targets.

Ratios are taken within a round and the median round counts: on a shared machine only what ran side by side compares.
A ratio that could not be measured says why. Knows nothing of how samples are made.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from deskfleet_engram.bench.measure import BATCHES, Sample

METHODS = ("native", "direct96", "preadv32", "memmap")
SMALL_BATCHES = (6, 36, 48)
RATE_TARGETS = {48: 0.80, 192: 0.90, 384: 0.95}
_CPU_FACTOR, _CPU_EXTRA_S = 1.2, 0.5e-6

Sense = Literal[">=", "<="]
Percentile = Literal["p50_us", "p99_us"]
_PERCENTILES: tuple[Percentile, ...] = ("p50_us", "p99_us")


class Samples:
    """Samples by kind, method, batch and round."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by: dict[tuple[str, str, int], dict[int, Sample]] = {}
        for sample in samples:
            batch = sample.batch if sample.kind in ("batch", "warm", "stream") else 0
            self._by.setdefault((sample.kind, sample.method, batch), {})[sample.round] = sample

    def of(self, kind: str, method: str, batch: int = 0) -> dict[int, Sample]:
        """Return the samples by round."""
        return self._by.get((kind, method, batch), {})

    def values(self, value: Callable[[Samples, int], float]) -> list[float]:
        """Return `value` of every round in which it finds what it needs."""
        rounds = {number for found in self._by.values() for number in found}
        values = []
        for number in sorted(rounds):
            try:
                values.append(value(self, number))
            except KeyError:
                continue
        return values

    def median(self, value: Callable[[Samples, int], float]) -> float | None:
        """Return the median over rounds, of those in which `value` finds what it needs."""
        values = self.values(value)
        return statistics.median(values) if values else None


def rate(sample: Sample) -> float:
    """Return rows per second."""
    return sample.num_rows / sample.elapsed_s


def reads_rate(sample: Sample) -> float:
    """Return reads of the disk per second."""
    return sample.num_reads / sample.elapsed_s


def cpu_per_read_s(sample: Sample) -> float:
    """Return CPU seconds per read of the disk, or per row where reads are not counted."""
    return sample.cpu_s / (sample.num_reads or sample.num_rows)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One ratio: of a round's samples, with what it should be. `value` raises KeyError where a sample is missing."""

    name: str
    meaning: str
    sense: Sense
    target: float
    value: Callable[[Samples, int], float]


def ratios(samples: Sequence[Sample], no_fio: str | None) -> dict[str, dict[str, Any]]:
    """Return every ratio by name: value, target, met, meaning; where there is no value, `reason`: `no_fio` or other."""
    by = Samples(samples)
    found: dict[str, dict[str, Any]] = {}
    for ratio in RATIOS:
        measured = by.median(ratio.value)
        reached = None
        if measured is not None:
            reached = measured >= ratio.target if ratio.sense == ">=" else measured <= ratio.target
        found[ratio.name] = {
            "value": None if measured is None else round(measured, 3),
            "target": f"{ratio.sense} {ratio.target:g}",
            "met": reached,
            "meaning": ratio.meaning,
        }
        if measured is None:
            found[ratio.name]["reason"] = no_fio if no_fio and "fio" in ratio.name else "not measured"
    return found


def fio_for_native(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with fio's batches and prefills in the place of the reader's: what a ratio would be if the
    reader were fio, which neither knows rows nor checks them."""
    num_rows = {
        (s.kind, s.batch, s.round): s.num_rows / s.num_reads
        for s in samples
        if s.method == "native" and s.num_reads
    }
    stand_ins = [
        replace(s, method="native", num_rows=round(s.num_reads * num_rows[s.kind, s.batch, s.round]))
        for s in samples
        if s.method == "fio" and (s.kind, s.batch, s.round) in num_rows
    ]
    return [s for s in samples if s.method != "native"] + stand_ins


def _rate_to_fio(kind: str, batch: int, fio_kind: str) -> Callable[[Samples, int], float]:
    """Reads per second beside fio's. Batches read every row by itself, so there rows and reads are one."""

    def value(by: Samples, number: int) -> float:
        return reads_rate(by.of(kind, "native", batch)[number]) / reads_rate(
            by.of(fio_kind, "fio", batch)[number]
        )

    return value


def _rate_to(kind: str, method: str) -> Callable[[Samples, int], float]:
    def value(by: Samples, number: int) -> float:
        return rate(by.of(kind, "native")[number]) / rate(by.of(kind, method)[number])

    return value


def _latency(
    percentile: Percentile, over: tuple[str, str, int], under: tuple[str, str, int]
) -> Callable[[Samples, int], float]:
    """A percentile of one (kind, method, batch) divided by that of another."""

    def value(by: Samples, number: int) -> float:
        found = [getattr(by.of(*which)[number], percentile) for which in (over, under)]
        if None in found:
            raise KeyError(percentile)
        return float(found[0] / found[1])

    return value


def _cpu_to_fio(kind: str, batch: int) -> Callable[[Samples, int], float]:
    def value(by: Samples, number: int) -> float:
        ours, fio = (cpu_per_read_s(by.of(kind, method, batch)[number]) for method in ("native", "fio"))
        return ours / (_CPU_FACTOR * fio + _CPU_EXTRA_S)

    return value


def _best_to_direct96(by: Samples, number: int) -> float:
    pair = ("batch", "direct96", 48), ("batch", "native", 48)
    return max(_latency("p50_us", *pair)(by, number), _latency("p99_us", *pair)(by, number))


def _hash_seconds(by: Samples, number: int) -> float:
    sample = by.of("hash", "native")[number]
    return sample.cpu_s / sample.num_rows * 1e6


def _pack_to_dd(by: Samples, number: int) -> float:
    copied = by.of("copy", "dd")[number].elapsed_s + by.of("read back", "dd")[number].elapsed_s
    return copied / by.of("pack", "native")[number].elapsed_s


def _pack_column_to_dd(by: Samples, number: int) -> float:
    packed, checked = (by.of(f"{verb} column", "native")[number].elapsed_s for verb in ("pack", "check"))
    return by.of("copy column", "dd")[number].elapsed_s / (packed - checked)


RATIOS: tuple[Ratio, ...] = (
    Ratio(
        "prefill_rate_ratio_to_fio",
        "unique blocks read per second in a prefill, beside fio reading as many blocks at the same depth",
        ">=",
        0.95,
        _rate_to_fio("prefill", 0, "prefill"),
    ),
    *(
        Ratio(
            f"batch_{batch}_rate_ratio_to_fio",
            f"rows per second in batches of {batch}, beside fio's batches of {batch} reads",
            ">=",
            target,
            _rate_to_fio("batch", batch, "batch"),
        )
        for batch, target in RATE_TARGETS.items()
    ),
    *(
        Ratio(
            f"batch_{batch}_rate_ratio_to_fio_streaming",
            f"rows per second in batches of {batch}, beside fio with as many reads (256 at most) always at the device",
            ">=",
            target,
            _rate_to_fio("batch", batch, "stream"),
        )
        for batch, target in RATE_TARGETS.items()
    ),
    *(
        Ratio(
            f"batch_{batch}_p50_ratio_to_fio",
            f"median latency of {batch} rows, beside that of fio's batches",
            "<=",
            1.5,
            _latency("p50_us", ("batch", "native", batch), ("batch", "fio", batch)),
        )
        for batch in SMALL_BATCHES
    ),
    *(
        Ratio(
            f"{kind if kind == 'prefill' else f'batch_{batch}'}_cpu_ratio_to_fio_allowance",
            "CPU time per read, checksum and copy included, beside 1.2 x fio's + 0.5 us",
            "<=",
            1.0,
            _cpu_to_fio(kind, batch),
        )
        for kind, batch in (*(("batch", batch) for batch in BATCHES), ("prefill", 0))
    ),
    *(
        Ratio(
            f"batch_48_{percentile[:3]}_ratio_to_direct96",
            f"{percentile[:3]} of 96 threads with direct reads beside ours, 48 rows",
            ">=",
            3.0,
            _latency(percentile, ("batch", "direct96", 48), ("batch", "native", 48)),
        )
        for percentile in _PERCENTILES
    ),
    Ratio(
        "batch_48_best_ratio_to_direct96",
        "latency of 96 threads with direct reads beside ours, 48 rows: the better of p50 and p99",
        ">=",
        3.0,
        _best_to_direct96,
    ),
    Ratio(
        "batch_48_p50_ratio_to_preadv32",
        "median latency of 32 Python threads with preadv beside ours, 48 rows, page cache emptied",
        ">=",
        7.0,
        _latency("p50_us", ("batch", "preadv32", 48), ("batch", "native", 48)),
    ),
    Ratio(
        "prefill_rate_ratio_to_preadv32",
        "rows per second of a prefill beside 32 Python threads with preadv, page cache emptied",
        ">=",
        7.0,
        _rate_to("prefill", "preadv32"),
    ),
    Ratio(
        "decode_p99_ratio_with_prefetch",
        "99th percentile of 48 rows while a prefetch runs, beside the same alone",
        "<=",
        1.5,
        _latency("p99_us", ("mixed", "native", 0), ("alone", "native", 0)),
    ),
    Ratio(
        "hash_ratio_to_second",
        "CPU seconds for the row ids of a million tokens, both published layers, one thread",
        "<=",
        1.0,
        _hash_seconds,
    ),
    Ratio(
        "pack_ratio_to_dd",
        "time of dd copying as many bytes and reading its copy back, beside packing with its reading back",
        ">=",
        0.9,
        _pack_to_dd,
    ),
    Ratio(
        "pack_without_read_back_ratio_to_dd",
        "time of dd copying as many bytes, beside packing one column less its reading back",
        ">=",
        0.9,
        _pack_column_to_dd,
    ),
)


def rates(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return a row per kind, batch and method: medians over rounds of rate, p50, p99 and CPU time per row."""
    by = Samples(samples)
    table = []
    for kind in ("batch", "stream", "warm", "prefill", "alone", "mixed"):
        for batch in (0,) if kind in ("prefill", "alone", "mixed") else BATCHES:
            for method in (*METHODS, "fio"):
                found = list(by.of(kind, method, batch).values())
                if not found:
                    continue
                table.append(
                    {
                        "kind": kind,
                        "batch": found[0].batch,
                        "method": method,
                        "rows_per_s": round(statistics.median(map(rate, found))),
                        "reads_per_s": round(statistics.median(map(reads_rate, found))),
                        "p50_us": _median(sample.p50_us for sample in found),
                        "p99_us": _median(sample.p99_us for sample in found),
                        "cpu_us_per_row": round(
                            1e6 * statistics.median(sample.cpu_s / sample.num_rows for sample in found), 2
                        ),
                        "cpu_us_per_read": round(1e6 * statistics.median(map(cpu_per_read_s, found)), 2),
                    }
                )
    return table


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 1) if known else None


__all__ = [
    "METHODS",
    "RATIOS",
    "Ratio",
    "Samples",
    "cpu_per_read_s",
    "fio_for_native",
    "rate",
    "rates",
    "ratios",
    "reads_rate",
]
