"""Ranks beside each other: how long collectives take, who waits in them for whom, and who waits for Engram rows.

Owns the matching: the n-th collective of a name within the trace is the same one on every rank, whatever their clocks
say. The one that came last waited least: what others spent longer in the same collective, they waited.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deskfleet.bench.trace.categories import ENGRAM, category_of, is_collective
from deskfleet.bench.trace.read import Event, Trace


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One kind of collective on one rank: how many a step, and how long, in seconds."""

    rank: int
    name: str
    num_per_step: float
    p50_s: float
    p90_s: float
    p99_s: float
    longest_s: float
    total_per_step_s: float


@dataclass(frozen=True, slots=True)
class RankWaits:
    """What a rank waits in a step. `peers_s` in collectives for later ranks, None where they cannot be matched;
    `engram_s` for rows from its disk; `after_engram_s` in the collective after those, beyond the latest rank's."""

    rank: int
    peers_s: float | None
    engram_s: float
    after_engram_s: float | None


def collective_rows(traces: Sequence[Trace]) -> list[CollectiveRow]:
    """Return percentiles by rank and kind, the longest in total first."""
    rows = []
    for trace in traces:
        by_name: defaultdict[str, list[float]] = defaultdict(list)
        for event in _collectives(trace):
            by_name[event.name].append(event.length_s)
        for name, lengths in by_name.items():
            p50, p90, p99 = (float(value) for value in np.percentile(lengths, (50, 90, 99)))
            num_steps = len(trace.steps)
            rows.append(
                CollectiveRow(
                    rank=trace.rank,
                    name=name,
                    num_per_step=len(lengths) / num_steps,
                    p50_s=p50,
                    p90_s=p90,
                    p99_s=p99,
                    longest_s=max(lengths),
                    total_per_step_s=sum(lengths) / num_steps,
                )
            )
    return sorted(rows, key=lambda row: (row.rank, -row.total_per_step_s))


def rank_waits(traces: Sequence[Trace]) -> list[RankWaits]:
    """Return what every rank waits in a step, on average."""
    collectives = {trace.rank: _collectives(trace) for trace in traces}
    matched = _matched(collectives)
    found = []
    for trace in traces:
        waits = [e for e in _spans(trace) if category_of(e.name) == ENGRAM and "wait" in e.name.lower()]
        own = [matched[key][trace.rank] for key in matched]
        least = [min(event.length_s for event in matched[key].values()) for key in matched]
        num_steps = len(trace.steps)
        peers_s = after_s = None
        if matched:
            extra = [event.length_s - shortest for event, shortest in zip(own, least, strict=True)]
            peers_s = sum(extra) / num_steps
            followers = _following(waits, own)
            after_s = sum(extra[number] for number in followers) / num_steps if waits else 0.0
        engram_s = sum(event.length_s for event in waits) / num_steps
        found.append(RankWaits(trace.rank, peers_s, engram_s, after_s))
    return found


def _spans(trace: Trace) -> list[Event]:
    inside = [*trace.device, *trace.host] if trace.is_of_device else list(trace.host)
    return [event for event in inside if any(s.begin_s <= event.begin_s < s.end_s for s in trace.steps)]


def _collectives(trace: Trace) -> list[Event]:
    """Of a device its kernels, of a CPU what its threads ran; within steps, by time."""
    events = trace.device if trace.is_of_device else trace.host
    within = (e for e in events if any(s.begin_s <= e.begin_s < s.end_s for s in trace.steps))
    return sorted((event for event in within if is_collective(event.name)), key=lambda event: event.begin_s)


def _matched(collectives: dict[int, list[Event]]) -> dict[tuple[str, int], dict[int, Event]]:
    """Return the collectives that every rank has, keyed by name and number; none for a single rank.

    Matched within a name from the end: traces begin at different moments of the first step, and end together.
    """
    if len(collectives) < 2:
        return {}
    by_rank: dict[int, dict[str, list[Event]]] = {}
    for rank, events in collectives.items():
        names: defaultdict[str, list[Event]] = defaultdict(list)
        for event in events:
            names[event.name].append(event)
        by_rank[rank] = names
    common = set.intersection(*(set(names) for names in by_rank.values()))
    matched = {}
    for name in sorted(common):
        count = min(len(names[name]) for names in by_rank.values())
        for number in range(1, count + 1):
            matched[name, number] = {rank: names[name][-number] for rank, names in by_rank.items()}
    return matched


def _following(waits: Sequence[Event], own: Sequence[Event]) -> set[int]:
    """Return which of `own` is the first to begin after each wait."""
    order = sorted(range(len(own)), key=lambda number: own[number].begin_s)
    begins = [own[number].begin_s for number in order]
    found = set()
    for wait in waits:
        place = int(np.searchsorted(begins, wait.begin_s))
        if place < len(order):
            found.add(order[place])
    return found


__all__ = ["CollectiveRow", "RankWaits", "collective_rows", "rank_waits"]
