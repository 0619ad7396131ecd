"""The HTTP application: routes, the boundary where exceptions become answers, and its life.

Owns routes, request ids, listening. Knows nothing of prompts (`protocol`), of events (`stream`), or of what
engine stands behind `TokenEngine`.

    POST /v1/chat/completions      GET /v1/models, /v1/models/{id}      GET /health      GET /metrics

A client that disconnects cancels its handler, whatever that waits for, and with it the engine's request.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from aiohttp import web

from deskfleet.endpoint import Endpoint, EngineStats, TokenEngine
from deskfleet.errors import ConfigError, DeskfleetError, EngineError
from deskfleet.gateway.failures import UnknownModel, describe_failure
from deskfleet.gateway.metrics import GatewayMetrics
from deskfleet.gateway.protocol import ChatProtocol
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.gateway.stream import OPEN_STREAM, fail_stream, generating, stream_answer, whole_answer

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class _Gateway:
    """What every handler may use."""

    engine: TokenEngine
    settings: GatewaySettings
    protocol: ChatProtocol
    metrics: GatewayMetrics
    started_at: int


_GATEWAY: web.AppKey[_Gateway] = web.AppKey("gateway", _Gateway)
_REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)


def create_app(engine: TokenEngine, settings: GatewaySettings) -> web.Application:
    """Return the application that answers for `engine`. It does not own the engine and never stops it.

    Raises ConfigError or CheckpointError when the checkpoint's configuration or tokenizer cannot be used.
    """
    app = web.Application(
        middlewares=[_boundary],
        client_max_size=settings.max_body_bytes,
        # Without it aiohttp lets a handler run on after its client has gone.
        handler_args={"handler_cancellation": True},
    )
    app[_GATEWAY] = _Gateway(
        engine=engine,
        settings=settings,
        protocol=ChatProtocol(settings, engine.max_model_len),
        metrics=GatewayMetrics(),
        started_at=int(time.time()),
    )
    app.on_response_prepare.append(_name_request)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{model:.+}", get_model)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    return app


@asynccontextmanager
async def serving(engine: TokenEngine, settings: GatewaySettings) -> AsyncIterator[Endpoint]:
    """Listen for as long as the block runs. Yields where: `url` has the real port, without `/v1`.

    On leaving, no new connections are taken and requests still running are cancelled. Raises ConfigError when
    the address cannot be listened on, and as `create_app` does.
    """
    runner = web.AppRunner(create_app(engine, settings), access_log=None, shutdown_timeout=0.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}",
                hint="choose another --port, or 0 for any free one",
            ) from error
        port: int = runner.addresses[0][1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        yield Endpoint(f"http://{host}:{port}", settings.model_id, engine.max_model_len)
    finally:
        await runner.cleanup()


async def serve(
    engine: TokenEngine,
    settings: GatewaySettings,
    *,
    until: asyncio.Event,
    on_ready: Callable[[Endpoint], None] = lambda endpoint: None,
) -> None:
    """Listen until `until` is set; `on_ready` is told the address once connections are accepted."""
    async with serving(engine, settings) as endpoint:
        on_ready(endpoint)
        await until.wait()


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer one chat: prepare off the loop, then move tokens until the answer is complete."""
    gateway = request.app[_GATEWAY]
    with gateway.metrics.counting_request():
        if gateway.engine.failure is not None:
            raise EngineError(gateway.engine.failure)
        body = await request.read()
        prepared = await asyncio.to_thread(gateway.protocol.prepare, body, request[_REQUEST_ID])
        gateway.metrics.count_prompt(prepared.num_prompt_tokens)
        parser = gateway.protocol.parser(prepared)
        async with generating(gateway.engine, prepared.generate) as tokens:
            if prepared.stream:
                return await stream_answer(request, tokens, parser, gateway.metrics)
            return await whole_answer(tokens, parser, gateway.metrics)


async def list_models(request: web.Request) -> web.Response:
    """List the one model served here."""
    return _json({"object": "list", "data": [_model_card(request.app[_GATEWAY])]})


async def get_model(request: web.Request) -> web.Response:
    """Describe the served model."""
    gateway = request.app[_GATEWAY]
    asked = request.match_info["model"]
    if asked != gateway.settings.model_id:
        raise UnknownModel(asked, gateway.settings.model_id)
    return _json(_model_card(gateway))


async def health(request: web.Request) -> web.Response:
    """Say 200 while the engine lives, else 503 with the sentence that says why it ended."""
    gateway = request.app[_GATEWAY]
    failure = gateway.engine.failure
    if failure is not None:
        return _json({"status": "failed", "reason": failure}, status=503)
    return _json({"status": "ok", "model": gateway.settings.model_id})


async def metrics(request: web.Request) -> web.Response:
    """Expose counters in Prometheus' text format, also while the engine is dead."""
    gateway = request.app[_GATEWAY]
    stats: EngineStats | None = None
    if gateway.engine.failure is None:
        try:
            stats = await gateway.engine.stats()
        except EngineError:
            logger.warning("the engine died during a scrape", exc_info=True)
    return web.Response(
        body=gateway.metrics.render(stats),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )


def _model_card(gateway: _Gateway) -> dict[str, str | int]:
    return {
        "id": gateway.settings.model_id,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "deskfleet",
        "max_model_len": gateway.engine.max_model_len,
    }


def _json(data: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), status=status, content_type="application/json")


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = request[_REQUEST_ID]


@web.middleware
async def _boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into an answer: a status, or an event once a stream is open."""
    request[_REQUEST_ID] = f"chatcmpl-{uuid.uuid4().hex}"
    try:
        return await handler(request)
    except ConnectionResetError:
        # The client is gone, there is nobody to answer. A begun response ends the connection quietly.
        if OPEN_STREAM in request:
            return request[OPEN_STREAM]
        raise
    except Exception as error:
        failure = describe_failure(error)
        if failure.status >= 500:
            unforeseen = not isinstance(error, DeskfleetError)
            logger.error("%s: %s", request[_REQUEST_ID], failure.message, exc_info=unforeseen)
        opened = request.get(OPEN_STREAM)
        if opened is not None:
            return await fail_stream(opened, failure)
        response = web.Response(
            body=failure.to_json(), status=failure.status, content_type="application/json"
        )
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        return response


__all__ = ["create_app", "serve", "serving"]
