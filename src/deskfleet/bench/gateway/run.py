"""One measurement of what gateways add: the loads, and the turns in which the ways are measured.

Owns the loads and the order. Each round takes every load, and within it every way in an order that moves on by one each
round: none is always first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from deskfleet.bench.gateway.generator import Job, Outcome
from deskfleet.bench.gateway.processes import (
    LITELLM_INSTALL,
    Generator,
    Served,
    find_litellm,
    generating,
    litellm_version,
    module,
    starting,
    starting_litellm,
)
from deskfleet.bench.gateway.record import (
    DIRECT,
    FRONT,
    INSIDE,
    LITELLM,
    GatewayResult,
    GatewaySample,
    Load,
    Starts,
)
from deskfleet.bench.gateway.upstream import MODEL
from deskfleet.bench.provenance import Provenance
from deskfleet.errors import ConfigError, EngineError

PACES = {1: (0.005, 8), 32: (0.02, 25), 256: (0.05, 20)}
"""Seconds a token, and tokens an answer, by streams: what a good engine does with so many. Alone, answers are short:
each is one more time to the first token."""

_OTHER_PACE = (0.02, 25)
_STARTS: tuple[Starts, ...] = ("spread", "at once")
_LIMIT_S, _LIMIT_TIMES = 3.0, 2.0
_FLAT_OUT_LIMIT_S = 20.0
_FLAT_OUT_TOKENS_PER_S = 5_000
"""How many to ask for, by second of measurement. The slowest gateway must come to its end too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySuite:
    """What to measure. `front_command` is how our gateway is started in front of an upstream's address.

    `seconds` is about how long each measurement takes. Raises ConfigError for what cannot work.
    """

    checkpoint: Path
    front_command: Callable[[str], Sequence[str]]
    streams: tuple[int, ...] = (1, 32, 256)
    rounds: int = 5
    seconds: float = 3.0
    litellm: Path | None = None
    is_quick: bool = False
    """Measure only what targets are about; LiteLLM and many streams that start at once in the first round alone."""

    def __post_init__(self) -> None:
        if not self.streams or min(self.streams) < 1 or len(set(self.streams)) < len(self.streams):
            raise ConfigError(f"streams {self.streams} must be different numbers of 1 or more")
        if self.rounds < 1 or not self.seconds > 0:
            raise ConfigError(f"rounds {self.rounds} and seconds {self.seconds} must be more than 0")

    def takes_part(self, way: str, load: Load, number: int) -> bool:
        """Whether a way is measured under a load in a round. LiteLLM not where starts are spread: that is about us."""
        if way == LITELLM and load.starts == "spread":
            return False
        if not self.is_quick:
            return True
        if way == LITELLM:  # with more streams it falls behind a pace: its rate is seen flat out
            return number == 1 and (load.step_s == 0 or load.streams == min(self.streams))
        is_crowd = load.starts == "at once" and load.streams > 1 and load.step_s > 0
        return way != INSIDE and (number == 1 or not is_crowd)

    def loads(self) -> list[Load]:
        """Return every paced load, for more than one stream both with spread starts and at once, then flat out."""
        paced = [
            self._paced(streams, starts)
            for streams in self.streams
            for starts in (_STARTS if streams > 1 else _STARTS[-1:])
        ]
        flat = [
            Load(
                streams=streams,
                step_s=0,
                tokens=max(8, round(_FLAT_OUT_TOKENS_PER_S * self.seconds / streams)),
                requests=1,
            )
            for streams in self.streams
            if streams > 1
        ]
        return paced + flat

    def _paced(self, streams: int, starts: Starts) -> Load:
        step_s, tokens = PACES.get(streams, _OTHER_PACE)
        requests = max(2, round(self.seconds / (tokens * step_s)))
        return Load(streams=streams, step_s=step_s, tokens=tokens, requests=requests, starts=starts)


def _ignore(sample: GatewaySample) -> None:
    """Take a sample and do nothing."""


def measure_gateway(
    suite: GatewaySuite, provenance: Provenance, *, on_sample: Callable[[GatewaySample], None] = _ignore
) -> GatewayResult:
    """Run the suite. Raises EngineError when a process does not come up or ends, ConfigError for a wrong program."""
    program = find_litellm(suite.litellm)
    absent: dict[str, str] = {}
    versions: dict[str, str] = {}
    samples: list[GatewaySample] = []
    with ExitStack() as stack:
        # Each takes seconds to come up, LiteLLM longest: all do so at the same time.
        inside = None
        if suite.is_quick:
            absent[INSIDE] = "a quick run leaves it out"
        else:
            inside = stack.enter_context(starting(module("inside", str(suite.checkpoint))))
        upstream = stack.enter_context(starting(module("upstream", str(suite.checkpoint))))()
        litellm = None if program is None else stack.enter_context(starting_litellm(program, upstream.url))
        front = stack.enter_context(starting(suite.front_command(upstream.url)))
        generator = stack.enter_context(generating())
        ways = {DIRECT: upstream, FRONT: front()}
        paced = [upstream]
        if inside is not None:
            ways[INSIDE] = inside()
            paced.append(ways[INSIDE])
        if program is None or litellm is None:
            absent[LITELLM] = f"not installed here; {LITELLM_INSTALL}"
        else:
            try:
                ways[LITELLM] = litellm()
                versions["litellm"] = litellm_version(program)
            except EngineError as error:
                absent[LITELLM] = error.message
        _warm_up(generator, ways)
        for number in range(1, suite.rounds + 1):
            for load in suite.loads():
                _set_pace(load, *paced)
                for way in _turn(list(ways), number):
                    if not suite.takes_part(way, load, number):
                        continue
                    sample = _measure(generator, way, ways[way], load, number)
                    samples.append(sample)
                    on_sample(sample)
    settings: dict[str, str | int | float | None] = {
        "checkpoint": suite.checkpoint.resolve().name,
        "rounds": suite.rounds,
        "seconds": suite.seconds,
        **versions,
    }
    return GatewayResult(provenance=provenance, settings=settings, samples=tuple(samples), absent=absent)


def _warm_up(generator: Generator, ways: dict[str, Served]) -> None:
    """Ask everybody a few times, so that nothing is done for the first time later. Raises EngineError if one fails."""
    for way, served in ways.items():
        outcome = generator.run(
            Job(url=served.url, key=served.key, model=MODEL, streams=8, requests=3, tokens=16, spread_s=0.0)
        )
        if outcome.num_failed:
            raise EngineError(f"{way} does not answer: {outcome.failure}")


def _set_pace(load: Load, *paced: Served) -> None:
    for served in paced:
        served.set_step(load.step_s)


def _turn(ways: list[str], number: int) -> list[str]:
    return ways[number % len(ways) :] + ways[: number % len(ways)]


def _measure(generator: Generator, way: str, served: Served, load: Load, number: int) -> GatewaySample:
    job = Job(
        url=served.url,
        key=served.key,
        model=MODEL,
        streams=load.streams,
        requests=load.requests,
        tokens=load.tokens,
        spread_s=load.step_s * load.tokens,
        period_s=load.period_s,
        limit_s=_LIMIT_S + _LIMIT_TIMES * _nominal_s(load) if load.step_s else _FLAT_OUT_LIMIT_S,
    )
    before_s = served.cpu_s()
    outcome: Outcome = generator.run(job)
    return GatewaySample(
        way=way,
        load=load,
        round=number,
        ttft_ms=tuple(round(1000 * each, 3) for each in outcome.ttft_s),
        num_tokens=outcome.num_tokens,
        num_events=outcome.num_events,
        num_failed=outcome.num_failed,
        num_late=outcome.num_late,
        wall_s=outcome.wall_s,
        cpu_s=None if way == DIRECT else served.cpu_s() - before_s,
        client_cpu_s=outcome.cpu_s,
        is_cut=outcome.is_cut,
        failure=outcome.failure,
    )


def _nominal_s(load: Load) -> float:
    """How long a paced load takes when nothing slows it."""
    return load.step_s * load.tokens * (load.requests + 1)


__all__ = ["PACES", "GatewaySuite", "measure_gateway"]
