"""The dashboard's routes: the page's files, and what it asks for every second.

    GET /ui, /ui/{file}     the page and its files, the same for everybody: they hold nothing of this server
    GET /ui/state?since=n   health, figures, requests, and the points after number n

Owns headers and the form of the state. A browser may load nothing from elsewhere and run nothing that is not ours.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from typing import Any

import msgspec
from aiohttp import web

from deskfleet import __version__
from deskfleet.gateway.admission import AdmissionState
from deskfleet.gateway.dashboard.history import History
from deskfleet.gateway.health_view import describe_health
from deskfleet.gateway.metrics import GatewayMetrics
from deskfleet.gateway.recent import RecentRequests, RequestRecord
from deskfleet.gateway.watch import HealthWatch

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_NUM_RECENT = 50
PAGE = "index.html"


class Dashboard:
    """The dashboard of one gateway. Its files are read once."""

    def __init__(
        self,
        model_id: str,
        max_model_len: int,
        watch: HealthWatch,
        metrics: GatewayMetrics,
        recent: RecentRequests,
        queue: Callable[[], AdmissionState | None],
    ) -> None:
        self._model_id = model_id
        self._max_model_len = max_model_len
        self._watch = watch
        self._recent = recent
        self._queue = queue
        self._history = History(metrics, recent)
        self._files = _read_files()
        watch.listeners.append(self._history.add)

    def attach(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_get("/ui", to_page)
        app.router.add_get("/ui/", self.page)
        app.router.add_get("/ui/state", self.state)
        app.router.add_get("/ui/{name}", self.file)

    async def page(self, request: web.Request) -> web.Response:
        """Send the page."""
        return self._send(request, PAGE)

    async def file(self, request: web.Request) -> web.Response:
        """Send one of its files."""
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        return self._send(request, name)

    async def state(self, request: web.Request) -> web.Response:
        """Say how everything is."""
        since = request.query.get("since", "0")
        body = self.describe(int(since) if since.isascii() and since.isdecimal() else 0)
        return web.Response(
            body=msgspec.json.encode(body),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )

    def describe(self, since: int) -> dict[str, Any]:
        """What the page shows, with the points after number `since`."""
        now_s, queue = time.monotonic(), self._queue()
        places = {} if queue is None else {each.request_id: each.position for each in queue.waiting}
        return {
            "version": __version__,
            "model": self._model_id,
            "max_model_len": self._max_model_len,
            "health": describe_health(self._watch, queue),
            "summary": asdict(self._history.summary(self._watch.report().stats)),
            "points": [asdict(point) for point in self._history.since(since)],
            "running": [
                describe_request(record, now_s, places.get(record.own_id))
                for record in self._recent.running()
            ],
            "recent": [describe_request(record, now_s) for record in self._recent.ended(_NUM_RECENT)],
        }

    def _send(self, request: web.Request, name: str) -> web.Response:
        data, tag = self._files[name]
        headers = {**_HEADERS, "ETag": f'"{tag}"'}
        if any(each.value == tag for each in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        kind = _TYPES[name[name.rindex(".") :]]
        return web.Response(body=data, content_type=kind, charset="utf-8", headers=headers)


async def to_page(request: web.Request) -> web.Response:
    """Lead to the page's directory, relative to which it asks for everything: a proxy may put it anywhere."""
    return web.Response(status=308, headers={"Location": "ui/"})


def describe_request(
    record: RequestRecord, now_s: float, queue_position: int | None = None
) -> dict[str, Any]:
    """One row of the tables of requests. What still runs has taken the time until `now_s`; of those that wait for
    their turn, number 1 is the next."""
    return {
        "id": record.request_id,
        "at": record.began_at,
        "protocol": record.protocol,
        "key": record.key,
        "model": record.model,
        "client": record.client,
        "status": record.status,
        "outcome": record.outcome,
        "queue_position": queue_position,
        # Not known before the engine has it.
        "num_prompt_tokens": None if record.given_s is None else record.num_prompt_tokens,
        "num_cached_tokens": None if record.given_s is None else record.num_cached_tokens,
        "num_generated_tokens": record.num_generated_tokens,
        "ttft_s": record.ttft_s,
        "tok_s": record.tok_s,
        "duration_s": record.duration_s if record.duration_s is not None else now_s - record.began_s,
        "finish_reason": record.finish_reason,
        "stop_reason": record.stop_reason,
        "error": record.error,
    }


def _read_files() -> dict[str, tuple[bytes, str]]:
    """Every file of the page: bytes, and a name for just these bytes."""
    files = {}
    for path in resources.files(__package__).joinpath("static").iterdir():
        if any(path.name.endswith(suffix) for suffix in _TYPES):
            data = path.read_bytes()
            files[path.name] = (data, hashlib.sha256(data).hexdigest()[:16])
    return files


__all__ = ["Dashboard", "describe_request"]
