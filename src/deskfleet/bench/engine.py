"""Decode speed of the engine: tokens per second for each number of ranks and each batch, in interleaved rounds.

All engines run at once and are asked in turns, A B A B: what else happens on the machine meets all of them
alike, so the ratios hold even where the times do not. The first round is warm-up. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from deskfleet.bench.provenance import Provenance
from deskfleet.bench.result import Result, Sample
from deskfleet.endpoint import GenerateRequest, SamplingParams
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.errors import ConfigError, EngineError
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.embedded import embedded_name

NAME = "cpu-decode"


@dataclass(frozen=True, slots=True)
class DecodeSuite:
    """What to measure. `num_tokens` are generated per stream after a prompt of `num_prompt_tokens`, greedily."""

    checkpoint: Path
    tp_sizes: tuple[int, ...] = (1, 2)
    batches: tuple[int, ...] = (1, 4)
    num_tokens: int = 32
    num_prompt_tokens: int = 32
    rounds: int = 5
    threads_per_rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp_sizes", "batches"):
            values = getattr(self, name)
            if not values or min(values) < 1 or len(set(values)) != len(values):
                raise ConfigError(f"{name} {values} must be different numbers of 1 or more")
        if self.num_tokens < 2:
            raise ConfigError(f"num_tokens {self.num_tokens}: a rate needs 2 or more")
        if self.num_prompt_tokens < 1:
            raise ConfigError(f"num_prompt_tokens {self.num_prompt_tokens} is less than 1")
        if self.rounds < 1:
            raise ConfigError(f"rounds {self.rounds} is less than 1")


async def measure_decode(
    suite: DecodeSuite,
    provenance: Provenance,
    *,
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> Result:
    """Run the suite: one round of warm-up, then `rounds` that count. `on_sample` is told each as it is made.

    `provenance` is captured by the caller before anything is started, so that the load average is the machine's
    and not the engines'. Raises what opening the checkpoint and running the engine raise.
    """
    checkpoint = await asyncio.to_thread(Checkpoint.open, suite.checkpoint)
    taken: list[Sample] = []
    async with AsyncExitStack() as stack:
        engines: dict[int, EngineClient] = {}
        for tp_size in suite.tp_sizes:
            engine = EngineClient(checkpoint, _options(suite, tp_size))
            engines[tp_size] = await stack.enter_async_context(engine)
        for number in range(suite.rounds + 1):
            for batch in suite.batches:
                for tp_size, engine in engines.items():
                    sample = await _decode(engine, suite, tp_size=tp_size, batch=batch, round=number)
                    taken.append(sample)
                    on_sample(sample)
    return Result(
        name=NAME,
        provenance=provenance,
        settings={
            "checkpoint": embedded_name(suite.checkpoint) or suite.checkpoint.resolve().name,
            "num_layers": checkpoint.config.num_hidden_layers,
            "hidden_size": checkpoint.config.hidden_size,
            "tensor_bytes": checkpoint.total_bytes,
            "num_tokens": suite.num_tokens,
            "num_prompt_tokens": suite.num_prompt_tokens,
            "rounds": suite.rounds,
            "threads_per_rank": suite.threads_per_rank,
            "temperature": 0,
        },
        warm_up=tuple(sample for sample in taken if sample.round == 0),
        samples=tuple(sample for sample in taken if sample.round > 0),
    )


def _options(suite: DecodeSuite, tp_size: int) -> EngineOptions:
    return EngineOptions(
        tp_size=tp_size,
        max_model_len=suite.num_prompt_tokens + suite.num_tokens + 1,
        max_num_seqs=max(suite.batches),
        # Every prompt of the largest batch in one step, so that all streams decode together from then on.
        max_num_batched_tokens=max(suite.batches) * suite.num_prompt_tokens,
        threads_per_rank=suite.threads_per_rank,
    )


async def _decode(
    engine: EngineClient, suite: DecodeSuite, *, tp_size: int, batch: int, round: int
) -> Sample:
    """Run `batch` streams together and count tokens while all of them decode.

    That is from the last stream's first token to the first stream's last one: prompts and stragglers, which
    are not what is measured, lie outside. Raises EngineError when there is no such time.
    """
    prompts = [_prompt(suite.num_prompt_tokens, stream, engine) for stream in range(batch)]
    times = await asyncio.gather(*(_token_times(engine, prompt, suite.num_tokens) for prompt in prompts))
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    counts = [sum(begin < moment <= end for moment in t) for t in times]
    if not all(counts):
        raise EngineError(
            f"{batch} streams of {suite.num_tokens} tokens never decoded together", hint="ask for more tokens"
        )
    return Sample(
        name=NAME,
        tp_size=tp_size,
        batch=batch,
        round=round,
        num_tokens=sum(counts),
        seconds_s=end - begin,
        aggregate_tok_s=sum(counts) / (end - begin),
        stream_tok_s=tuple(count / (end - begin) for count in counts),
    )


async def _token_times(engine: EngineClient, prompt: tuple[int, ...], num_tokens: int) -> list[float]:
    """Return when each token of one greedy generation arrived."""
    request = GenerateRequest(
        request_id=f"bench-{uuid.uuid4().hex}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
    )
    times: list[float] = []
    async for chunk in engine.generate(request):
        times += [time.perf_counter()] * len(chunk.token_ids)
    return times


def _prompt(length: int, stream: int, engine: EngineClient) -> tuple[int, ...]:
    """Return ids that differ between streams and are the same in every run."""
    config = engine.checkpoint.config
    text_ids = [i for i in range(config.vocab_size) if i != config.image_token_id]
    ids: Sequence[int] = [text_ids[(stream * 31 + place * 7) % len(text_ids)] for place in range(length - 1)]
    return (config.bos_token_id, *ids)


__all__ = ["NAME", "DecodeSuite", "measure_decode"]
