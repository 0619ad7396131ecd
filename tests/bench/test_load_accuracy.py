"""What the load suite measures is what the endpoint did, by the endpoint's own account. About 12 s."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from bench_endpoint import Answer, Behaviour, serving
from load_runs import measure

from deskfleet.bench.load.driver import Ask, arrivals, closed_loop, open_loop
from deskfleet.bench.load.record import kinds_of
from deskfleet.client import Client


def own_rate(answers: list[Answer]) -> float:
    """Tokens after each stream's first event, over the time in which they left: the endpoint's own aggregate."""
    times = [answer.token_s for answer in answers]
    return sum(len(each) - 1 for each in times) / (max(t[-1] for t in times) - min(t[0] for t in times))


@pytest.mark.parametrize(("concurrency", "tokens_per_event"), [(1, 1), (4, 1), (4, 3)])
def test_tokens_and_rates_are_the_endpoints_own(concurrency: int, tokens_per_event: int) -> None:
    behaviour = Behaviour(tokens_per_event=tokens_per_event, drafts=tokens_per_event > 1, step_s=0.009)
    result, endpoint = measure(behaviour, concurrency=(concurrency,), num_tokens=72, rounds=2)
    assert len(result.batches) == 2
    for number, batch in enumerate(result.batches, 1):
        answers = endpoint.log[number * concurrency : (number + 1) * concurrency]  # after the warm-up's
        assert batch.num_tokens == sum(len(answer.token_s) for answer in answers) == 72 * concurrency
        assert batch.server.num_generated_tokens == batch.num_tokens
        assert batch.aggregate_tok_s == pytest.approx(own_rate(answers), rel=0.1)
        for stream in batch.streams:
            nearest = min(
                (own_rate([answer]) for answer in answers), key=lambda r: abs(r - (stream.tok_s or 0))
            )
            assert stream.tok_s == pytest.approx(nearest, rel=0.1)
            # Events are not tokens: with three at a time there are a third of the gaps.
            assert len(stream.gaps_s) == 72 // tokens_per_event - 1
        drafted = batch.server.acceptance
        assert drafted == (pytest.approx(2 / 5) if tokens_per_event == 3 else None)
    assert not result.refusals()


def test_the_first_token_is_counted_apart() -> None:
    behaviour = Behaviour(prefill_s_per_token=0.3 / 1024, step_s=0.001)
    result, endpoint = measure(behaviour, parts=("prefill",), ladder=(256, 1024), rounds=1)
    short, long = result.batches
    answers = endpoint.log[-2:]
    for batch, answer in zip((short, long), answers, strict=True):
        (stream,) = batch.streams
        assert stream.num_prompt_tokens == pytest.approx(batch.setup.context, rel=0.1)
        assert stream.ttft_s == pytest.approx(answer.token_s[0] - answer.came_s, abs=0.05)
    assert long.prefill_tok_s == pytest.approx(1024 / 0.3, rel=0.15)


def test_warm_up_is_kept_and_not_counted() -> None:
    slow_first = Behaviour(stall=lambda number: 0.4 if number == 0 else 0.0, step_s=0.001)
    result, _ = measure(slow_first, rounds=2)
    (warm,) = result.warm_up
    assert (warm.streams[0].ttft_s or 0) > 0.4
    assert all((batch.streams[0].ttft_s or 0) < 0.2 for batch in result.batches)


def test_an_open_loop_asks_on_while_the_server_stalls() -> None:
    """A closed loop would send nothing while one answer is due; here the schedule stands whatever happens."""
    due_s = arrivals(40.0, 1.0, seed=3)
    with serving(Behaviour(stall=lambda number: 0.5, step_s=0.0)) as endpoint:
        driven = asyncio.run(_drive(endpoint.url, due_s))
        came = sorted(answer.came_s for answer in endpoint.log)
    assert len(driven.streams) == len(due_s) > 20
    intended = np.array(due_s) - due_s[0]
    assert np.abs(np.array(came) - came[0] - intended).max() < 0.15
    assert min(stream.ttft_s or 0 for stream in driven.streams) >= 0.5


def test_latency_counts_from_when_a_request_was_due() -> None:
    """The generator itself is held up for 0.4 s: what is sent late has waited, and says so."""
    due_s = [0.0, 0.1, 0.2, 0.3]
    with serving(Behaviour(step_s=0.0)) as endpoint:

        async def held_up() -> tuple[float, float]:
            async def block() -> None:
                await asyncio.sleep(0.05)
                time.sleep(0.4)  # whoever shares our loop

            blocking = asyncio.create_task(block())
            driven = await _drive(endpoint.url, due_s)
            await blocking
            second = driven.streams[1]
            return second.ttft_s or 0, second.sent_s - second.due_s

        ttft_s, late_s = asyncio.run(held_up())
    assert late_s > 0.25
    assert ttft_s > late_s


async def _drive(url: str, due_s: list[float]):  # type: ignore[no-untyped-def]
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    async with Client(url) as client:
        return await open_loop(client, [Ask("a", body)] * len(due_s), due_s, most_open=1000)


def test_arrivals_are_a_poisson_process_and_repeat() -> None:
    due_s = arrivals(50.0, 200.0, seed=1)
    gaps = np.diff(due_s)
    assert due_s == arrivals(50.0, 200.0, seed=1) != arrivals(50.0, 200.0, seed=2)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(
        gaps.mean(), rel=0.05
    )  # as exponential gaps have, and a metronome has not
    assert arrivals(0.001, 0.1, seed=1) == [0.0]


def test_the_mixed_part_has_a_rate_and_all_kinds() -> None:
    result, _ = measure(
        Behaviour(step_s=0.002),
        parts=("mixed",),
        kinds=("prose", "json"),
        rate=30.0,
        mixed_s=1.5,
        mixed_context=(0, 300),
        num_tokens=8,
    )
    (batch,) = result.batches
    assert batch.setup.rate == 30.0
    assert {stream.case for stream in batch.streams} == {"prose", "json"}
    assert len(batch.streams) == len(arrivals(30.0, 1.5, seed=1))
    lengths = [stream.num_prompt_tokens for stream in batch.streams]
    assert min(lengths) < 120 < 270 < max(lengths)
    assert "token-mismatch" not in kinds_of(batch.refusals)


def test_a_closed_loop_fills_every_stream() -> None:
    """Six requests, two at a time: the third is sent when the first has been answered."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    with serving(Behaviour(stall=lambda number: 0.1, step_s=0.0)) as endpoint:

        async def drive() -> float:
            async with Client(endpoint.url) as client:
                return (await closed_loop(client, [Ask("a", body)] * 6, concurrency=2)).wall_s

        wall_s = asyncio.run(drive())
        came = [answer.came_s - endpoint.log[0].came_s for answer in endpoint.log]
    assert wall_s >= 0.3  # three turns
    assert np.sum(np.array(came) < 0.1) == 2  # nobody is answered sooner
