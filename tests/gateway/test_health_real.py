"""Real ranks that freeze and die under a real server: what its probes and its clients are told, and when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from chat_scripts import CHAT, CHECKPOINT, HELLO, MODEL, settings

from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.gateway.app import serving
from deskfleet.gateway.observation import ObservationSettings
from deskfleet.gateway.symptoms import HealthSettings
from deskfleet.model.checkpoint import Checkpoint

LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "extra_body": {**CHAT, "ignore_eos": True}}
QUICK = HealthSettings(period_s=0.25, silent_s=2.5, stall_s=4.0)


async def health(session: aiohttp.ClientSession, url: str) -> tuple[int, dict[str, Any]]:
    async with session.get(f"{url}/health") as response:
        return response.status, await response.json()


async def health_when(
    session: aiohttp.ClientSession, url: str, state: str, within_s: float
) -> dict[str, Any]:
    async with asyncio.timeout(within_s):
        while (answer := (await health(session, url))[1])["status"] != state:
            await asyncio.sleep(0.1)
    return answer


async def begun(client: openai.AsyncOpenAI) -> Any:
    """A stream that has begun to answer."""
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **LONG)  # type: ignore[call-overload]
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == 5:
            return stream
    raise AssertionError("the answer ended before anything could happen to it")


async def end_of(stream: Any) -> str:
    """The sentence that a stream breaks with."""
    with pytest.raises(openai.APIError) as raised:
        await read(stream)
    return str(raised.value.message)


async def read(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_a_frozen_rank_with_two_clients_waiting_and_its_return() -> None:
    """With thresholds of a few seconds; the defaults are tried below, through the command line."""
    options = EngineOptions(tp_size=2, max_model_len=512, max_num_seqs=4, threads_per_rank=1)
    async with (
        EngineClient(Checkpoint.open(CHECKPOINT), options) as engine,
        serving(engine, settings(observation=ObservationSettings(health=QUICK))) as endpoint,
        aiohttp.ClientSession() as session,
        openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        assert (await health(session, endpoint.url))[1]["status"] == "ready"
        stream = await begun(client)
        plain = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO, **LONG))
        assert (await health_when(session, endpoint.url, "busy", 5))["reason"] is None
        os.kill(engine.ranks[1].pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(15):
                sentence = await end_of(stream)
                with pytest.raises(openai.InternalServerError) as raised:
                    await plain
            status, body = await health(session, endpoint.url)
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model=MODEL, messages=HELLO, **LONG)
        finally:
            os.kill(engine.ranks[1].pid, signal.SIGCONT)
        assert "rank 1 has been silent for" in sentence
        assert "rank 1 has been silent for" in str(raised.value)
        assert (status, body["status"]) == (503, "stuck")
        await health_when(session, endpoint.url, "ready", 15)
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, **LONG | {"max_tokens": 3})
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        stats = await engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0), "what was ended is still run"
        assert engine.failure is None


async def test_a_collective_that_does_not_end_is_found_although_every_rank_reports() -> None:
    """Rank 1's main thread alone is stopped (by a debugger's call, as it were): its heartbeats go on."""
    options = EngineOptions(tp_size=2, max_model_len=512, max_num_seqs=4, threads_per_rank=1)
    async with (
        EngineClient(Checkpoint.open(CHECKPOINT), options) as engine,
        serving(engine, settings(observation=ObservationSettings(health=QUICK))) as endpoint,
        aiohttp.ClientSession() as session,
        openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        stream = await begun(client)
        # A heartbeat that is forged to be fresh: what a frozen main thread with a living reporter looks like.
        frozen = engine._ranks[1]
        os.kill(frozen.process.pid, signal.SIGSTOP)

        async def keep_alive() -> None:
            while True:
                frozen.heard_at_s = asyncio.get_running_loop().time()
                await asyncio.sleep(0.1)

        beating = asyncio.create_task(keep_alive())
        try:
            async with asyncio.timeout(15):
                sentence = await end_of(stream)
        finally:
            beating.cancel()
            os.kill(frozen.process.pid, signal.SIGCONT)
        assert "nothing has moved for" in sentence
        assert "rank 0 is in" in sentence
        await health_when(session, endpoint.url, "ready", 15)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """`deskfleet serve` as a user starts it, and what it prints when it is ready."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import sys; from deskfleet.cli import main; sys.exit(main(sys.argv[1:]))",
        "serve", str(CHECKPOINT), "--tp", "2", "--threads-per-rank", "1", "--port", "0", "--json",
        "--served-model-name", MODEL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            ready = json.loads(await process.stdout.readline())
        yield process, ready
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.slow(reason="half a minute: the default thresholds, from the command line")
async def test_freeze_return_and_death_with_the_defaults() -> None:
    async with served() as (process, ready), aiohttp.ClientSession() as session:
        url, pid = ready["url"], ready["ranks"][1]["pid"]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            stream = await begun(client)
            os.kill(pid, signal.SIGSTOP)
            began_s = time.monotonic()
            async with asyncio.timeout(30):
                sentence = await end_of(stream)
            took_s = time.monotonic() - began_s
            status, _ = await health(session, url)
            os.kill(pid, signal.SIGCONT)
            await health_when(session, url, "ready", 30)
            assert "rank 1 has been silent for" in sentence
            assert status == 503
            assert took_s < 25, f"{took_s:.1f} s"

            stream = await begun(client)
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                assert "rank 1 was killed by SIGKILL" in await end_of(stream)
            with contextlib.suppress(aiohttp.ClientError):  # it is on its way out
                status, body = await health(session, url)
                assert (status, body["status"]) == (503, "dead")
            assert await asyncio.wait_for(process.wait(), 15) == 3
