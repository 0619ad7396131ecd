"""Requests that join and leave a running batch: each gets the tokens it gets alone, and its place when it is due."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from deskfleet.endpoint import GenerateRequest, SamplingParams
from deskfleet.engine.client import EngineClient
from deskfleet.engine.llm import LLM
from deskfleet.errors import RequestError
from tests.engine.engines import (
    SMALL,
    chunks_of,
    first_chunks,
    greedy,
    idle,
    random_ids,
    request,
    stats_when,
    tokens_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = 150  # prompt tokens; takes 7 steps of the small engine


@dataclass(frozen=True)
class Job:
    """A request that is sent when the one before it has given `after` tokens."""

    length: int
    sampling: SamplingParams
    after: int

    @property
    def prompt(self) -> tuple[int, ...]:
        return random_ids(self.length, seed=self.length)


# More jobs than slots; prompts of one token, longer than a step and longer than the window; short and long answers.
JOBS = (
    Job(3, greedy(24), after=0),
    Job(70, SamplingParams(temperature=1.0, seed=7, max_tokens=9, ignore_eos=True), after=2),
    Job(20, greedy(16), after=1),
    Job(LONG, SamplingParams(temperature=0.7, top_p=0.9, seed=8, max_tokens=6, ignore_eos=True), after=3),
    Job(1, SamplingParams(temperature=1.3, top_k=20, seed=9, max_tokens=14, ignore_eos=True), after=1),
    Job(33, greedy(1), after=2),
    Job(24, SamplingParams(min_p=0.05, seed=7, max_tokens=12, ignore_eos=True), after=0),
)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[int, ...]]:
    """What each job gets when nothing runs beside it, its prompt in one step."""
    return [llm.generate([job.prompt], job.sampling)[0].token_ids for job in JOBS]


async def staggered(engine: EngineClient, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
    """Run jobs, each sent once its predecessor is as far as it says."""
    given = [0] * len(jobs)
    moved = asyncio.Condition()

    async def run(number: int, job: Job) -> tuple[int, ...]:
        tokens: list[int] = []
        async with moved:
            await moved.wait_for(lambda: number == 0 or given[number - 1] >= job.after)
        async for chunk in engine.generate(request(job.prompt, job.sampling)):
            tokens += chunk.token_ids
            async with moved:
                given[number] = len(tokens)
                moved.notify_all()
        return tuple(tokens)

    return list(await asyncio.gather(*(run(number, job) for number, job in enumerate(jobs))))


async def test_joining_and_leaving_changes_no_token(
    engine: EngineClient, alone: list[tuple[int, ...]]
) -> None:
    together = await staggered(engine, JOBS)
    assert [len(tokens) for tokens in together] == [job.sampling.max_tokens for job in JOBS]
    assert together == alone


async def test_the_order_of_arrival_changes_no_token(
    engine: EngineClient, alone: list[tuple[int, ...]]
) -> None:
    backwards = await staggered(engine, [replace(job, after=0) for job in reversed(JOBS)])
    assert backwards[::-1] == alone


async def test_a_prompt_in_pieces_scores_as_in_one(engine: EngineClient, llm: LLM) -> None:
    prompt = random_ids(LONG, seed=1)
    before = (await engine.stats()).num_steps
    in_pieces = await engine.score(prompt)
    num_steps = (await engine.stats()).num_steps - before
    assert num_steps == -(-LONG // SMALL.max_num_batched_tokens)
    assert in_pieces.tobytes() == llm.score(prompt).tobytes()


async def test_slots_are_never_exceeded_and_everyone_finishes(engine: EngineClient) -> None:
    before = await stats_when(engine, idle)
    jobs = [Job(2 + number, greedy(5 + number % 4), after=0) for number in range(11)]
    running, waiting, waits_s, queued = [], [], [], set()

    async def observe() -> None:
        while True:
            stats = await engine.stats()
            running.append(stats.num_running)
            waiting.append(stats.num_waiting)
            waits_s.append(stats.oldest_wait_s)
            queued.update(engine.queue)
            await asyncio.sleep(0.002)

    observer = asyncio.create_task(observe())
    results = await asyncio.gather(*(tokens_of(engine, request(job.prompt, job.sampling)) for job in jobs))
    observer.cancel()
    assert [len(tokens) for tokens in results] == [job.sampling.max_tokens for job in jobs]
    assert max(running) == SMALL.max_num_seqs
    assert max(waiting) > 0
    assert max(waits_s) > 0
    assert 0 < len(queued) <= len(jobs)
    after = await stats_when(engine, idle)
    assert (after.oldest_wait_s, engine.queue) == (0, ())
    assert after.num_finished - before.num_finished == len(jobs)
    assert after.num_cancelled == before.num_cancelled
    assert after.num_prompt_tokens - before.num_prompt_tokens == sum(job.length for job in jobs)
    assert after.num_generated_tokens - before.num_generated_tokens == sum(map(len, results))


async def test_closing_the_iterator_frees_the_slot_within_one_step(engine: EngineClient) -> None:
    before = await stats_when(engine, idle)
    stream = engine.generate(request(random_ids(9, seed=2), greedy(200)))
    for _ in range(3):
        await anext(stream)
    at_close = await engine.stats()
    await stream.aclose()
    after = await stats_when(engine, lambda stats: stats.num_cancelled > before.num_cancelled)
    assert after.num_cancelled == before.num_cancelled + 1
    assert after.num_finished == before.num_finished
    assert idle(after)
    assert after.num_steps <= at_close.num_steps + 1
    await asyncio.sleep(0.2)
    assert await engine.stats() == after, "the engine went on after the cancellation"


async def test_a_cancelled_task_cancels_its_request(engine: EngineClient) -> None:
    before = await stats_when(engine, idle)
    task = asyncio.create_task(chunks_of(engine, request(random_ids(9, seed=3), greedy(200))))
    await stats_when(engine, lambda stats: stats.num_running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    after = await stats_when(engine, idle)
    assert after.num_cancelled == before.num_cancelled + 1


async def test_cancelling_inside_the_prompt_frees_the_slot(engine: EngineClient) -> None:
    before = await stats_when(engine, idle)
    task = asyncio.create_task(chunks_of(engine, request(random_ids(240, seed=4), greedy(5))))
    await stats_when(engine, lambda stats: stats.num_running == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    after = await stats_when(engine, idle)
    assert after.num_cancelled == before.num_cancelled + 1
    assert after.num_steps < before.num_steps + 10, "the prompt was computed to its end"
    assert after.num_generated_tokens == before.num_generated_tokens


async def test_cancelling_while_waiting_leaves_the_others_alone(
    engine: EngineClient, alone: list[tuple[int, ...]]
) -> None:
    before = await stats_when(engine, idle)
    busy = [
        asyncio.create_task(tokens_of(engine, request(JOBS[0].prompt, JOBS[0].sampling)))
        for _ in range(SMALL.max_num_seqs)
    ]
    await stats_when(engine, lambda stats: stats.num_running == SMALL.max_num_seqs)
    waiting = asyncio.create_task(tokens_of(engine, request(JOBS[1].prompt, JOBS[1].sampling)))
    await stats_when(engine, lambda stats: stats.num_waiting == 1)
    waiting.cancel()
    stats = await stats_when(engine, lambda stats: stats.num_waiting == 0)
    assert stats.num_cancelled == before.num_cancelled + 1
    assert await asyncio.gather(*busy) == [alone[0]] * SMALL.max_num_seqs


async def test_a_freed_slot_holds_nothing_of_its_last_request(
    engine: EngineClient, alone: list[tuple[int, ...]]
) -> None:
    for _ in range(SMALL.max_num_seqs):  # every slot gets a long prompt that is dropped at another place
        await first_chunks(engine, request(random_ids(100, seed=5), greedy(50)), 2)
    await stats_when(engine, idle)
    assert await staggered(engine, JOBS[1:5]) == alone[1:5]


async def test_a_stop_string_counts_as_finished_not_as_cancelled(engine: EngineClient, llm: LLM) -> None:
    before = await stats_when(engine, idle)
    tokens = llm.generate([JOBS[0].prompt], JOBS[0].sampling)[0].token_ids
    texts = [llm.tokenizer.decode([token]) for token in tokens]
    place = next(
        i for i, text in enumerate(texts) if text.isascii()
    )  # else its text may come with the next one
    sampling = replace(JOBS[0].sampling, stop=(texts[place],), max_tokens=200)
    chunks = await chunks_of(engine, request(JOBS[0].prompt, sampling))
    assert chunks[-1].finish_reason == "stop"
    assert len(chunks) == place + 1
    after = await stats_when(engine, lambda stats: stats.num_finished > before.num_finished)
    # How far the engine is ahead of its client is the machine's doing; without the stop it makes 200.
    assert after.num_generated_tokens < before.num_generated_tokens + 100, "it went on after the stop"
    assert after.num_cancelled == before.num_cancelled
    assert idle(after)


async def test_a_request_id_in_use_is_refused_and_the_first_goes_on(engine: EngineClient) -> None:
    asked = GenerateRequest("the-same", random_ids(4, seed=6), greedy(6))
    async with contextlib.aclosing(engine.generate(asked)) as stream:
        await anext(stream)
        with pytest.raises(RequestError, match="'the-same' is in use"):
            await tokens_of(engine, asked)
        rest = [chunk async for chunk in stream]
    assert len(rest) == 5
    assert await tokens_of(engine, asked), "the id is free again"
