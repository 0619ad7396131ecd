"""A step's time by category. Owns how overlapping work is counted: every moment once, so that the sum is the step.

On a device: whatever computes has the moment, then collectives, then copies; nothing is idle. On a CPU: the innermost
operator of the main thread has it, then a collective that another thread runs for it, else it is idle: time between
operators is Python's. A collective that computing hides costs nothing, and is not shown as if it did.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deskfleet.bench.trace.categories import CATEGORIES, COLLECTIVE, IDLE, category_of
from deskfleet.bench.trace.read import Event, Trace

_ORDER = {"copies": 2, COLLECTIVE: 1}
"""Who gives way on a device: the higher number to the lower, everything else before both."""
_MAIN, _BESIDE = 0, 1
"""The same on a CPU: its main thread, and the threads that run collectives for it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One moment's owner. Segments of a step do not overlap; where none is, it is idle."""

    category: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepBudget:
    """One step of one rank. `by_category` adds up to `wall_s`; `gaps_s` are its idle stretches."""

    name: str
    wall_s: float
    by_category: dict[str, float]
    gaps_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel, or an operator's own time without what it calls."""

    name: str
    category: str
    count: int
    total_s: float

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count


def step_budgets(trace: Trace) -> list[StepBudget]:
    """Return every step's budget."""
    segments = _segments(trace)
    return [_budget(step, segments) for step in trace.steps]


def mean_budget(budgets: Sequence[StepBudget]) -> dict[str, float]:
    """Return the mean seconds of each category that occurs, in the order of CATEGORIES."""
    totals = {name: statistics.fmean(b.by_category.get(name, 0.0) for b in budgets) for name in CATEGORIES}
    return {name: seconds for name, seconds in totals.items() if seconds > 0}


def kernel_table(trace: Trace) -> list[KernelRow]:
    """Return kernels by total time within steps, longest first. Of a CPU's operators, their own time."""
    counts: defaultdict[str, int] = defaultdict(int)
    totals: defaultdict[str, float] = defaultdict(float)
    events: Sequence[Event] = trace.device if trace.is_of_device else _main(trace)
    for event in _within(trace, events):
        counts[event.name] += 1
    for piece in _within(trace, events if trace.is_of_device else flatten(events)):
        totals[piece.name] += piece.length_s
    rows = [
        KernelRow(name, category_of(name), counts[name], total)
        for name, total in totals.items()
        if counts[name]
    ]
    return sorted(rows, key=lambda row: -row.total_s)


def flatten(events: Sequence[Event]) -> list[Event]:
    """Return nested events of one thread as pieces that do not overlap, each of the innermost one's name.

    `events` are by beginning, the longer first. One that outlasts its parent by rounding is cut.
    """
    pieces: list[Event] = []
    stack: list[Event] = []
    at_s = 0.0

    def close(until_s: float) -> None:
        nonlocal at_s
        while stack and stack[-1].end_s <= until_s:
            done = stack.pop()
            if done.end_s > at_s:
                pieces.append(Event(done.name, done.lane, at_s, done.end_s))
                at_s = done.end_s

    for event in events:
        close(event.begin_s)
        if stack:
            if event.begin_s > at_s:
                pieces.append(Event(stack[-1].name, event.lane, at_s, event.begin_s))
            event = Event(event.name, event.lane, event.begin_s, min(event.end_s, stack[-1].end_s))
        at_s = event.begin_s
        stack.append(event)
    close(float("inf"))
    return pieces


def _main(trace: Trace) -> list[Event]:
    return [event for event in trace.host if event.lane == trace.main_lane]


def _segments(trace: Trace) -> list[Segment]:
    """Return who owns which moment, by time."""
    if trace.is_of_device:
        named = [(category_of(event.name), event) for event in trace.device]
        return _sweep([(_ORDER.get(category, 0), category, event) for category, event in named])
    owned = [(_MAIN, category_of(piece.name), piece) for piece in flatten(_main(trace))]
    others = [event for event in trace.host if event.lane != trace.main_lane]
    return _sweep([*owned, *((_BESIDE, COLLECTIVE, e) for e in others if category_of(e.name) == COLLECTIVE)])


def _sweep(owned: Sequence[tuple[int, str, Event]]) -> list[Segment]:
    """Resolve overlaps: at every moment the one of the lowest number that runs; the first to begin among equals."""
    edges = sorted(
        [(event.begin_s, 1, number) for number, (_, _, event) in enumerate(owned)]
        + [(event.end_s, 0, number) for number, (_, _, event) in enumerate(owned)]
    )
    running: dict[int, tuple[int, int]] = {}
    segments: list[Segment] = []
    last_s = 0.0
    for at_s, is_begin, number in edges:
        if running and at_s > last_s:
            winner = min(running, key=running.__getitem__)
            category = owned[winner][1]
            if segments and segments[-1].category == category and segments[-1].end_s == last_s:
                segments[-1] = Segment(category, segments[-1].begin_s, at_s)
            else:
                segments.append(Segment(category, last_s, at_s))
        last_s = at_s
        if is_begin:
            running[number] = (owned[number][0], number)
        else:
            running.pop(number, None)
    return segments


def _budget(step: Event, segments: Sequence[Segment]) -> StepBudget:
    totals: defaultdict[str, float] = defaultdict(float)
    gaps: list[float] = []
    at_s = step.begin_s
    for segment in segments:
        begin_s, end_s = max(segment.begin_s, step.begin_s), min(segment.end_s, step.end_s)
        if end_s <= begin_s:
            continue
        if begin_s > at_s:
            gaps.append(begin_s - at_s)
        totals[segment.category] += end_s - begin_s
        at_s = max(at_s, end_s)
    if step.end_s > at_s:
        gaps.append(step.end_s - at_s)
    totals[IDLE] += sum(gaps)
    return StepBudget(step.name, step.length_s, dict(totals), tuple(sorted(gaps, reverse=True)))


def _within(trace: Trace, events: Iterable[Event]) -> Iterator[Event]:
    """Yield those of the events whose middle lies in a step."""
    steps = sorted(trace.steps, key=lambda step: step.begin_s)
    begins = [step.begin_s for step in steps]
    for event in events:
        middle_s = (event.begin_s + event.end_s) / 2
        place = bisect.bisect_right(begins, middle_s) - 1
        if place >= 0 and middle_s < steps[place].end_s:
            yield event


__all__ = ["KernelRow", "Segment", "StepBudget", "flatten", "kernel_table", "mean_budget", "step_budgets"]
