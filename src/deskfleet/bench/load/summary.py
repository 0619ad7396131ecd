"""What the samples of a row come to: percentiles of times, spreads of rates. Knows no layout of tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from deskfleet.bench.load.record import Batch, Condition, LoadResult, Setup
from deskfleet.bench.result import Spread


class Percentiles(msgspec.Struct, frozen=True):
    """Of some times, in milliseconds, with linear interpolation."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    mean_ms: float
    std_ms: float
    num_samples: int

    @classmethod
    def of(cls, values_s: Iterable[float | None]) -> Percentiles | None:
        """Return those of the values that are known; None where none is."""
        known = 1000 * np.array([value for value in values_s if value is not None])
        if not known.size:
            return None
        p50, p90, p99 = (float(value) for value in np.percentile(known, (50, 90, 99)))
        return cls(p50, p90, p99, float(known.mean()), float(known.std()), int(known.size))


class RowSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One row. Rates are spreads over batches (aggregate, prefill) or over streams. `batches` counts those believed."""

    setup: Setup
    num_batches: int
    num_streams: int
    num_tokens: int
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    latency: Percentiles | None
    stream_tok_s: Spread | None
    aggregate_tok_s: Spread | None
    prefill_tok_s: Spread | None
    prompt_tokens: Spread | None
    acceptance: float | None
    tokens_per_step: float | None
    low_water_bytes: dict[str, int]
    refusals: tuple[str, ...]
    labels: tuple[str, ...]


def summarise(result: LoadResult) -> list[RowSummary]:
    """Return a summary of every row; one whose batches were all refused has no numbers."""
    return [_row(result, setup) for setup in result.setups()]


def _row(result: LoadResult, setup: Setup) -> RowSummary:
    all_batches = [batch for batch in result.batches if batch.setup == setup]
    batches = result.of(setup)
    streams = [stream for batch in batches for stream in batch.answered]
    return RowSummary(
        setup=setup,
        num_batches=len(batches),
        num_streams=len(streams),
        num_tokens=sum(stream.num_completion_tokens for stream in streams),
        ttft=Percentiles.of(stream.ttft_s for stream in streams),
        tpot=Percentiles.of(stream.tpot_s for stream in streams),
        itl=Percentiles.of(gap for stream in streams for gap in stream.gaps_s),
        latency=Percentiles.of(stream.latency_s for stream in streams),
        stream_tok_s=_spread(stream.tok_s for stream in streams),
        aggregate_tok_s=_spread(batch.aggregate_tok_s for batch in batches),
        prefill_tok_s=_spread(batch.prefill_tok_s for batch in batches) if setup.part == "prefill" else None,
        prompt_tokens=_spread(float(stream.num_prompt_tokens) for stream in streams),
        acceptance=_share(batches, "num_accepted", "num_drafted"),
        tokens_per_step=None
        if (accepted := _share(batches, "num_accepted", "num_verify_steps")) is None
        else 1 + accepted,
        low_water_bytes=_low_water(batches),
        refusals=_kinds(caveat.kind for batch in all_batches for caveat in batch.refusals),
        labels=_kinds(caveat.kind for batch in batches for caveat in batch.labels),
    )


def as_json(result: LoadResult) -> dict[str, Any]:
    """Return the summary for programs: rows, conditions, and what was refused, labelled or left out."""
    conditions: dict[str, Condition] = dict(result.conditions)
    return {
        "rows": [msgspec.to_builtins(row) for row in summarise(result)],
        "conditions": conditions,
        "labels": [msgspec.to_builtins(label) for label in result.all_labels()],
        "refusals": [
            {"row": setup.title, **msgspec.to_builtins(caveat)} for setup, caveat in result.refusals()
        ],
        "skipped": list(result.skipped),
    }


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread.of(known) if known else None


def _share(batches: Sequence[Batch], part: str, whole: str) -> float | None:
    counts = [(getattr(batch.server, part), getattr(batch.server, whole)) for batch in batches]
    known = [(some, all_) for some, all_ in counts if some is not None and all_]
    return sum(some for some, _ in known) / sum(all_ for _, all_ in known) if known else None


def _low_water(batches: Sequence[Batch]) -> dict[str, int]:
    lowest: dict[str, int] = {}
    for batch in batches:
        for node, available_bytes in batch.low_water_bytes.items():
            lowest[node] = min(available_bytes, lowest.get(node, available_bytes))
    return lowest


def _kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(kinds)))


__all__ = ["Percentiles", "RowSummary", "as_json", "summarise"]
