"""What GET /metrics says. Owns names and help texts; knows nothing of HTTP.

Two sources: the gateway's own counters, and the engine's `EngineStats` as read for one scrape. A registry of
its own, so that two gateways in one process do not share numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Literal

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deskfleet.endpoint import EngineStats, EngramStats, TokenChunk
from deskfleet.errors import RequestError

Outcome = Literal["ok", "refused", "cancelled", "failed"]
"""`refused` is a 4xx, `cancelled` a client that went away, `failed` a 5xx or an error inside a stream."""


class _EngineCollector(Collector):
    """Shows the stats of the latest scrape; nothing but `deskfleet_engine_up 0` while the engine is dead."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        yield GaugeMetricFamily(
            "deskfleet_engine_up", "1 while the engine lives", 0.0 if stats is None else 1.0
        )
        if stats is None:
            return
        yield from _families("deskfleet_engine", stats)
        yield from _families("deskfleet_engram", stats.engram)
        errors = CounterMetricFamily(
            "deskfleet_engram_errors",
            "Faults met while reading Engram rows, repaired ones included",
            labels=["kind"],
        )
        for kind, count in stats.engram.errors.items():
            errors.add_metric([kind], count)
        yield errors


def _families(prefix: str, stats: EngineStats | EngramStats) -> Iterator[Metric]:
    """A metric for every field that says what kind it is."""
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    for each in fields(stats):
        if "kind" in each.metadata:
            name = each.name.removeprefix("num_").replace("wait_s", "wait_seconds")
            yield kinds[each.metadata["kind"]](
                f"{prefix}_{name}", each.metadata["help"], getattr(stats, each.name)
            )


class GatewayMetrics:
    """Counters of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._requests = Counter(
            "deskfleet_requests", "Chat requests by outcome", ["outcome"], registry=self._registry
        )
        self._cancelled = Counter(
            "deskfleet_cancelled_requests",
            "Chat requests whose client went away before the end",
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "deskfleet_prompt_tokens",
            "Prompt tokens sent to the engine, images expanded",
            registry=self._registry,
        )
        self._generated_tokens = Counter(
            "deskfleet_generated_tokens", "Tokens received from the engine", registry=self._registry
        )
        self._running = Gauge(
            "deskfleet_running_requests", "Chat requests being answered", registry=self._registry
        )

    @contextmanager
    def counting_request(self) -> Iterator[None]:
        """Count one chat request, by what comes out of the block."""
        outcome: Outcome = "failed"
        with self._running.track_inprogress():
            try:
                yield
                outcome = "ok"
            except (asyncio.CancelledError, ConnectionResetError):
                outcome = "cancelled"
                self._cancelled.inc()
                raise
            except (RequestError, web.HTTPClientError):
                outcome = "refused"
                raise
            finally:
                self._requests.labels(outcome).inc()

    def count_prompt(self, num_tokens: int) -> None:
        """Count the prompt of a request that goes to the engine, images expanded."""
        self._prompt_tokens.inc(num_tokens)

    def count_chunk(self, chunk: TokenChunk) -> None:
        """Count the tokens of one engine chunk."""
        self._generated_tokens.inc(len(chunk.token_ids))

    def render(self, stats: EngineStats | None) -> bytes:
        """Return the exposition text, with `stats` as the engine's; None while it is dead."""
        self._engine.stats = stats
        return generate_latest(self._registry)


__all__ = ["GatewayMetrics"]
