"""Running engines that test modules share, and what they ask of them.

Starting a rank costs seconds (it imports torch), so the engines live as long as the session. `llm` steps 512 tokens
at a time; `engine` is small on purpose: few slots and few tokens a step, so that requests queue and prompts are cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import numpy as np
import pytest
import pytest_asyncio

from deskfleet.endpoint import (
    EngineStats,
    GenerateRequest,
    ImageInput,
    SamplingParams,
    TokenChunk,
)
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.engine.llm import LLM
from tests.engine.golden import ROOT, checkpoint

MODEL = ROOT / "model"
IMAGE_TOKEN = 511
SMALL = EngineOptions(max_num_seqs=3, max_num_batched_tokens=24, max_model_len=256, threads_per_rank=1)

_numbers = itertools.count()


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """One rank with room for everything."""
    with LLM(MODEL, threads_per_rank=1) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine() -> AsyncIterator[EngineClient]:
    """One rank of `SMALL` size; tests that use it run in the session's loop."""
    async with EngineClient(checkpoint(), SMALL) as running:
        yield running


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    """The likeliest tokens, and all of them: EOS does not stop."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def random_ids(length: int, seed: int) -> tuple[int, ...]:
    """A prompt of ordinary tokens: no special ones, no images."""
    return tuple(int(i) for i in np.random.default_rng(seed).integers(3, 500, length))


def request(prompt: Sequence[int], sampling: SamplingParams, images: Sequence[bytes] = ()) -> GenerateRequest:
    """A request with an id of its own."""
    inputs = tuple(ImageInput(data) for data in images)
    return GenerateRequest(f"test-{next(_numbers)}", tuple(prompt), sampling, inputs)


async def chunks_of(engine: EngineClient, asked: GenerateRequest) -> list[TokenChunk]:
    """Run a request to its end."""
    return [chunk async for chunk in engine.generate(asked)]


async def tokens_of(engine: EngineClient, asked: GenerateRequest) -> tuple[int, ...]:
    """The tokens of a request run to its end."""
    return tuple(i for chunk in await chunks_of(engine, asked) for i in chunk.token_ids)


async def first_chunks(engine: EngineClient, asked: GenerateRequest, count: int) -> list[TokenChunk]:
    """Take `count` chunks of a request and close it."""
    taken = []
    async with contextlib.aclosing(engine.generate(asked)) as stream:
        async for chunk in stream:
            taken.append(chunk)
            if len(taken) == count:
                break
    return taken


async def stats_when(
    engine: EngineClient, wanted: Callable[[EngineStats], bool], *, within_s: float = 20
) -> EngineStats:
    """The first statistics that are as wanted."""
    try:
        async with asyncio.timeout(within_s):
            while not wanted(stats := await engine.stats()):
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"after {within_s} s the engine still says {await engine.stats()}")
    return stats


def idle(stats: EngineStats) -> bool:
    """Nothing runs or waits."""
    return stats.num_running == stats.num_waiting == 0
