"""A file of torch's profiler as events. Owns the format: Chrome's trace JSON, packed with gzip or not.

Only complete events ("X") count. Times become seconds since the first of them. Knows nothing of what they mean.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deskfleet.errors import ConfigError

_DEVICE_KINDS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_RANK = re.compile(r"rank[-_]?(\d+)|tp[-_]?(\d+)", re.IGNORECASE)
_STEP = re.compile(r"ProfilerStep#\d+|step\[.*\]|execute_.*_\d+|deskfleet: step")


class _Raw(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str | None = None
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0


class _Distributed(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None


class _Document(msgspec.Struct):
    traceEvents: list[_Raw]
    distributedInfo: _Distributed | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that ran on `lane` from `begin_s` to `end_s`: a thread of the CPU, or a stream of the device."""

    name: str
    lane: str
    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Trace:
    """One rank. `device` are kernels and copies, `host` operators and named spans, both by time of beginning.

    `steps` are the spans in which a step ran; all of the trace where nothing names them. `main_lane` is the host's
    busiest thread. Spans that name steps are in neither list.
    """

    path: Path
    rank: int
    steps: tuple[Event, ...]
    device: tuple[Event, ...]
    host: tuple[Event, ...]
    main_lane: str

    @property
    def is_of_device(self) -> bool:
        """Whether a device was recorded: then its time is what a step takes."""
        return bool(self.device)


def read_trace(path: Path, *, number: int = 0) -> Trace:
    """Return the trace in a file. Its rank is what it says, or its name, or `number`.

    Raises ConfigError when it cannot be read or holds no events.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        document = msgspec.json.decode(data, type=_Document, strict=False)
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    raw = sorted((e for e in document.traceEvents if e.ph == "X"), key=lambda e: (e.ts, -e.dur))
    if not raw:
        raise ConfigError(f"{path} holds no complete events", hint="record it with torch.profiler")
    origin = raw[0].ts
    device, host, steps, seen_steps = [], [], [], set()
    for event in raw:
        begin_s = (event.ts - origin) / 1e6
        made = Event(event.name, str(event.tid), begin_s, begin_s + event.dur / 1e6)
        if _STEP.fullmatch(event.name):
            # The device's copy of the same span is longer or shorter by launches; the host's is the step.
            if event.cat != "gpu_user_annotation" and event.name not in seen_steps:
                seen_steps.add(event.name)
                steps.append(made)
        elif event.cat in _DEVICE_KINDS:
            device.append(made)
        elif event.cat in ("cpu_op", "user_annotation"):
            host.append(made)
    if not host and not device:
        raise ConfigError(f"{path} holds neither operators nor kernels")
    lanes = Counter(event.lane for event in host)
    everything = [*device, *host]
    if not steps:
        begin, end = min(e.begin_s for e in everything), max(e.end_s for e in everything)
        steps = [Event("all of the trace", "", begin, end)]
    return Trace(
        path=path,
        rank=_rank(document, path, number),
        steps=tuple(steps),
        device=tuple(device),
        host=tuple(host),
        main_lane=lanes.most_common(1)[0][0] if lanes else "",
    )


def read_traces(paths: list[Path]) -> list[Trace]:
    """Return all traces by rank. Raises ConfigError when two are of the same rank."""
    traces = [read_trace(path, number=number) for number, path in enumerate(paths)]
    by_rank = {trace.rank: trace for trace in traces}
    for trace in traces:
        if by_rank[trace.rank] is not trace:
            raise ConfigError(f"{trace.path} and {by_rank[trace.rank].path} are both of rank {trace.rank}")
    return sorted(traces, key=lambda trace: trace.rank)


def _rank(document: _Document, path: Path, number: int) -> int:
    told = document.distributedInfo
    if told is not None and told.rank is not None:
        return told.rank
    named = _RANK.search(path.name)
    return number if named is None else int(named[1] or named[2])


__all__ = ["Event", "Trace", "read_trace", "read_traces"]
