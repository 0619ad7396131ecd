"""What the prefix cache and speculation are worth: one piece of work done several ways, in interleaved rounds.

Every way has an engine of its own; all run at once and take turns, so that ratios within a round hold on a busy machine
too. The first round is warm-up. Owns the schema of these results. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from deskfleet.bench.provenance import Provenance
from deskfleet.bench.result import Spread, write_new
from deskfleet.endpoint import EngineStats, GenerateRequest, SamplingParams
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.errors import ConfigError, EngineError
from deskfleet.gateway.chat_format import ChatFormat
from deskfleet.model.cache_formats import CacheFormats
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.embedded import embedded_name

PREFIX, SPECULATION = "prefix-ttft", "speculation"
SCHEMA = 1


class WaySample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The work done once, in one way: `num_tokens` came out in `seconds_s`. `counts` are the engine's meanwhile."""

    way: str
    round: int
    num_tokens: int
    seconds_s: float
    counts: dict[str, int]

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.seconds_s


class WaysResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One measurement. The first way is what the others are compared with; `warm_up` is kept but not summarised."""

    name: str
    provenance: Provenance
    settings: dict[str, str | int | float | None]
    warm_up: tuple[WaySample, ...]
    samples: tuple[WaySample, ...]
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA or self.name not in (PREFIX, SPECULATION):
            raise ConfigError(f"{self.name!r} of schema {self.schema} is no measurement known here")
        if not self.samples:
            raise ConfigError(f"the measurement {self.name!r} has no samples")

    def ways(self) -> list[str]:
        """Return the ways in the order in which they took turns."""
        return list(dict.fromkeys(sample.way for sample in self.samples))

    def milliseconds(self, way: str) -> Spread:
        """Return the spread of the time that the work took, in milliseconds."""
        return Spread.of(1000 * sample.seconds_s for sample in self._of(way))

    def rate(self, way: str) -> Spread:
        """Return the spread of tokens per second."""
        return Spread.of(sample.tok_s for sample in self._of(way))

    def speedup(self, way: str) -> Spread:
        """Return the spread, over rounds, of how many times the first way's rate this one has in the same round."""
        first = {sample.round: sample.tok_s for sample in self._of(self.ways()[0])}
        return Spread.of(sample.tok_s / first[sample.round] for sample in self._of(way))

    def mean(self, way: str, count: str) -> float:
        """Return the mean of one of the counts over rounds."""
        return statistics.mean(sample.counts[count] for sample in self._of(way))

    def _of(self, way: str) -> list[WaySample]:
        return [sample for sample in self.samples if sample.way == way]

    def write(self, path: Path) -> None:
        """Write the file at `path`. Raises ConfigError when there is one already, or it cannot be written."""
        write_new(path, self)

    @classmethod
    def read(cls, path: Path) -> WaysResult:
        """Return the result in a file. Raises ConfigError when it is none."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"cannot read the result {path}: {error}") from error


def is_ways_result(path: Path) -> bool:
    """Say whether a file of bench/results is one of these, by its name."""
    return any(f"-{name}" in path.name for name in (PREFIX, SPECULATION))


@dataclass(frozen=True, slots=True)
class PrefixSuite:
    """What to measure. A session of `num_prompt_tokens` returns with `num_turn_tokens` more."""

    checkpoint: Path
    num_prompt_tokens: int = 1024
    num_turn_tokens: int = 32
    rounds: int = 3
    threads_per_rank: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "num_prompt_tokens", "num_turn_tokens", "rounds")


@dataclass(frozen=True, slots=True)
class SpeculationSuite:
    """What to measure. `num_tokens` are generated greedily after a prompt of `num_prompt_tokens`, with each number of
    drafts; 0 is off and comes first.

    With `questions`, each round asks the next of them as a chat without thinking instead, and `num_tokens` is the most
    that an answer may have: what a trained checkpoint was made for, where random tokens are not.
    """

    checkpoint: Path
    num_drafts: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    num_tokens: int = 32
    num_prompt_tokens: int = 32
    questions: tuple[str, ...] = ()
    rounds: int = 4
    threads_per_rank: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "num_prompt_tokens", "rounds")
        if self.num_tokens < 2:
            raise ConfigError(f"num_tokens {self.num_tokens}: a rate needs 2 or more")
        if not self.num_drafts or self.num_drafts[0] != 0 or len(set(self.num_drafts)) < len(self.num_drafts):
            raise ConfigError(f"num_drafts {self.num_drafts} must be different numbers, 0 first")


def _check_positive(suite: PrefixSuite | SpeculationSuite, *names: str) -> None:
    for name in names:
        if getattr(suite, name) < 1:
            raise ConfigError(f"{name} {getattr(suite, name)} is less than 1")


@dataclass(frozen=True, slots=True)
class _Taken:
    """What one turn of one way gave."""

    num_tokens: int
    seconds_s: float
    counts: dict[str, int]


_Measure = Callable[[EngineClient, int], Awaitable[_Taken]]


async def measure_prefix(
    suite: PrefixSuite,
    provenance: Provenance,
    *,
    on_sample: Callable[[WaySample], None] = lambda sample: None,
) -> WaysResult:
    """Time to the first token of a long prompt: cold, and when all but its last turn has been read before.

    Raises what opening the checkpoint and running the engine raise; EngineError when a way was not what it is called.
    """

    checkpoint = await asyncio.to_thread(Checkpoint.open, suite.checkpoint)
    returning = suite.num_prompt_tokens + suite.num_turn_tokens
    block_size = EngineOptions().block_size
    # As many as there are windows' blocks below: each takes at least one, and a session's window is gone.
    num_visitors = 2 * CacheFormats(checkpoint.config, block_size, False).window_blocks_per_tail + 2
    plain = EngineOptions(
        max_model_len=max(returning, block_size) + 2,
        max_num_seqs=1,
        block_size=block_size,
        kv_cache_tokens=2 * (returning + num_visitors * block_size),
        num_window_tails=0,
        threads_per_rank=suite.threads_per_rank,
    )

    async def measure(engine: EngineClient, number: int) -> _Taken:
        texts = np.random.default_rng(number)
        session = _text(engine, texts, suite.num_prompt_tokens)
        turn = _text(engine, texts, suite.num_turn_tokens)
        if engine.options.prefix_cache:
            await _generate(engine, session, 1)
            for _ in range(num_visitors):
                await _generate(engine, _text(engine, texts, block_size), 1)
        before, begin_s = await engine.stats(), time.perf_counter()
        _, times = await _generate(engine, session + turn, 1)
        counts = _difference(before, await engine.stats(), "num_prefix_hits", "num_replayed_tokens")
        _check_way(engine.options, counts)
        return _Taken(1, times[0] - begin_s, counts)

    ways = {
        "cold": replace(plain, prefix_cache=False),
        "window kept": replace(plain, num_window_tails=2 * num_visitors),
        "window replayed": replace(plain, prefix_replay="window"),
        "replayed exactly": replace(plain, prefix_replay="exact"),
    }
    settings = {"num_prompt_tokens": suite.num_prompt_tokens, "num_turn_tokens": suite.num_turn_tokens}
    return await _take_turns(PREFIX, suite, checkpoint, ways, measure, settings, provenance, on_sample)


def _check_way(options: EngineOptions, counts: Mapping[str, int]) -> None:
    """Raises EngineError when a session did not come back in the way that was to be measured."""
    found, replayed = counts["num_prefix_hits"], counts["num_replayed_tokens"]
    if (found > 0) != options.prefix_cache or (replayed > 0) != (found > 0 and not options.num_window_tails):
        raise EngineError(
            f"of a session, {found} tokens were found and {replayed} of them run again, with "
            f"{options.num_window_tails} windows kept and {options.prefix_replay} replay",
            hint="ask for more prompt tokens",
        )


async def measure_speculation(
    suite: SpeculationSuite,
    provenance: Provenance,
    *,
    on_sample: Callable[[WaySample], None] = lambda sample: None,
) -> WaysResult:
    """Decode speed of one stream, by number of drafts. Every way generates the same tokens of the same prompt.

    Raises what opening the checkpoint and running the engine raise; EngineError when two ways gave different tokens, or
    an answer is too short to be timed.
    """
    checkpoint = await asyncio.to_thread(Checkpoint.open, suite.checkpoint)
    asked = _encode(suite.questions, checkpoint)
    answers: dict[int, tuple[int, ...]] = {}

    async def measure(engine: EngineClient, number: int) -> _Taken:
        if asked:
            prompt = asked[number % len(asked)]
        else:
            prompt = _text(engine, np.random.default_rng(number), suite.num_prompt_tokens)
        before = await engine.stats()
        tokens, times = await _generate(engine, prompt, suite.num_tokens, ignore_eos=not asked)
        if times[-1] == times[0]:
            raise EngineError(
                f"the answer of {len(tokens)} tokens came in one step, which gives no rate",
                hint="ask for something longer",
            )
        names = ("num_verify_steps", "num_drafted", "num_accepted")
        counts = _difference(before, await engine.stats(), *names)
        if answers.setdefault(number, tokens) != tokens:
            raise EngineError(
                f"with speculation {engine.options.speculation} the answer is {tokens}, without {answers[number]}"
            )
        # A step's tokens arrive together; those of the first come before the clock starts.
        return _Taken(sum(t > times[0] for t in times), times[-1] - times[0], counts)

    ways = {
        f"{k} drafts" if k else "off": EngineOptions(
            max_model_len=max(map(len, asked), default=suite.num_prompt_tokens) + suite.num_tokens + 1,
            max_num_seqs=1,
            prefix_cache=False,
            speculation=str(k) if k else "off",
            threads_per_rank=suite.threads_per_rank,
        )
        for k in suite.num_drafts
    }
    prompts = {"num_questions": len(asked)} if asked else {"num_prompt_tokens": suite.num_prompt_tokens}
    settings = prompts | {"num_tokens": suite.num_tokens}
    return await _take_turns(SPECULATION, suite, checkpoint, ways, measure, settings, provenance, on_sample)


async def _take_turns(
    name: str,
    suite: PrefixSuite | SpeculationSuite,
    checkpoint: Checkpoint,
    ways: Mapping[str, EngineOptions],
    measure: _Measure,
    settings: Mapping[str, int],
    provenance: Provenance,
    on_sample: Callable[[WaySample], None],
) -> WaysResult:
    """Start an engine for each way, and measure them in rounds of which the first is warm-up."""
    taken: list[WaySample] = []
    engines = {
        way: EngineClient(checkpoint, options) for way, options in ways.items()
    }  # all are checked first
    async with AsyncExitStack() as stack:
        for engine in engines.values():
            await stack.enter_async_context(engine)
        for number in range(suite.rounds + 1):
            for way, engine in engines.items():
                got = await measure(engine, number)
                sample = WaySample(
                    way=way,
                    round=number,
                    num_tokens=got.num_tokens,
                    seconds_s=got.seconds_s,
                    counts=got.counts,
                )
                taken.append(sample)
                on_sample(sample)
    return WaysResult(
        name=name,
        provenance=provenance,
        settings={
            "checkpoint": embedded_name(suite.checkpoint) or suite.checkpoint.resolve().name,
            "num_layers": checkpoint.config.num_hidden_layers,
            "hidden_size": checkpoint.config.hidden_size,
            "tensor_bytes": checkpoint.total_bytes,
            "rounds": suite.rounds,
            "threads_per_rank": suite.threads_per_rank,
            "temperature": 0,
            **settings,
        },
        warm_up=tuple(sample for sample in taken if sample.round == 0),
        samples=tuple(sample for sample in taken if sample.round > 0),
    )


async def _generate(
    engine: EngineClient, prompt: tuple[int, ...], num_tokens: int, *, ignore_eos: bool = True
) -> tuple[tuple[int, ...], list[float]]:
    """Return the tokens of a greedy answer, and when each arrived."""
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=ignore_eos)
    tokens: tuple[int, ...] = ()
    times: list[float] = []
    async for chunk in engine.generate(GenerateRequest(f"bench-{uuid.uuid4().hex}", prompt, sampling)):
        tokens += chunk.token_ids
        times += [time.perf_counter()] * len(chunk.token_ids)
    return tokens, times


def _encode(questions: tuple[str, ...], checkpoint: Checkpoint) -> list[tuple[int, ...]]:
    """Return the prompt's ids of each question."""
    if not questions:
        return []  # a checkpoint without a tokenizer will do
    chat = ChatFormat.from_checkpoint(checkpoint.directory)
    return [tuple(chat.encode_question(question)) for question in questions]


def _text(engine: EngineClient, texts: np.random.Generator, length: int) -> tuple[int, ...]:
    """Return random ids of ordinary tokens."""
    config = engine.checkpoint.config
    special = {config.image_token_id, config.bos_token_id, config.eos_token_id}
    ordinary = [token_id for token_id in range(config.vocab_size) if token_id not in special]
    return tuple(texts.choice(ordinary, length).tolist())


def _difference(before: EngineStats, after: EngineStats, *names: str) -> dict[str, int]:
    return {name: getattr(after, name) - getattr(before, name) for name in names}


__all__ = [
    "PREFIX",
    "SCHEMA",
    "SPECULATION",
    "PrefixSuite",
    "SpeculationSuite",
    "WaySample",
    "WaysResult",
    "is_ways_result",
    "measure_prefix",
    "measure_speculation",
]
