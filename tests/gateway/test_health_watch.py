"""Health as clients and probes see it: a real server in front of a scripted engine, with thresholds made short."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest
from chat_scripts import CHAT, HELLO, MODEL, ask, ask_streaming, ids, says, settings

from deskfleet.endpoint import EngineHealth, GenerateRequest, RankHealth
from deskfleet.errors import EngineError
from deskfleet.gateway.app import serving
from deskfleet.gateway.intake import Intake
from deskfleet.gateway.observation import ObservationSettings
from deskfleet.gateway.symptoms import HealthSettings
from deskfleet.testing.scripted import Script, ScriptedEngine

QUICK = HealthSettings(
    period_s=0.02, silent_s=0.2, stall_s=0.4, prompt_token_s=0.0, canary_every_s=None, canary_retry_s=0.1,
    canary_deadline_s=0.2, canary_request_s=0.0,
)  # fmt: skip
TWO_RANKS = (
    RankHealth(0, num_steps=7, num_moves=90, heartbeat_age_s=0.05, last_step_age_s=3.0, memory_bytes=2**30),
    RankHealth(1, num_steps=7, num_moves=90, heartbeat_age_s=0.05, planned_bytes=2**29),
)
HANGS = Script(ids("a b c d e f"), delay_s=3600.0)


class Server:
    """A running gateway: the engine behind it, the client everybody uses, and plain GETs."""

    def __init__(self, engine: ScriptedEngine, session: aiohttp.ClientSession, url: str, client: Any) -> None:
        self.engine = engine
        self.client = client
        self.url = url
        self._session = session

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(f"{self.url}{path}") as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())

    async def health_when(self, *states: str, within_s: float = 5) -> tuple[int, Any]:
        try:
            async with asyncio.timeout(within_s):
                while (answer := await self.get("/health"))[1]["status"] not in states:
                    await asyncio.sleep(0.01)
                return answer
        except TimeoutError:
            pytest.fail(f"not {states} after {within_s} s: {await self.get('/health/detail')}")


@asynccontextmanager
async def server(
    script: Script | Callable[[GenerateRequest], Script], health: HealthSettings = QUICK, **options: Any
) -> AsyncIterator[Server]:
    engine = ScriptedEngine(script, max_model_len=options.pop("max_model_len", 4096))
    engine.rank_health = options.pop("ranks", None)
    observation = ObservationSettings(health=health, **options)
    async with (
        serving(engine, settings(observation=observation)) as endpoint,
        aiohttp.ClientSession() as session,
        openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield Server(engine, session, endpoint.url, client)


async def drain(stream: Any) -> None:
    """Read a stream to its end, which must come."""
    async with asyncio.timeout(5):
        async for _ in stream:
            pass


async def test_what_probes_are_told() -> None:
    async with server(says("ok"), ranks=EngineHealth(TWO_RANKS)) as here:
        assert await here.get("/health") == (200, {"status": "ready", "model": MODEL, "reason": None})
        await ask(here.client)
        await asyncio.sleep(5 * QUICK.period_s)  # a look after the answer
        _, detail = await here.get("/health/detail")
        assert (detail["state"], detail["can_answer"], detail["reasons"]) == ("ready", True, [])
        assert [(rank["rank"], rank["num_steps"]) for rank in detail["ranks"]] == [(0, 7), (1, 7)]
        assert (detail["ranks"][0]["memory_bytes"], detail["ranks"][1]["planned_bytes"]) == (2**30, 2**29)
        assert 0 <= detail["last_token_age_s"] < 5
        assert detail["queue"] == {"num_running": 0, "num_waiting": 0, "oldest_wait_s": 0.0}
        assert detail["memory"]["host_available_bytes"] > 0
        assert [event["state"] for event in detail["events"]] == ["ready"]
        here.engine.fail("rank 1 was killed by SIGKILL; the group was stopped")
        status, body = await here.get("/health")
        assert (status, body["status"]) == (503, "dead"), "not a second later: at once"
        assert body["reason"] == "rank 1 was killed by SIGKILL; the group was stopped"
        assert await here.get("/health/live") == (200, {"status": "live"})
        assert (await here.get("/health/detail"))[0] == 200


async def test_a_rank_that_freezes_in_the_middle_of_answers() -> None:
    """Who waits gets the sentence, who asks is refused with it, and when the rank is back, it answers again."""

    def script(request: GenerateRequest) -> Script:
        return says("fine") if request.request_id.startswith("canary") or is_back else HANGS

    is_back = False
    async with server(script, ranks=EngineHealth(TWO_RANKS)) as here:
        stream = await ask(here.client, stream=True)
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break  # it has begun
        plain = asyncio.create_task(ask(here.client))
        await asyncio.sleep(0.1)
        frozen = replace(TWO_RANKS[1], heartbeat_age_s=12.0)
        here.engine.rank_health = EngineHealth((TWO_RANKS[0], frozen))

        with pytest.raises(openai.APIError, match="rank 1 has been silent for 12 s"):
            await drain(stream)
        with pytest.raises(openai.InternalServerError, match="rank 1 has been silent for 12 s") as raised:
            await asyncio.wait_for(plain, 5)
        assert raised.value.status_code == 503
        status, body = await here.get("/health")
        assert (status, body["status"]) == (503, "stuck")
        began = time.monotonic()
        with pytest.raises(openai.InternalServerError, match="the engine is stuck: rank 1 has been silent"):
            await ask(here.client)
        assert time.monotonic() - began < 1, "nobody is kept waiting for what will not come"
        assert here.engine.num_running == 0, "the engine was told to forget them"

        is_back = True
        here.engine.rank_health = EngineHealth(TWO_RANKS)
        assert (await here.health_when("ready"))[0] == 200
        assert (await ask(here.client)).choices[0].message.content == "fine"
        events = [event["state"] for event in (await here.get("/health/detail"))[1]["events"]]
        assert events == ["ready", "stuck", "ready"]


async def test_an_engine_that_hangs_without_a_word_fails_its_requests() -> None:
    """No ranks to look at: only that nothing comes."""
    async with server(HANGS) as here:
        stream = await ask(here.client, stream=True)
        with pytest.raises(openai.APIError, match="nothing has moved for"):
            await drain(stream)
        assert (await here.get("/health"))[0] == 503


async def test_a_long_prefill_with_a_moving_counter_is_waited_for() -> None:
    """Many times longer than anything may stand still."""
    async with server(says("at last", first_delay_s=2.0)) as here:
        asking = asyncio.create_task(ask(here.client))
        states = set()
        while not asking.done():
            here.engine.num_steps += 1
            states.add((await here.get("/health"))[1]["status"])
            await asyncio.sleep(0.1)
        assert (await asking).choices[0].message.content == "at last"
        assert states <= {"ready", "busy"}
        assert "busy" in states


@pytest.mark.parametrize(
    ("script", "what"),
    [
        (Script(ids("abc"), cut_after=0), "the engine stopped answering before the end"),
        (Script(ids("abc"), cut_after=1), "the engine stopped answering before the end"),
        (
            Script(
                ids("abc"), failure=EngineError("8 logits of this request are not finite"), is_deadly=False
            ),
            "8 logits of this request are not finite",
        ),
    ],
    ids=["empty", "cut off", "not finite"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_are_none(script: Script, what: str, stream: bool) -> None:
    """Each is an error with a sentence; after three the canary is asked, and it gets the same."""
    async with server(script) as here:
        for _ in range(3):
            with pytest.raises(openai.APIError, match=what):
                await (ask_streaming(here.client) if stream else ask(here.client))
        status, body = await here.health_when("stuck")
        assert status == 503
        assert what in body["reason"] or "canary" in body["reason"]


async def test_one_bad_prompt_does_not_take_a_good_engine_down() -> None:
    bad = Script(ids("abc"), failure=EngineError("8 logits are not finite"), is_deadly=False)

    def script(request: GenerateRequest) -> Script:
        return says("fine") if len(request.prompt_token_ids) < 20 else bad

    poison = [{"role": "user", "content": "one two three four five six seven eight nine ten " * 4}]
    async with server(script) as here:
        for _ in range(4):
            with pytest.raises(openai.InternalServerError):
                await ask(here.client, messages=poison)
        status, body = await here.health_when("degraded")
        assert status == 200
        assert "answers failed in the last 5 minutes, the latest: 8 logits are not finite" in body["reason"]
        assert (await ask(here.client)).choices[0].message.content == "fine"


async def test_a_stuck_engine_is_given_up_in_the_end() -> None:
    async with server(HANGS, replace(QUICK, dead_after_s=0.5)) as here:
        with pytest.raises(openai.APIError):
            await ask(here.client)
        status, body = await here.health_when("dead")
        assert status == 503
        assert body["reason"].startswith("the engine was given up: ")
        assert here.engine.failure == body["reason"]


async def test_below_the_memory_floor_requests_are_refused_and_running_ones_finish() -> None:
    low = (replace(TWO_RANKS[0], host_available_bytes=100 << 20), TWO_RANKS[1])
    health = replace(QUICK, memory_floor_bytes=200 << 20, memory_critical_bytes=50 << 20)
    async with server(
        Script(ids("a b c d e f g h i j"), delay_s=0.05), health, ranks=EngineHealth(TWO_RANKS)
    ) as here:
        running = asyncio.create_task(ask_streaming(here.client))
        await asyncio.sleep(0.1)
        here.engine.rank_health = EngineHealth(low)
        status, body = await here.health_when("degraded")
        assert status == 503
        assert "100.00 MiB of memory are available on the host of rank 0" in body["reason"]
        with pytest.raises(openai.InternalServerError, match="no new requests are taken"):
            await ask(here.client)
        assert (await running)[-1].choices[0].finish_reason == "stop"
        # A worse shortage ends even those that run, the longest prompt first.
        here.engine.rank_health = EngineHealth(TWO_RANKS)
        await here.health_when("ready")
        long = [{"role": "user", "content": "word " * 200}]
        two = [
            asyncio.create_task(ask(here.client, messages=messages, max_tokens=10))
            for messages in (HELLO, long)
        ]
        await asyncio.sleep(0.05)
        here.engine.rank_health = EngineHealth((replace(low[0], host_available_bytes=10 << 20), low[1]))
        with pytest.raises(openai.InternalServerError, match="memory ran out"):
            await two[1]
        await asyncio.wait(two)


async def test_somebody_who_watches_machines_closes_the_door_and_ends_prompts() -> None:
    """Closed, it is refused at once and health says why; who runs goes on. Open again, all is as before."""
    intake = Intake()

    def script(request: GenerateRequest) -> Script:
        if len(request.prompt_token_ids) > 20:
            return Script(ids("a b c"), first_delay_s=3600.0)
        return Script(ids("a b c d e f g h"), delay_s=0.05)

    async with server(script, replace(QUICK, stall_s=None), intake=intake) as here:
        assert not intake.end_largest_prefill("nothing is there")
        running = asyncio.create_task(ask_streaming(here.client))
        async with asyncio.timeout(5):
            while here.engine.num_steps == 0:
                await asyncio.sleep(0.005)
        intake.close("node1: 1 GiB left")
        with pytest.raises(openai.InternalServerError, match="are taken: node1: 1 GiB left") as raised:
            await ask(here.client)
        assert raised.value.code == "engine_failed"
        status, body = await here.health_when("degraded")
        assert (status, "no new requests are taken: node1" in body["reason"]) == (503, True)
        assert (await running)[-1].choices[0].finish_reason == "stop"
        intake.open()
        assert (await here.health_when("ready"))[0] == 200

        prompts = ["word " * 100, "word " * 200, "short"]
        asked = [
            asyncio.create_task(ask(here.client, messages=[{"role": "user", "content": prompt}]))
            for prompt in prompts
        ]
        async with asyncio.timeout(5):
            while here.engine.num_running < 3:
                await asyncio.sleep(0.005)
        await asked[2]
        for number in (1, 0):  # the longest first
            assert intake.end_largest_prefill("memory ran out")
            with pytest.raises(openai.InternalServerError, match="memory ran out"):
                await asyncio.wait_for(asked[number], 5)
        assert not intake.end_largest_prefill("memory ran out")
        last = asyncio.create_task(ask(here.client, messages=[{"role": "user", "content": prompts[0]}]))
        async with asyncio.timeout(5):
            while here.engine.num_running == 0:
                await asyncio.sleep(0.005)
        assert intake.end_all("the ranks are stopped") == 1
        with pytest.raises(openai.InternalServerError, match="the ranks are stopped"):
            await last
        # What was ended from here says nothing against the engine.
        assert (await here.health_when("ready"))[0] == 200
    assert not intake.end_largest_prefill("nobody is there any more")


async def test_a_client_that_does_not_read_is_not_an_engine_that_hangs() -> None:
    """Its answer fills every buffer on the way, and the engine is not asked for more."""
    async with server(Script(ids(" ".join(map(str, range(40_000))))), max_model_len=200_000) as here:
        body = {"model": MODEL, "messages": HELLO, "stream": True, "max_tokens": 80_000, **CHAT}
        async with (
            aiohttp.ClientSession(read_bufsize=1024) as session,
            session.post(f"{here.url}/v1/chat/completions", json=body) as response,
        ):
            await response.content.read(10)
            num_steps = -1
            while here.engine.num_steps != num_steps:  # until nothing goes through any more
                num_steps = here.engine.num_steps
                await asyncio.sleep(0.3)
            assert num_steps < 70_000, "buffers took all of it, and nothing was tested"
            await asyncio.sleep(2 * QUICK.stall_s)
            _, detail = await here.get("/health/detail")
            assert [event["state"] for event in detail["events"]] == ["ready"], detail["events"]
            assert here.engine.num_running == 1


async def test_an_idle_engine_is_asked_now_and_then_and_its_canaries_count_nowhere_else() -> None:
    def script(request: GenerateRequest) -> Script:
        assert request.sampling.temperature == 0
        return says("ok")

    async with server(script, replace(QUICK, canary_every_s=0.1)) as here:
        await asyncio.sleep(0.6)
        _, detail = await here.get("/health/detail")
        _, metrics = await here.get("/metrics")
        assert detail["canary"]["num_good"] >= 2
        assert detail["canary"]["error"] is None
        assert detail["state"] == "ready"
        assert 'vllm:generation_tokens_total{engine="0",model_name="deepseek-v4.1-tiny"} 0.0' in metrics
        assert 'deskfleet_canaries_total{outcome="ok"}' in metrics


async def test_a_canary_that_gets_nonsense_is_a_failure() -> None:
    """An id that no vocabulary has."""
    async with server(Script((9999,)), replace(QUICK, canary_every_s=0.05)) as here:
        status, body = await here.health_when("stuck")
        assert status == 503
        assert "token 9999 is not in the vocabulary of 512" in body["reason"]


async def test_a_server_that_stops_says_so_while_its_last_answers_go_out() -> None:
    engine = ScriptedEngine(Script(ids("a b c d e f g h"), delay_s=0.1))
    stop, ready = asyncio.Event(), asyncio.Event()
    url = ""

    async def run() -> None:
        nonlocal url
        async with serving(engine, settings(observation=ObservationSettings(health=QUICK))) as endpoint:
            url = endpoint.url
            ready.set()
            await stop.wait()

    running = asyncio.create_task(run())
    await ready.wait()
    async with (
        aiohttp.ClientSession() as session,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        answering = asyncio.create_task(ask(client))
        while engine.num_running == 0:
            await asyncio.sleep(0.01)
        stop.set()
        await asyncio.sleep(0.1)
        async with session.get(f"{url}/health") as response:
            body = await response.json()
            assert (response.status, body["status"]) == (503, "stopping"), "a balancer must look elsewhere"
        async with session.get(f"{url}/health/live") as response:
            assert response.status == 200
        assert (await answering).choices[0].finish_reason == "stop"
    await running
