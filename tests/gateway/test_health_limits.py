"""The thresholds of health in the settings file: what they do to a running gateway, and to what it has by itself."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chat_scripts import requesting, says

from deskfleet.endpoint import EngineHealth, RankHealth
from deskfleet.gateway.health_limits import HealthLimits
from deskfleet.gateway.intake import Intake
from deskfleet.gateway.observation import ObservationSettings
from deskfleet.gateway.policy_file import PolicyStore
from deskfleet.gateway.symptoms import HealthSettings
from deskfleet.testing.scripted import ScriptedEngine

GIB = 2**30
OWN = HealthSettings(memory_floor_bytes=5 * GIB, memory_critical_bytes=1 * GIB)


async def health_when(session: aiohttp.ClientSession, url: str, state: str) -> tuple[int, str]:
    async with asyncio.timeout(5):
        while True:
            async with session.get(f"{url}/health") as response:
                told = await response.json()
                if told["status"] == state:
                    return response.status, told["reason"] or ""
            await asyncio.sleep(0.01)


def store(tmp_path: Path, text: str) -> PolicyStore:
    (tmp_path / "p.toml").write_text(f"[health]\nperiod_s = 0.02\n{text}\n")
    return PolicyStore(path=tmp_path / "p.toml")


async def test_what_the_file_says_holds(tmp_path: Path) -> None:
    """A rank that was silent for two seconds, memory for nobody, a canary that comes at once: none is so by default."""
    rank = RankHealth(0, heartbeat_age_s=2.0)
    silent = ScriptedEngine(says("one"))
    silent.rank_health = EngineHealth((rank,))
    text = "silent_s = 1\nstrikes = 5"
    async with requesting(silent, policies=store(tmp_path, text)) as (session, url):
        status, reason = await health_when(session, url, "stuck")
        assert (status, "rank 0 has been silent for 2 s" in reason) == (503, True)
    poor = store(tmp_path, 'memory_floor_bytes = "4096TiB"')
    async with requesting(ScriptedEngine(says("one")), policies=poor) as (session, url):
        status, reason = await health_when(session, url, "degraded")
        assert (status, "below the floor of" in reason) == (503, True)
    for text, sings in (("canary_every_s = 0.1", True), ("canary_every_s = 0.1\ncanary = false", False)):
        async with requesting(ScriptedEngine(says("one")), policies=store(tmp_path, text)) as (session, url):
            await asyncio.sleep(0.5)
            async with session.get(f"{url}/health/detail") as response:
                canary = (await response.json())["canary"]
            assert (canary["num_good"] + canary["num_failed"] > 0) == sings


async def test_reading_it_again_says_that_it_waits_for_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)  # a command that ran in this process before may have set another
    policies = store(tmp_path, "silent_s = 1")
    async with requesting(ScriptedEngine(says("one")), policies=policies):
        policies.reload()
        assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
        store(tmp_path, "silent_s = 2")
        assert policies.reload() == ()
        assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == [
            "the settings of health are others now; they hold from the server's next start"
        ]


@pytest.mark.parametrize(
    ("said", "floor", "critical"),
    [
        ({}, 5 * GIB, 1 * GIB),
        ({"memory_floor_bytes": "8GiB"}, 8 * GIB, 1 * GIB),
        ({"memory_floor_bytes": "1GiB"}, 1 * GIB, GIB // 2),
        ({"memory_floor_bytes": 0}, 0, 0),
        ({"memory_critical_bytes": "6GiB"}, 6 * GIB, 6 * GIB),
        ({"memory_floor_bytes": "3GiB", "memory_critical_bytes": "2GiB"}, 3 * GIB, 2 * GIB),
    ],
)
def test_one_floor_takes_the_other_with_it(said: dict[str, Any], floor: int, critical: int) -> None:
    health = HealthLimits.model_validate(said).over(OWN)
    assert (health.memory_floor_bytes, health.memory_critical_bytes) == (floor, critical)


async def test_floors_are_not_used_where_somebody_else_decides_about_memory(tmp_path: Path) -> None:
    policies = store(tmp_path, 'memory_floor_bytes = "4096TiB"\nsilent_s = 1')
    assert policies.snapshot.settings.health.about_memory == ("memory_floor_bytes",)
    engine = ScriptedEngine(says("one"))
    watched = ObservationSettings(health=HealthSettings(), intake=Intake())
    async with requesting(engine, policies=policies, observation=watched) as (session, url):
        assert (await health_when(session, url, "ready"))[0] == 200
        await asyncio.sleep(10 * 0.02)  # more looks than would make it a fact
        assert (await health_when(session, url, "ready"))[0] == 200
        engine.rank_health = EngineHealth((RankHealth(0, heartbeat_age_s=2.0),))
        assert (await health_when(session, url, "stuck"))[0] == 503


def test_what_is_not_said_stays_as_the_server_has_it() -> None:
    """Also where its own value is not the file's default."""
    own = HealthSettings(silent_s=3.0, stall_s=None, canary_every_s=None)
    assert HealthLimits().over(own) == own
    said = HealthLimits.model_validate({"silent_s": 9}).over(own)
    assert (said.silent_s, said.stall_s, said.canary_every_s) == (9.0, None, None)
