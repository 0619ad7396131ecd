"""Sees every HTTP request from its arrival to its end, and passes its record on: metrics, recent requests, log, traces.

Owns when a record begins and ends and what its outcome is. Knows nothing of bodies: what was generated is filled in by
`watched.py`, and what only a handler knows (the key's name, a failure inside a stream) by whoever knows it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from deskfleet.gateway.access_log import AccessLog, accept_request_id
from deskfleet.gateway.metrics import GatewayMetrics
from deskfleet.gateway.recent import CURRENT, Outcome, RecentRequests, RequestRecord
from deskfleet.gateway.tracing import Tracer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

RECORD: web.RequestKey[RequestRecord] = web.RequestKey("record", RequestRecord)
"""The record of a request, for handlers."""

PROTOCOLS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
"""Routes that generate, and what their requests are called in metrics and logs."""

_QUIET = ("/health", "/metrics", "/ui")  # asked every few seconds by machines: not logged unless they fail
_CLIENT_GONE = 499  # as nginx calls it: there was nobody to send a status to
_LONGEST_PATH = 200


class Observer:
    """Where records go. `access_log` and `tracer` are None where they are off."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        recent: RecentRequests,
        *,
        access_log: AccessLog | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics
        self.recent = recent
        self.access_log = access_log
        self.tracer = tracer
        self._clock = clock

    def middleware(self) -> Middleware:
        """Return the outermost middleware: it must see what others make of exceptions."""

        @web.middleware
        async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
            record = self._begin(request)
            request[RECORD] = record
            token = CURRENT.set(record)
            try:
                response = await handler(request)
                self._end(record, response.status, _outcome(record, response.status))
                return response
            except (asyncio.CancelledError, ConnectionResetError):
                self._end(record, _CLIENT_GONE, "cancelled")
                raise
            except web.HTTPException as error:
                self._end(record, error.status, _outcome(record, error.status))
                raise
            finally:
                CURRENT.reset(token)
                if record.ended_s is None:
                    self._end(record, 500, "failed")

        return observe

    def close(self) -> None:
        """Write out what is left and close the log."""
        if self.access_log is not None:
            self.access_log.close()
        if self.tracer is not None:
            self.tracer.close()

    def _begin(self, request: web.Request) -> RequestRecord:
        protocol = PROTOCOLS.get(request.path) if request.method == "POST" else None
        record = RequestRecord(
            request_id=accept_request_id(request.headers.get("x-request-id")),
            method=request.method,
            path=request.path[:_LONGEST_PATH],
            began_s=self._clock(),
            began_at=time.time(),
            protocol=protocol,
            client=request.remote,
            trace_parent=request.headers.get("traceparent"),
        )
        if protocol is not None:
            self.metrics.begin(record)
            self.recent.begin(record)
        return record

    def _end(self, record: RequestRecord, status: int, outcome: Outcome) -> None:
        record.status, record.outcome, record.ended_s = status, outcome, self._clock()
        if record.protocol is not None:
            self.recent.end(record)
            self.metrics.end(record)
            if self.tracer is not None:
                self.tracer.record(record)
        if self.access_log is not None and not (outcome == "ok" and record.path.startswith(_QUIET)):
            self.access_log.write(record)
            self.metrics.num_log_lines_dropped = self.access_log.num_dropped


def _outcome(record: RequestRecord, status: int) -> Outcome:
    """What came of it; a handler that knows better has said so in the record."""
    if record.outcome is not None:
        return record.outcome
    if 400 <= status < 500:
        return "refused"
    return "failed" if status >= 500 or record.error is not None else "ok"


__all__ = ["PROTOCOLS", "RECORD", "Observer"]
