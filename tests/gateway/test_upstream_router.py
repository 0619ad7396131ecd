"""Several replicas as one engine: who is asked, who is asked instead, and when a replica is left alone."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from upstream_scripts import ANSWER, HASTY, PROMPT, answer, asking, server_of, tokens, upstream_of

from deskfleet.errors import ConfigError, EngineError, RequestError
from deskfleet.gateway.upstream.breaker import Breaker
from deskfleet.gateway.upstream.failures import UpstreamBusy, UpstreamFailed, UpstreamUnreachable
from deskfleet.gateway.upstream.prefixes import PrefixMemory, block_keys
from deskfleet.gateway.upstream.router import Router, RouterOptions
from deskfleet.testing.scripted import Script
from deskfleet.testing.upstreams import Fault, ScriptedServer

QUICK = RouterOptions(first_pause_s=0.05, longest_pause_s=0.2, block_size=4)
SLOW = replace(ANSWER, first_delay_s=0.2)


@asynccontextmanager
async def fleet(
    *engines: str, script: Script = ANSWER, options: RouterOptions = QUICK
) -> AsyncIterator[tuple[Router, list[ScriptedServer]]]:
    """A router in front of one server per engine."""
    servers = [server_of(engine, script) for engine in engines]
    try:
        for server in servers:
            await server.start()
        async with Router([upstream_of(server) for server in servers], options) as router:
            yield router, servers
    finally:
        for server in servers:
            await server.stop()


def counts(servers: Sequence[ScriptedServer]) -> list[int]:
    return [len(server.requests) for server in servers]


async def until_state(router: Router, index: int, state: str) -> None:
    for _ in range(400):
        if router.replicas[index].state == state:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"replica {index} is {router.replicas[index]}, not {state}")


# --- choosing -------------------------------------------------------------------------------------------


@given(
    prompts=st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=20), st.integers(0, 2)), max_size=20),
    asked=st.lists(st.integers(0, 1), max_size=20),
)
def test_the_longest_beginning_is_found(prompts: list[tuple[list[int], int]], asked: list[int]) -> None:
    """Against the slow way: compare with every prompt that a replica has been sent."""
    memory = PrefixMemory()
    for prompt, replica in prompts:
        memory.add(block_keys(prompt, 2), replica)
    slow = [0, 0, 0]
    for prompt, replica in prompts:
        blocks = 0
        while 2 * blocks + 2 <= min(len(prompt), len(asked)):
            if prompt[: 2 * blocks + 2] != asked[: 2 * blocks + 2]:
                break
            blocks += 1
        slow[replica] = max(slow[replica], blocks)
    assert memory.match(block_keys(asked, 2), 3) == slow


def test_memory_is_bounded_and_beginnings_are_forgotten_last() -> None:
    memory = PrefixMemory(max_blocks=10)
    for number in range(50):
        memory.add(block_keys([7, 7, *[number] * 14], 2), number % 2)
        assert len(memory) <= 10
    assert memory.match(block_keys([7, 7, 8, 8], 2), 2) == [1, 1]
    memory.forget(0)
    assert memory.match(block_keys([7, 7], 2), 2) == [0, 1]


def test_a_million_tokens_cost_milliseconds() -> None:
    """A choice is made on the event loop, beside everybody's tokens."""
    prompt = tuple(range(1_000_000))
    memory = PrefixMemory()
    started = time.perf_counter()
    keys = block_keys(prompt)
    memory.match(keys, 4)
    memory.add(keys, 0)
    assert memory.match(keys, 4) == [len(keys), 0, 0, 0]
    assert time.perf_counter() - started < 0.5


async def test_a_session_stays_where_its_prefix_is_and_others_spread() -> None:
    async with fleet("vllm", "sglang", "vllm") as (router, servers):
        sessions = [tuple([0, 10 + number] * 8) for number in range(6)]
        for turn in range(4):
            for session in sessions:
                await answer(router, asking(prompt=(*session, *range(20, 20 + 4 * turn))))
        assert counts(servers) == [8, 8, 8]
        for server in servers:
            assert len({request.prompt_token_ids[1] for request in server.requests}) == 2


async def test_a_shared_prefix_does_not_swamp_one_replica() -> None:
    """All begin alike, as agents with one system prompt do: its owner gets more, the other not nothing."""
    options = replace(QUICK, min_bound=3)
    async with fleet("vllm", "vllm", script=SLOW, options=options) as (router, servers):
        prompts = [(*[5] * 8, number) for number in range(16)]
        answers = await asyncio.gather(*(answer(router, asking(prompt=prompt)) for prompt in prompts))
        assert [tokens(chunks) for chunks in answers] == [ANSWER.token_ids] * 16
        assert min(counts(servers)) >= 4


async def test_the_same_history_makes_the_same_choices() -> None:
    async def run() -> list[list[tuple[int, ...]]]:
        async with fleet("vllm", "vllm", "vllm", script=replace(ANSWER, first_delay_s=0.01)) as (
            router,
            servers,
        ):
            for wave in range(5):
                prompts = [tuple([wave % 2, number % 3] * (4 + number)) for number in range(7)]
                await asyncio.gather(*(answer(router, asking(prompt=prompt)) for prompt in prompts))
            return [sorted(request.prompt_token_ids for request in server.requests) for server in servers]

    assert await run() == await run()


# --- failing over ---------------------------------------------------------------------------------------


async def test_a_dead_replica_is_replaced_and_comes_back() -> None:
    """Killed, refused, left alone, probed, used again: no client notices, and health has the reason meanwhile."""
    async with fleet("vllm", "sglang") as (router, servers):
        await answer(router, asking(prompt=(1,) * 8))
        owner = counts(servers).index(1)
        await servers[owner].stop()
        for number in range(3):
            assert tokens(await answer(router, asking(f"r{number}", (1,) * 8))) == ANSWER.token_ids
        status = router.replicas[owner]
        assert status.state in ("open", "half-open")
        assert status.num_failures <= 2  # an idle connection that has closed, and a refused one
        assert "nothing answers at" in (status.reason or "")
        assert router.failure is None
        assert counts(servers)[1 - owner] == 3
        await servers[owner].start()
        await until_state(router, owner, "closed")
        assert router.replicas[owner].reason is None
        assert servers[owner].num_probes >= 2
        await asyncio.gather(*(answer(router, asking(f"s{n}", (n,) * 8)) for n in range(2, 6)))
        assert counts(servers)[owner] > 1


@pytest.mark.parametrize(
    "fault",
    [Fault("empty"), Fault("vanish"), Fault("malformed"), Fault("http", status=500), Fault("freeze")],
    ids=lambda fault: fault.kind,
)
async def test_before_the_first_token_another_replica_answers(fault: Fault) -> None:
    async with fleet("vllm", "vllm") as (router, servers):
        servers[0].faults = servers[1].faults = [fault]
        servers[1].faults = []
        assert tokens(await answer(router, asking())) == ANSWER.token_ids
        assert counts(servers) == [1, 1]
        ids = [server.requests[0].request_id for server in servers]
        assert ids == ["r", "r-try2"]
        assert [each.num_failures for each in router.replicas] == [1, 0]


async def test_after_the_first_token_nothing_is_asked_again() -> None:
    async with fleet("vllm", "vllm") as (router, servers):
        servers[0].faults = [Fault("cut", 1)]
        chunks = router.generate(asking())
        assert (await anext(chunks)).token_ids == ANSWER.token_ids[:1]
        with pytest.raises(UpstreamFailed, match="without a finish reason"):
            await anext(chunks)
        assert counts(servers) == [1, 0]


async def test_a_refused_request_is_refused_once() -> None:
    """What is wrong with a request is wrong everywhere, and says nothing against the replica."""
    async with fleet("vllm", "vllm") as (router, servers):
        servers[0].faults = [Fault("http", status=400, message="no")]
        with pytest.raises(RequestError, match="no"):
            await answer(router, asking())
        assert counts(servers) == [1, 0]
        assert [each.num_failures for each in router.replicas] == [0, 0]


async def test_busy_replicas_are_passed_over_and_not_blamed() -> None:
    async with fleet("vllm", "sglang") as (router, servers):
        busy = [Fault("http", status=503, headers=(("Retry-After", seconds),)) for seconds in ("9", "4")]
        servers[0].faults = [busy[0]]
        assert tokens(await answer(router, asking())) == ANSWER.token_ids
        servers[0].faults, servers[1].faults = [busy[0]] * 3, [busy[1]] * 3
        for _ in range(3):
            with pytest.raises(UpstreamBusy) as error:
                await answer(router, asking())
            assert error.value.retry_after_s == 4
        assert [each.state for each in router.replicas] == ["closed", "closed"]


async def test_a_lone_replica_that_restarts_is_waited_for_a_little() -> None:
    """Refused, refused, there again; and a bounded number of times only."""
    async with fleet("vllm", options=replace(QUICK, first_pause_s=30, longest_pause_s=30)) as (
        router,
        servers,
    ):
        await servers[0].stop()
        asked = asyncio.create_task(answer(router, asking()))
        await asyncio.sleep(0.3)
        await servers[0].start()
        assert tokens(await asked) == ANSWER.token_ids
        assert router.replicas[0].state == "closed"
        await servers[0].stop()
        started = time.monotonic()
        with pytest.raises(UpstreamUnreachable, match="nothing answers at"):
            await answer(router, asking())
        assert 0.5 < time.monotonic() - started < 2
        assert router.failure is not None
        with pytest.raises(UpstreamFailed, match="nothing answers at"):
            await answer(router, asking())


async def test_a_connection_that_closed_while_idle_is_made_again() -> None:
    """Servers close idle connections; a request that runs into it is sent again, not failed."""
    async with fleet("vllm") as (router, servers):
        await answer(router, asking())
        runner = servers[0]._runner
        assert runner is not None
        assert runner.server is not None
        for connection in list(runner.server.connections):
            connection.transport.abort()
        assert tokens(await answer(router, asking("r2"))) == ANSWER.token_ids


async def test_only_when_all_are_dead_is_the_engine_dead() -> None:
    async with fleet("vllm", "sglang") as (router, servers):
        for server in servers:
            await server.stop()
        with pytest.raises(UpstreamFailed):
            await answer(router, asking())
        for index in range(2):
            await until_state(router, index, "open")
        assert router.failure is not None
        assert all(server.url in router.failure for server in servers)
        with pytest.raises(EngineError, match="nothing answers at"):
            await router.stats()
        await servers[1].start()
        await until_state(router, 1, "closed")
        assert router.failure is None
        assert tokens(await answer(router, asking())) == ANSWER.token_ids


async def test_time_runs_on_over_several_tries() -> None:
    async with fleet("vllm", "vllm", script=SLOW) as (router, servers):
        for server in servers:
            server.faults = [Fault("freeze")]
        started = time.monotonic()
        with pytest.raises(EngineError, match="the deadline passed"):
            await answer(router, asking(timeout_s=0.4))
        assert time.monotonic() - started < 0.8


async def test_three_failures_in_a_row_and_a_replica_is_left_alone() -> None:
    async with fleet("vllm", "vllm", options=replace(QUICK, first_pause_s=30, longest_pause_s=30)) as (
        router,
        servers,
    ):
        servers[0].faults = [Fault("empty")] * 100
        for number in range(12):
            assert tokens(await answer(router, asking(f"r{number}", (number,) * 8))) == ANSWER.token_ids
        assert counts(servers) == [3, 12]
        assert router.replicas[0].state == "open"
        assert router.replicas[0].reason == f"{servers[0].url} answered 200 with an empty body"


async def test_a_probe_that_fails_is_repeated_until_one_answers() -> None:
    """With HTTP that is fine and an engine that says nothing: only a token counts."""
    async with fleet("vllm", "vllm") as (router, servers):
        await servers[0].stop()
        for number in range(3):
            await answer(router, asking(f"r{number}", (number,) * 8))
        servers[0].is_stuck = True
        await servers[0].start()
        num_probes = servers[0].num_probes
        for _ in range(600):
            if servers[0].num_probes >= num_probes + 2:
                break
            await asyncio.sleep(0.01)
        assert "done nothing" in (router.replicas[0].reason or "")
        servers[0].is_stuck = False
        await until_state(router, 0, "closed")


# --- as one engine --------------------------------------------------------------------------------------


async def test_counters_are_added_up_and_never_go_back() -> None:
    async with fleet("vllm", "sglang") as (router, servers):
        await asyncio.gather(*(answer(router, asking(f"r{n}", (n,) * 8)) for n in range(4)))
        before = await router.stats()
        assert before.num_generated_tokens == sum(server.num_tokens for server in servers)
        assert before.num_finished == 4 + before.num_cancelled * 0
        await servers[0].stop()
        await answer(router, asking(prompt=(8,) * 8))
        after = await router.stats()
        assert after.num_generated_tokens == before.num_generated_tokens + len(ANSWER.token_ids)
        assert after.num_running == 0


async def test_one_replica_is_enough_to_start_with() -> None:
    """The other is used once it answers; with less context than was promised, it is not."""
    late = server_of("vllm")
    await late.start()
    await late.stop()
    async with server_of("vllm") as server:
        upstreams = [upstream_of(server), upstream_of(late)]
        async with Router(upstreams, QUICK) as router:
            assert [each.state for each in router.replicas] == ["closed", "open"]
            assert (router.max_model_len, router.replicas[1].max_model_len) == (4096, 0)
            late.max_model_len = 100
            await late.start()
            for _ in range(200):
                if "now serves a context of 100 tokens" in (router.replicas[1].reason or ""):
                    break
                await asyncio.sleep(0.01)
            else:
                pytest.fail(str(router.replicas[1]))
            late.max_model_len = 5000
            await until_state(router, 1, "closed")
            await late.stop()
        with pytest.raises(UpstreamUnreachable):
            await Router([upstream_of(late)]).__aenter__()


async def test_replicas_that_cannot_be_one_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one upstream"):
        Router([])
    async with server_of("vllm") as one, server_of("vllm", max_model_len=50) as other:
        with pytest.raises(ConfigError, match="named twice"):
            Router([upstream_of(one), upstream_of(one)])
        options = replace(HASTY, max_model_len=60)
        with pytest.raises(ConfigError, match="serves a context of 50 tokens"):
            await Router([upstream_of(one, options), upstream_of(other, options)]).__aenter__()
        async with Router([upstream_of(one), upstream_of(other)]) as router:
            assert router.max_model_len == 50


async def test_nothing_is_left_behind() -> None:
    before = {task.get_name() for task in asyncio.all_tasks()}
    async with fleet("vllm", "sglang", script=replace(ANSWER, delay_s=0.05)) as (router, servers):
        chunks = router.generate(asking())
        await anext(chunks)
        await chunks.aclose()
        await servers[0].stop()
        await asyncio.gather(*(answer(router, asking(f"r{n}", PROMPT)) for n in range(3)))
    await asyncio.sleep(0.05)
    left = [task for task in asyncio.all_tasks() if task.get_name() not in before and not task.done()]
    assert left == []


def test_what_opens_a_breaker_and_what_closes_it() -> None:
    """A table of events at times, and the state after each."""
    breaker = Breaker(max_failures=3, first_pause_s=1, longest_pause_s=4)
    states = []
    for event, at_s in (
        ("fail", 0), ("fail", 1), ("work", 2), ("fail", 3), ("fail", 4), ("fail", 5),  # three in a row
        ("probe", 5.5), ("probe", 6), ("fail", 6.5),  # too early; due; it fails: two seconds
        ("probe", 8), ("probe", 8.5), ("work", 9),
        ("refused", 10), ("fail", 10.1), ("probe", 11), ("refused", 12), ("probe", 13), ("probe", 14),
        ("refused", 14), ("probe", 18), ("refused", 18), ("probe", 22),  # never longer than four
    ):  # fmt: skip
        match event:
            case "fail":
                breaker.fail(at_s, "broken")
            case "refused":
                breaker.fail(at_s, "refused", at_once=True)
            case "work":
                breaker.succeed()
            case "probe":
                breaker.try_probe(at_s)
        states.append(breaker.state)
    assert states == [
        "closed", "closed", "closed", "closed", "closed", "open",
        "open", "half-open", "open",
        "open", "half-open", "closed",
        "open", "open", "half-open", "open", "open", "half-open",
        "open", "half-open", "open", "half-open",
    ]  # fmt: skip
    assert Counter(states)["half-open"] == 6
