"""Many keys and many idle streams cost a small request nothing that can be measured. Takes about fifteen seconds.

Two gateways stand side by side in one process: one with a key and nothing to do, one with a thousand keys and five
hundred streams that wait for their next token. They are asked in turns, so that whatever else the machine does falls
on both. That such a test can fail is shown by the same with keys that are looked for one by one.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from chat_scripts import CHAT, HELLO, MODEL, ids, says, settings

from deskfleet.gateway.admission import Admission
from deskfleet.gateway.app import serving
from deskfleet.gateway.key_file import Key, KeyFile, change_key_file, make_secret
from deskfleet.gateway.keys import KeyRing
from deskfleet.gateway.policy_file import PolicyStore
from deskfleet.testing.scripted import Script, ScriptedEngine

NUM_KEYS, NUM_IDLE = 1000, 500
ROUNDS, PER_ROUND = 60, 8
MADE = datetime(2026, 11, 30, 12, tzinfo=UTC)
IDLE = "stay"
"""What an idle stream's prompt says: it gets one token, and then waits."""


@dataclass
class Asked:
    """One gateway, the key that is asked with, and what its answers took: seconds, and the processor's seconds.

    The second is as good on a machine that does other work, where one answer in a hundred waits for its turn.
    """

    url: str
    secret: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


def with_keys(directory: Path, count: int) -> tuple[PolicyStore, list[str]]:
    """A store of so many keys, written at once: `deskfleet keys` would write the file a thousand times."""
    directory.mkdir()
    secrets = [make_secret() for _ in range(count)]

    def add_all(file: KeyFile) -> KeyFile:
        keys = [Key(f"key-{number}", file.digest(secret), MADE) for number, secret in enumerate(secrets)]
        return replace(file, keys=tuple(keys))

    change_key_file(directory / "keys.toml", add_all)
    (directory / "policies.toml").write_text('keys_file = "keys.toml"\n')
    return PolicyStore(path=directory / "policies.toml", model_ids=[MODEL]), secrets


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **CHAT, **fields}


def engine() -> ScriptedEngine:
    stays = ids(IDLE)

    def answer(request: Any) -> Script:
        prompt = request.prompt_token_ids
        is_idle = any(prompt[start : start + len(stays)] == stays for start in range(len(prompt)))
        return says("one two three", delay_s=3600) if is_idle else says("ok")

    return ScriptedEngine(answer)


@asynccontextmanager
async def idle_streams(
    session: aiohttp.ClientSession, url: str, secrets: Sequence[str]
) -> AsyncIterator[None]:
    """So many open streams as there are keys given, each with its first token sent."""
    async with AsyncExitStack() as stack:

        async def begin(secret: str) -> None:
            response = await stack.enter_async_context(
                session.post(
                    f"{url}/v1/chat/completions",
                    json=body(IDLE, stream=True),
                    headers={"Authorization": f"Bearer {secret}"},
                )
            )
            assert response.status == 200, await response.text()
            assert await response.content.readany()

        for start in range(0, len(secrets), 50):
            await asyncio.gather(*map(begin, secrets[start : start + 50]))
        yield


async def ask(session: aiohttp.ClientSession, asked: Asked) -> None:
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    async with session.post(
        f"{asked.url}/v1/chat/completions",
        json=body(HELLO[0]["content"]),
        headers={"Authorization": f"Bearer {asked.secret}"},
    ) as response:
        answer = await response.read()
    asked.seconds.append(time.perf_counter() - began_s)
    asked.cpu_seconds.append(time.process_time() - cpu_began_s)
    assert response.status == 200, answer


@asynccontextmanager
async def side_by_side(directory: Path, num_keys: int, num_idle: int) -> AsyncIterator[tuple[Asked, Asked]]:
    """A gateway with one key, and one with all the others and the streams, both asked in turns."""
    few_store, (own,) = with_keys(directory / "few", 1)
    many_store, secrets = with_keys(directory / "many", num_keys)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        serving(engine(), settings(policies=few_store)) as few_end,
        serving(busy := engine(), settings(policies=many_store)) as many_end,
        aiohttp.ClientSession(connector=connector) as session,
        idle_streams(session, many_end.url, secrets[:num_idle]),
    ):
        assert busy.num_running == num_idle
        few, many = Asked(few_end.url, own), Asked(many_end.url, secrets[-1])
        for each in (few, many):
            for _ in range(5):
                await ask(session, each)
            each.seconds.clear()
            each.cpu_seconds.clear()
        gc.collect()
        gc.freeze()  # the collector looks at the client's side of the streams as well, which no gateway has
        try:
            for number in range(ROUNDS):
                for each in (few, many) if number % 2 else (many, few):
                    for _ in range(PER_ROUND):
                        await ask(session, each)
        finally:
            gc.unfreeze()
        assert busy.num_running == num_idle, "the streams are still there"
        yield few, many


def ratio(few: Sequence[float], many: Sequence[float], percent: float) -> float:
    return float(np.percentile(many, percent) / np.percentile(few, percent))


async def test_many_keys_and_idle_streams_cost_nothing(tmp_path: Path) -> None:
    async with side_by_side(tmp_path, NUM_KEYS, NUM_IDLE) as (few, many):
        pass
    shown = ", ".join(
        f"{name} p{percent} {1e3 * np.percentile(a, percent):.2f} -> {1e3 * np.percentile(b, percent):.2f} ms"
        for name, a, b in (
            ("latency", few.seconds, many.seconds),
            ("processor", few.cpu_seconds, many.cpu_seconds),
        )
        for percent in (50, 99)
    )
    assert ratio(few.seconds, many.seconds, 50) < 1.25, shown
    assert ratio(few.cpu_seconds, many.cpu_seconds, 50) < 1.25, shown
    assert ratio(few.cpu_seconds, many.cpu_seconds, 99) < 2.5, shown


async def test_a_search_through_all_keys_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = KeyRing.name_of

    def one_by_one(ring: KeyRing, secret: str) -> str | None:
        for key in ring._file.keys:
            if ring._file.digest(secret) == key.digest:
                break
        return found(ring, secret)

    monkeypatch.setattr(KeyRing, "name_of", one_by_one)
    async with side_by_side(tmp_path, NUM_KEYS, 0) as (few, many):
        pass
    assert ratio(few.cpu_seconds, many.cpu_seconds, 50) > 1.5, "it would pass"


@pytest.mark.slow  # six seconds to show that the first test can fail
async def test_a_look_at_every_stream_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue looks through those that run whenever one comes."""
    check = Admission.check_open

    def looking(admission: Admission) -> None:
        for ticket in sorted(admission._running, key=lambda each: each.number):
            repr(ticket.share)
        check(admission)

    monkeypatch.setattr(Admission, "check_open", looking)
    async with side_by_side(tmp_path, NUM_KEYS, NUM_IDLE) as (few, many):
        pass
    assert ratio(few.cpu_seconds, many.cpu_seconds, 50) > 1.5, "it would pass"
