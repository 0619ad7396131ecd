"""Everything that is observed of one gateway, put together: health, metrics, log, traces, dashboard, and their routes.

    GET /health           200 while it can answer, else 503 with the reason
    GET /health/live      200 while the process serves HTTP at all
    GET /health/detail    ranks, queue, memory, canary, what changed when
    GET /metrics          Prometheus' text format, also while the engine is dead
    GET /ui               the dashboard

Owns how the parts meet, and what the first four say. `app.py` puts `Observation.engine` where the engine would be,
and calls `attach`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from aiohttp import web

from deskfleet.endpoint import EngineStats, TokenEngine
from deskfleet.errors import EngineError
from deskfleet.gateway.access_log import AccessLog
from deskfleet.gateway.admission import AdmissionState
from deskfleet.gateway.dashboard.routes import Dashboard
from deskfleet.gateway.engram_rows import RankRows, read_files, rows_of
from deskfleet.gateway.health_view import describe_health
from deskfleet.gateway.intake import Intake
from deskfleet.gateway.metrics import GatewayMetrics
from deskfleet.gateway.observing import Observer
from deskfleet.gateway.policies.counting import Counters
from deskfleet.gateway.recent import RecentRequests
from deskfleet.gateway.replicas import describe_replicas, replicated
from deskfleet.gateway.symptoms import HealthSettings
from deskfleet.gateway.tracing import Tracer
from deskfleet.gateway.watch import HealthWatch
from deskfleet.gateway.watched import WatchedEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationSettings:
    """What is observed. `access_log` is a file or `-` for stderr, `traces` where a collector takes OTLP over HTTP.

    None leaves either out. `intake` is for whoever watches the engine's machines; `counters` is a directory where they
    lay the files of ranks of which the engine's own metrics do not tell.
    """

    health: HealthSettings = field(default_factory=HealthSettings)
    intake: Intake | None = None
    counters: Path | None = None
    access_log: str | None = None
    traces: str | None = None
    dashboard: bool = True


class Observation:
    """The observed side of one gateway that serves `model_id` with `engine`.

    `canary_token_ids` is the prompt that shows whether the engine answers, `vocab_size` what its tokens must be below.
    `policies` are what policies count, `queue` says who waits before the engine. Raises ConfigError when the log cannot
    be written, or the libraries for traces are missing.
    """

    def __init__(
        self,
        engine: TokenEngine,
        settings: ObservationSettings,
        *,
        model_id: str,
        canary_token_ids: Sequence[int],
        vocab_size: int,
        policies: Counters | None = None,
        queue: Callable[[], AdmissionState] | None = None,
    ) -> None:
        self.model_id = model_id
        self._queue = queue or _no_queue
        self._replicas = replicated(engine)
        self._elsewhere, self._counters = engine, settings.counters
        self.metrics = GatewayMetrics(model_id, policies)
        self.recent = RecentRequests()
        self.engine = WatchedEngine(engine, self.metrics)
        self.watch = HealthWatch(
            self.engine,
            settings.health,
            canary_token_ids=canary_token_ids,
            vocab_size=vocab_size,
            intake=settings.intake,
        )
        self.observer = Observer(
            self.metrics,
            self.recent,
            access_log=None if settings.access_log is None else AccessLog(settings.access_log),
            tracer=None if settings.traces is None else Tracer(settings.traces),
        )
        self._dashboard = (
            Dashboard(model_id, engine.max_model_len, self.watch, self.metrics, self.recent, self._queue)
            if settings.dashboard
            else None
        )

    def attach(self, app: web.Application) -> None:
        """Add middleware, routes and life to `app`, whose other middlewares are all there already."""
        app.middlewares.insert(0, self.observer.middleware())
        app.router.add_get("/health", self.health)
        app.router.add_get("/health/live", live)
        app.router.add_get("/health/detail", self.detail)
        app.router.add_get("/metrics", self.show_metrics)
        if self._dashboard is not None:
            self._dashboard.attach(app)
        app.cleanup_ctx.append(self._live)

    async def _live(self, app: web.Application) -> AsyncIterator[None]:
        async with self.watch.running():
            yield
        await asyncio.to_thread(self.observer.close)  # a collector of traces may take its time

    async def health(self, request: web.Request) -> web.Response:
        """Say whether a request would be answered now."""
        failure = self.engine.failure
        if failure is not None:  # dead since the latest look
            return _json({"status": "dead", "model": self.model_id, "reason": failure}, status=503)
        queue = self._queue()
        if queue is not None and queue.closed is not None:
            return _json({"status": "stopping", "model": self.model_id, "reason": queue.closed}, status=503)
        verdict = self.watch.verdict
        body = {"status": verdict.state, "model": self.model_id, "reason": verdict.reason}
        return _json(body, status=200 if verdict.can_answer else 503)

    async def detail(self, request: web.Request) -> web.Response:
        """Say everything that is known. The status is 200 whatever the state: the answer is about another thing."""
        return _json(describe_health(self.watch, self._queue()) | describe_replicas(self._replicas))

    async def show_metrics(self, request: web.Request) -> web.Response:
        """Expose metrics."""
        stats: EngineStats | None = None
        if self.engine.failure is None:
            try:
                stats = await self.engine.stats()
            except EngineError:
                logger.warning("the engine could not be asked during a scrape", exc_info=True)
        queue = self._queue()
        self.metrics.num_waiting = 0 if queue is None else len(queue.waiting)
        return web.Response(
            body=self.metrics.render(stats, self.watch.report(), await self._rows()),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _rows(self) -> Sequence[RankRows]:
        """What ranks elsewhere tell of Engram rows."""
        told = rows_of(self._elsewhere)
        if self._counters is None or self._replicas is None:
            return told
        head = self._replicas.replicas[0].url
        return (*told, *await asyncio.to_thread(read_files, self._counters, head, told))


def _no_queue() -> None:
    """Nobody waits before an engine that everybody goes to at once."""


async def live(request: web.Request) -> web.Response:
    """Say that this process answers; nothing about the engine."""
    return _json({"status": "live"})


def _json(data: object, *, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(data),
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


__all__ = ["Observation", "ObservationSettings", "live"]
