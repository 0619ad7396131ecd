"""Counters of Engram rows that stock engines expose through our adapters: in GET /metrics of the gateway, rank by rank.

The engines here are scripts; what they expose is made by the adapters' own code out of counters' files.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chat_scripts import settings
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from upstream_scripts import ANSWER, server_of, upstream_of

from deskfleet.gateway.app import serving
from deskfleet.gateway.observation import ObservationSettings
from deskfleet.gateway.upstream.router import Router
from deskfleet.testing.upstreams import ScriptedServer
from deskfleet_engram.host_metrics import METRICS, FileCollector, counters_name

Samples = dict[tuple[str, str, str], float]


def write_counters(directory: Path, engine: str, rank: int, **other: Any) -> None:
    """A file as an adapter writes it: every counter another number, so that none can stand for another."""
    counters: dict[str, Any] = {key: 1000 * rank + number for number, key in enumerate(METRICS, 1)}
    counters["errors"] = {"io": 3 + rank}
    document = {
        "engine": engine,
        "rank": rank,
        "world_size": 2,
        "written_unix_s": time.time(),
        "counters": counters,
    }
    directory.mkdir(exist_ok=True)
    (directory / counters_name(engine, rank)).write_text(json.dumps(document | other))


def exposing(server: ScriptedServer, directory: Path) -> None:
    """Let the engine's own metrics page say what its ranks counted, as the adapter in it does."""
    registry = CollectorRegistry()
    registry.register(FileCollector(directory, server.__class__.__name__.removeprefix("Scripted").lower()))
    lines = server._metric_lines

    def more() -> list[str]:
        return [*lines(), generate_latest(registry).decode()]

    server._metric_lines = more  # type: ignore[method-assign]


async def scrape(router: Router, counters: Path | None = None) -> Samples:
    """Samples about rows in the gateway's metrics, by name, upstream and rank."""
    own = replace(settings(), observation=ObservationSettings(counters=counters))
    async with (
        serving(router, own) as endpoint,
        aiohttp.ClientSession(endpoint.url) as session,
        session.get("/metrics") as response,
    ):
        text = await response.text()
    return {(sample.name, *sample_labels(sample.labels)): sample.value for sample in samples_of(text)}


def samples_of(text: str) -> Iterator[Any]:
    for family in text_string_to_metric_families(text):
        yield from (each for each in family.samples if each.name.startswith("deskfleet_engram_"))


def sample_labels(labels: dict[str, str]) -> tuple[str, str]:
    return labels.get("upstream", ""), labels.get("rank", "")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_every_ranks_counters_are_shown(tmp_path: Path, engine: str) -> None:
    write_counters(tmp_path, engine, 0)
    write_counters(tmp_path, engine, 1)
    async with server_of(engine, ANSWER) as server, server_of(engine, ANSWER) as plain:
        exposing(server, tmp_path)
        async with Router([upstream_of(server), upstream_of(plain)]) as router:
            found = await scrape(router)
        for rank in (0, 1):
            at = (server.url, str(rank))
            for number, (name, _) in enumerate(METRICS.values(), 1):
                assert found[f"{name}_total", *at] == 1000 * rank + number
            assert found["deskfleet_engram_errors_total", *at] == 3 + rank
        assert {upstream for _, upstream, _ in found} == {server.url}  # no zeros of engines that read no rows


async def test_ranks_on_other_machines_are_in_their_files(tmp_path: Path) -> None:
    """What the engine says itself counts; stale files, and those that are no JSON, are left out."""
    own, fetched = tmp_path / "own", tmp_path / "fetched"
    write_counters(own, "vllm", 0)
    write_counters(fetched, "vllm", 0, counters=dict.fromkeys(METRICS, 7) | {"errors": {}})
    write_counters(fetched, "vllm", 1)
    write_counters(fetched, "vllm", 2, written_unix_s=time.time() - 3600)
    (fetched / counters_name("vllm", 3)).write_text("{")
    async with server_of("vllm", ANSWER) as server:
        exposing(server, own)
        async with Router([upstream_of(server)]) as router:
            found = await scrape(router, fetched)
    rows = {
        rank: value
        for (name, upstream, rank), value in found.items()
        if name == "deskfleet_engram_rows_total"
    }
    number = [*METRICS].index("num_rows") + 1
    assert rows == {"0": number, "1": 1000 + number}
    assert {upstream for _, upstream, _ in found} == {server.url}


async def test_an_engine_without_an_adapter_is_as_it_was(tmp_path: Path) -> None:
    async with server_of("vllm", ANSWER) as server, Router([upstream_of(server)]) as router:
        found = await scrape(router, tmp_path)
    assert found["deskfleet_engram_rows_total", "", ""] == 0
    assert {(upstream, rank) for _, upstream, rank in found} == {("", "")}


async def test_a_metrics_page_that_breaks_off_fails_no_scrape(tmp_path: Path) -> None:
    write_counters(tmp_path, "vllm", 0)
    async with server_of("vllm", ANSWER) as server:
        exposing(server, tmp_path)
        async with Router([upstream_of(server)]) as router:
            assert await scrape(router)
            server._metric_lines = lambda: ['deskfleet_engram_rows_total{rank="0"']  # type: ignore[method-assign]
            await asyncio.sleep(0)
            found = await scrape(router)
    assert not any(upstream for _, upstream, _ in found)  # the engine is not up by its own page
