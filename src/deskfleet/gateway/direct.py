"""The shortest way from a request to the handlers that generate: routes that are looked up once, not for each.

Owns that way, and nothing that happens on it: the same middlewares and handlers run, in the same order, and see the
same request. aiohttp looks through its router and puts the middlewares together for every request; that is part of the
time to the first token (docs/decisions/0025-time-to-first-token.md).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from functools import partial, reduce
from typing import Any

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from aiohttp.web_urldispatcher import UrlMappingMatchInfo


def take_direct_way(runner: web.AppRunner, paths: Collection[str]) -> None:
    """Have POST requests for `paths` go straight to their handlers; all others go through the router as ever.

    `runner` is set up, and listens to nobody yet.
    """
    server = runner.server
    if server is not None:
        server.request_handler = _way(runner.app, paths, server.request_handler)


def _way(
    app: web.Application,
    paths: Collection[str],
    otherwise: Callable[[Any], Awaitable[web.StreamResponse]],
) -> Callable[[Any], Awaitable[web.StreamResponse]]:
    ends: dict[str, tuple[UrlMappingMatchInfo, Handler]] = {}
    for route in app.router.routes():
        path = None if route.resource is None else route.resource.canonical
        if path is not None and path in paths and route.method == hdrs.METH_POST:
            found = UrlMappingMatchInfo({}, route)
            found.add_app(app)
            found.freeze()
            middlewares = reversed(app.middlewares)
            end = reduce(lambda inner, each: partial(each, handler=inner), middlewares, route.handler)
            ends[path] = found, end

    async def go(request: web.Request) -> web.StreamResponse:
        if request.method == hdrs.METH_POST and hdrs.EXPECT not in request.headers:
            end = ends.get(request.path)
            if end is not None:
                request._match_info, handler = end  # which the router would have found
                return await handler(request)
        return await otherwise(request)

    return go


__all__ = ["take_direct_way"]
