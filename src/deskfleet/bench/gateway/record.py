"""What a gateway adds, as data and as a file. Owns the schema, the ratios and the targets.

Ways are measured in turns within a round. Whatever disturbs the machine disturbs all of them, so that a ratio within a
round holds where a time does not; what is told is the median of the rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from deskfleet.bench.provenance import Provenance
from deskfleet.bench.result import Spread, write_new
from deskfleet.errors import ConfigError

NAME = "gateway"
SCHEMA = 1

DIRECT = "upstream alone"
FRONT = "deskfleet, upstream over HTTP"
INSIDE = "deskfleet, engine inside"
LITELLM = "LiteLLM"
WAYS = (DIRECT, FRONT, INSIDE, LITELLM)

ADDED_P50_MS = 1.0
KEPT_RATE = 0.95
TIMES_LITELLM = 10.0


Starts = Literal["at once", "spread"]
"""When a stream asks again. `at once`: when its answer has ended, which is at a step of the engine, together with the
others that end there and with everybody's tokens. `spread`: in its own turn of a period that is a little longer than
an answer takes, so that starts come evenly and at any moment of a step."""


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """So many streams, each token `step_s` after the one before; 0 is as fast as they come."""

    streams: int
    step_s: float
    tokens: int
    requests: int
    starts: Starts = "at once"

    @property
    def title(self) -> str:
        streams = "1 stream" if self.streams == 1 else f"{self.streams} streams"
        if self.step_s == 0:
            return f"{streams}, flat out"
        paced = f"{streams} at {1 / self.step_s:g} tokens/s each"
        return paced if self.starts == "at once" else f"{paced}, starts spread"

    @property
    def period_s(self) -> float:
        """How often each stream asks, where starts are spread: its first token comes at once, so a step is left."""
        return self.step_s * self.tokens if self.starts == "spread" else 0.0


class GatewaySample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One way under one load, once. `cpu_s` is what the gateway's process used, None where there is no gateway.

    `is_cut`: it took several times as long as the load does, and was ended; what came until then counts. `num_late`
    requests could not be sent in their turn, since the answer before them had not ended.
    """

    way: str
    load: Load
    round: int
    ttft_ms: tuple[float, ...]
    num_tokens: int
    num_events: int
    num_failed: int
    wall_s: float
    cpu_s: float | None
    client_cpu_s: float
    num_late: int = 0
    is_cut: bool = False
    failure: str | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float | None:
        """What a core of the gateway's could move."""
        return self.num_tokens / self.cpu_s if self.cpu_s else None

    def ttft(self, percent: float) -> float | None:
        """Return a percentile, in milliseconds; None where no request was timed."""
        return float(np.percentile(self.ttft_ms, percent)) if self.ttft_ms else None


class GatewayRow(msgspec.Struct, frozen=True, kw_only=True):
    """A way under a load, beside the upstream alone in the same rounds. `times_litellm` beside LiteLLM's rate."""

    way: str
    load: Load
    added_p50_ms: Spread | None
    added_p99_ms: Spread | None
    ttft_p50_ms: Spread | None
    tokens_per_s: Spread
    kept_rate: Spread | None
    tokens_per_cpu_s: Spread | None
    times_litellm: Spread | None
    times_litellm_per_cpu: Spread | None
    num_ttft: int
    num_failed: int
    num_cut: int
    num_late: int = 0


class Verdict(msgspec.Struct, frozen=True):
    """One target: what it asks, what was measured, and whether that is met. None where it was not measured."""

    target: str
    measured: float | None
    met: bool | None
    reason: str = ""


class GatewayResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run. `absent` says why a way was not measured, and how it can be."""

    provenance: Provenance
    settings: dict[str, str | int | float | None]
    samples: tuple[GatewaySample, ...]
    absent: dict[str, str] = {}
    name: str = NAME
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA or self.name != NAME:
            raise ConfigError(f"{self.name!r} of schema {self.schema} is no {NAME!r} of schema {SCHEMA}")
        if not self.samples:
            raise ConfigError("the measurement has no samples")

    def loads(self) -> list[Load]:
        """Return the loads, in the order in which they were measured."""
        return list(dict.fromkeys(sample.load for sample in self.samples))

    def ways(self) -> list[str]:
        """Return the ways that were measured."""
        return [way for way in WAYS if any(sample.way == way for sample in self.samples)]

    def rows(self) -> list[GatewayRow]:
        """Return a row for each load and way that was measured under it."""
        return [self._row(way, load) for load in self.loads() for way in self.ways() if self._of(way, load)]

    def _of(self, way: str, load: Load) -> dict[int, GatewaySample]:
        return {s.round: s for s in self.samples if (s.way, s.load) == (way, load)}

    def _row(self, way: str, load: Load) -> GatewayRow:
        own, direct, other = self._of(way, load), self._of(DIRECT, load), self._of(LITELLM, load)
        is_added = way != DIRECT
        has_other = bool(other) and way in (FRONT, INSIDE)

        def beside(others: dict[int, GatewaySample]) -> list[tuple[GatewaySample, GatewaySample]]:
            # What was cut had more to send than came: its rate is no measure of anything.
            return [
                (sample, others[number])
                for number, sample in own.items()
                if number in others and not others[number].is_cut and others[number].num_tokens
            ]

        per_cpu = [s.tokens_per_cpu_s for s in own.values() if s.tokens_per_cpu_s is not None]
        per_cpu_ratio = [
            a.tokens_per_cpu_s / b.tokens_per_cpu_s
            for a, b in beside(other)
            if a.tokens_per_cpu_s and b.tokens_per_cpu_s
        ]
        return GatewayRow(
            way=way,
            load=load,
            added_p50_ms=_added(beside(direct), 50) if is_added else None,
            added_p99_ms=_added(beside(direct), 99) if is_added else None,
            ttft_p50_ms=_spread(value for s in own.values() if (value := s.ttft(50)) is not None),
            tokens_per_s=Spread.of(s.tokens_per_s for s in own.values()),
            kept_rate=_spread(a.tokens_per_s / b.tokens_per_s for a, b in beside(direct))
            if is_added
            else None,
            tokens_per_cpu_s=_spread(per_cpu),
            times_litellm=_spread(a.tokens_per_s / b.tokens_per_s for a, b in beside(other))
            if has_other
            else None,
            times_litellm_per_cpu=_spread(per_cpu_ratio) if has_other else None,
            num_ttft=sum(len(s.ttft_ms) for s in own.values()),
            num_failed=sum(s.num_failed for s in own.values()),
            num_cut=sum(s.is_cut for s in own.values()),
            num_late=sum(s.num_late for s in own.values()),
        )

    def verdicts(self) -> list[Verdict]:
        """Hold our gateway in front of the upstream against the targets: at each paced load, and flat out.

        The time to the first token is judged where starts are spread, if that was measured for so many streams: where
        many start at once it is that of a queue, and shown as such.
        """
        found = []
        spread = {load.streams for load in self.loads() if load.starts == "spread"}
        for row in self.rows():
            if row.way != FRONT:
                continue
            if row.load.step_s:
                if row.load.starts == "spread" or row.load.streams not in spread:
                    target = f"{row.load.title}: added TTFT p50, ms, below"
                    found.append(_verdict(target, row.added_p50_ms, ADDED_P50_MS, -1))
                found.append(
                    _verdict(f"{row.load.title}: of the upstream's rate, at least", row.kept_rate, KEPT_RATE)
                )
            else:
                other = self._of(LITELLM, row.load).values()
                cut = "LiteLLM took too long and was cut" if any(s.is_cut for s in other) else ""
                absent = self.absent.get(LITELLM, cut)
                target = f"{row.load.title}: times LiteLLM's rate, at least"
                found.append(_verdict(target, row.times_litellm, TIMES_LITELLM, reason=absent))
        return found

    def write(self, path: Path) -> None:
        """Write the file at `path`. Raises ConfigError when there is one already, or it cannot be written."""
        write_new(path, self)

    @classmethod
    def read(cls, path: Path) -> GatewayResult:
        """Return the result in a file. Raises ConfigError when it is none."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"cannot read the result {path}: {error}") from error


def is_gateway_result(path: Path) -> bool:
    """Say whether a file of bench/results is one of these, by its name."""
    return f"-{NAME}" in path.name


def _spread(values: Iterable[float]) -> Spread | None:
    known = list(values)
    return Spread.of(known) if known else None


def _added(pairs: Iterable[tuple[GatewaySample, GatewaySample]], percent: float) -> Spread | None:
    """How much more a way's percentile is than the other's in the same round."""
    both = ((sample.ttft(percent), other.ttft(percent)) for sample, other in pairs)
    return _spread(one - other for one, other in both if one is not None and other is not None)


def _verdict(target: str, spread: Spread | None, limit: float, sign: int = 1, *, reason: str = "") -> Verdict:
    text = f"{target} {limit:g}"
    if spread is None:
        return Verdict(text, None, None, reason or "not measured")
    return Verdict(text, spread.median, sign * (spread.median - limit) >= 0)


__all__ = [
    "DIRECT",
    "FRONT",
    "INSIDE",
    "LITELLM",
    "NAME",
    "WAYS",
    "GatewayResult",
    "GatewayRow",
    "GatewaySample",
    "Load",
    "Starts",
    "Verdict",
    "is_gateway_result",
]
