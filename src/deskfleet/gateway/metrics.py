"""What GET /metrics says. Owns names and help texts; knows nothing of HTTP.

Two sources: the gateway's own counters, and the engine's `EngineStats` as read for one scrape. A registry of
its own, so that two gateways in one process do not share numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deskfleet.endpoint import EngineStats, EngramStats, TokenChunk
from deskfleet.errors import RequestError

Outcome = Literal["ok", "refused", "cancelled", "failed"]
"""`refused` is a 4xx, `cancelled` a client that went away, `failed` a 5xx or an error inside a stream."""

_ENGINE_COUNTERS = {
    "num_steps": "Steps the engine has run",
    "num_finished": "Requests the engine has finished",
    "num_cancelled": "Requests cancelled in the engine before their end",
    "num_prompt_tokens": "Prompt tokens the engine has computed",
    "num_generated_tokens": "Tokens the engine has generated",
}
_ENGINE_GAUGES = {
    "num_running": "Requests in the engine's running batch",
    "num_waiting": "Requests waiting to join it",
}
_ENGRAM_COUNTERS = {
    "num_rows": "Engram rows asked for",
    "num_unique": "Engram rows asked for, repeats within a request left out",
    "num_cache_hits": "Engram rows that memory answered",
    "num_fallback_rows": "Engram rows that the second source answered, because the pack could not",
    "num_reads": "Reads of the disk for Engram rows",
    "read_bytes": "Bytes read for Engram rows",
    "wait_s": "Seconds that steps waited for Engram rows, summed over ranks",
}


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
        for name, text in _ENGINE_COUNTERS.items():
            metric = f"deskfleet_engine_{name.removeprefix('num_')}"
            yield CounterMetricFamily(metric, text, getattr(stats, name))
        for name, text in _ENGINE_GAUGES.items():
            yield GaugeMetricFamily(
                f"deskfleet_engine_{name.removeprefix('num_')}", text, getattr(stats, name)
            )
        yield from _engram_metrics(stats.engram)


def _engram_metrics(stats: EngramStats) -> Iterator[Metric]:
    for name, text in _ENGRAM_COUNTERS.items():
        metric = name.removeprefix("num_").replace("wait_s", "wait_seconds")
        yield CounterMetricFamily(f"deskfleet_engram_{metric}", text, getattr(stats, name))
    errors = CounterMetricFamily(
        "deskfleet_engram_errors",
        "Faults met while reading Engram rows, repaired ones included",
        labels=["kind"],
    )
    for kind, count in stats.errors.items():
        errors.add_metric([kind], count)
    yield errors


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
