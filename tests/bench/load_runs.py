"""Runs of the load suite against an endpoint of our own, for tests."""

from __future__ import annotations

import asyncio
from typing import Any

from bench_endpoint import Behaviour, Endpoint, serving

from deskfleet.bench.load.record import LoadResult
from deskfleet.bench.load.run import measure_load
from deskfleet.bench.load.suite import LoadSuite
from deskfleet.bench.provenance import Provenance

PROVENANCE = Provenance(
    command="deskfleet bench serve",
    argv=("deskfleet",),
    date="2026-01-31T12:00:00+00:00",
    commit="0123456789abcdef0123456789abcdef01234567",
    is_dirty=False,
    python="3.11.7",
    packages={"aiohttp": "3.14"},
    platform="Linux",
    cpu="A CPU",
    num_cores=2,
    memory_bytes=2**33,
    load_average=(0.5, 0.25, 0.125),
)


def measure(behaviour: Behaviour | None = None, **settings: Any) -> tuple[LoadResult, Endpoint]:
    """Serve as `behaviour` says, measure with `settings`, and return what came of both."""
    with serving(behaviour) as endpoint:
        defaults: dict[str, Any] = {
            "parts": ("decode",),
            "kinds": ("prose",),
            "concurrency": (1,),
            "num_tokens": 48,
            "rounds": 1,
        }
        suite = LoadSuite(**{**defaults, **settings})
        return asyncio.run(measure_load(endpoint.url, suite, PROVENANCE)), endpoint
