"""The HTTP application: routes, the boundary where exceptions become answers, and its life.

Owns routes, request ids, listening. Knows nothing of prompts or events (`protocols/`), of how an answer is sent
(`stream`), or of what engine stands behind `TokenEngine`.

    POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/completions       the protocols
    POST /v1/messages/count_tokens, /tokenize, /detokenize                        tokens of what would be asked
    GET  /v1/models, /v1/models/{id}    GET /openapi.json                         what is served, and how
    GET  /health, /metrics, /ui                                                   `observation.py`
    GET  /debug/answers                                                           `debug_answers.py`, where asked for

A client that disconnects cancels its handler, whatever that waits for, and with it the engine's request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from deskfleet.endpoint import Endpoint, TokenEngine
from deskfleet.errors import ConfigError, DeskfleetError, EngineError
from deskfleet.gateway.chat_format import ChatFormat
from deskfleet.gateway.debug_answers import DebugAnswers
from deskfleet.gateway.direct import take_direct_way
from deskfleet.gateway.failures import ErrorStyle, UnknownModel, describe_failure
from deskfleet.gateway.gate import MAX_TOKENS_HEADER, Gate
from deskfleet.gateway.http_log import leave_out_malformed
from deskfleet.gateway.observation import Observation, ObservationSettings
from deskfleet.gateway.observing import RECORD
from deskfleet.gateway.openapi import render_description
from deskfleet.gateway.policies.contract import Caller, Policy
from deskfleet.gateway.protocol import GeneratingProtocol, apply_policies, watchers_of
from deskfleet.gateway.protocols.chat import ChatProtocol
from deskfleet.gateway.protocols.completions import CompletionsProtocol
from deskfleet.gateway.protocols.messages import MessagesProtocol
from deskfleet.gateway.protocols.responses import ResponsesProtocol
from deskfleet.gateway.protocols.tokens import TokenCounter
from deskfleet.gateway.recent import RequestRecord
from deskfleet.gateway.replicas import HEADER as TOKENS_HEADER
from deskfleet.gateway.replicas import RETOKENISED, Replicated, replicated
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.gateway.stream import (
    OPEN_STREAM,
    EventStream,
    Later,
    Ready,
    fail_stream,
    stream_answer,
    whole_answer,
)
from deskfleet.gateway.thinking import HEADER as THINKING_HEADER
from deskfleet.gateway.token_texts import join
from deskfleet.gateway.watched import WatchedEngine

logger = logging.getLogger(__name__)

Policies = Sequence[Policy] | Callable[[], Sequence[Policy]]
"""The policies, or whatever knows those of this moment."""


@dataclass(frozen=True, slots=True)
class _Gateway:
    """What every handler may use. `protocols` by route."""

    engine: WatchedEngine
    settings: GatewaySettings
    protocols: Mapping[str, GeneratingProtocol]
    counter: TokenCounter
    gate: Gate
    policies: Callable[[], Sequence[Policy]]
    replicas: Replicated | None
    debug: DebugAnswers | None
    started_at: int


_GATEWAY: web.AppKey[_Gateway] = web.AppKey("gateway", _Gateway)

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
"""The id of a request, which is also its answer's."""

CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)
"""Who asks, set by the middleware that knows; without one it is whoever the connection comes from."""


class _Told(msgspec.Struct):
    """What headers say of how a request was understood, as far as it was."""

    thought: str | None = None
    max_tokens: int | None = None


_TOLD: web.RequestKey[_Told] = web.RequestKey("told", _Told)

_LINGERING_S = 2.0
"""How long the rest of a body is still taken after its request was refused, so that the client can read why."""

_QUICK_BYTES = 4096
_SLOW_FIELDS = re.compile(rb"image|format|schema|strict|grammar|regex|\\u")
"""What a field is called that may take long to prepare, as far as all protocols have it in common."""

_ANTHROPIC_ROUTES = "/v1/messages"
_GENERATING_ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions")


def create_app(
    engine: TokenEngine,
    settings: GatewaySettings,
    *,
    policies: Policies = (),
    middlewares: Sequence[Middleware] = (),
    extensions: Sequence[Callable[[web.Application], None]] = (),
) -> web.Application:
    """Return the application that answers for `engine`. It does not own the engine and never stops it.

    `policies` act on every request for tokens, before those of the settings. `middlewares` run inside the boundary,
    before anybody is asked for a key: what they raise becomes an answer as any error does. `extensions` may add routes
    and life of their own, once all others are there.
    Raises ConfigError or CheckpointError when the checkpoint's configuration or tokenizer cannot be used.
    """
    leave_out_malformed()
    chat_format = ChatFormat.from_checkpoint(settings.checkpoint)

    def decode(token_ids: Sequence[int]) -> str:
        return join(chat_format.texts, token_ids).decode(errors="replace")

    gate = Gate(settings, decode)
    debug = DebugAnswers(settings.debug_answers, decode) if settings.debug_answers else None
    protocols: dict[str, GeneratingProtocol] = {}
    app = web.Application(
        middlewares=[_boundary(protocols), *map(web.middleware, middlewares), gate.door(CALLER)],
        client_max_size=settings.max_body_bytes,
        handler_args={
            # Without it aiohttp lets a handler run on after its client has gone.
            "handler_cancellation": True,
            # For aiohttp a connection is idle until the headers of its next request are complete.
            "keepalive_timeout": gate.header_timeout_s,
            "lingering_time": _LINGERING_S,
        },
    )
    made = (settings, engine.max_model_len, chat_format)
    chat, messages = ChatProtocol(*made), MessagesProtocol(*made)
    observed = Observation(
        engine,
        gate.observed(settings.observation or ObservationSettings()),
        model_id=settings.model_id,
        canary_token_ids=(chat_format.config.bos_token_id,),
        vocab_size=chat_format.config.vocab_size,
        policies=gate.policies.counters,
        queue=gate.admission.state,
    )
    protocols |= {
        "/v1/chat/completions": chat,
        "/v1/responses": ResponsesProtocol(*made),
        "/v1/messages": messages,
        "/v1/completions": CompletionsProtocol(*made),
    }
    gateway = app[_GATEWAY] = _Gateway(
        engine=observed.engine,
        settings=settings,
        protocols=protocols,
        counter=TokenCounter(*made, chat=chat, messages=messages),
        gate=gate,
        policies=policies if callable(policies) else lambda: policies,
        replicas=replicated(engine),
        debug=debug,
        started_at=int(time.time()),
    )
    app.on_response_prepare.append(_add_headers)
    for route in _GENERATING_ROUTES:
        app.router.add_post(route, partial(generate, gateway))
    app.router.add_post("/v1/messages/count_tokens", count_tokens)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{model:.+}", get_model)
    app.router.add_get("/openapi.json", describe)
    if debug is not None:
        debug.attach(app, CALLER, has_keys=lambda: gate.policies.store.ring() is not None)
    observed.attach(app)
    for extend in extensions:
        extend(app)
    return app


@asynccontextmanager
async def serving(
    engine: TokenEngine,
    settings: GatewaySettings,
    *,
    policies: Policies = (),
    middlewares: Sequence[Middleware] = (),
    extensions: Sequence[Callable[[web.Application], None]] = (),
) -> AsyncIterator[Endpoint]:
    """Listen for as long as the block runs. Yields where: `url` has the real port, without `/v1`.

    On leaving, new requests are refused and running ones may finish for as long as the settings say; then connections
    are closed. Raises ConfigError when the address cannot be listened on, and as `create_app` does.
    """
    app = create_app(engine, settings, policies=policies, middlewares=middlewares, extensions=extensions)
    # After draining, whatever still runs is cancelled at once. (0 would wait for it, for ever.)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    take_direct_way(runner, _GENERATING_ROUTES)
    try:
        site = web.TCPSite(runner, settings.host, settings.port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}",
                hint="choose another port: --port, or port under [gateway] in fleet.toml; 0 takes any free one",
            ) from error
        port: int = runner.addresses[0][1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            yield Endpoint(f"http://{host}:{port}", settings.model_id, engine.max_model_len)
        finally:
            await app[_GATEWAY].gate.drain()
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


async def generate(gateway: _Gateway, request: web.Request) -> web.StreamResponse:
    """Answer one request of any protocol: prepare off the loop, then move tokens until the answer is complete."""
    caller, record, told = request[CALLER], request[RECORD], request[_TOLD]
    record.key, record.model = caller.key, gateway.settings.model_id
    if gateway.engine.failure is not None:
        raise EngineError(gateway.engine.failure)
    protocol = gateway.protocols[record.path]
    body = await gateway.gate.read(request, caller)
    if _is_quick(body):
        prepared = protocol.prepare(body, record.own_id, caller)
    else:
        prepared = await asyncio.to_thread(protocol.prepare, body, record.own_id, caller)
    if prepared.thought is not None:
        told.thought = prepared.thought.header()
    policies = (*gateway.policies(), *gateway.gate.policies_for(caller))
    prepared = apply_policies(prepared, policies)
    draft = prepared.draft
    told.max_tokens = draft.generate.sampling.max_tokens
    async with gateway.gate.admitted(draft) as ticket:

        def get_ready() -> Ready:
            watchers = (ticket.push, *watchers_of(prepared, policies), record.watch)
            if gateway.debug is not None:
                watchers = (*watchers, gateway.debug.begin(record))
            return Ready(
                protocol.parser(prepared), watchers, EventStream(_own_headers(gateway, record, told))
            )

        ready = Later(get_ready)
        tokens = gateway.engine.generate(draft.generate)
        try:
            if draft.is_stream:
                return await stream_answer(request, tokens, ready)
            return await whole_answer(tokens, ready())
        finally:
            record.repairs = ready().parser.repairs
            await tokens.aclose()  # whatever is under way ends in the engine


def _is_quick(body: bytes) -> bool:
    """Whether a request is prepared sooner than a thread takes over: short text, nothing to fetch or to compile.

    What is wrongly held for slow costs a tenth of a millisecond; a wrongly quick one would hold up every stream. So
    field names count wherever they stand, and a body that may spell them with escapes is not quick.
    """
    return len(body) <= _QUICK_BYTES and _SLOW_FIELDS.search(body) is None


async def count_tokens(request: web.Request) -> web.Response:
    """Count a Messages request's prompt."""
    counted = await asyncio.to_thread(request.app[_GATEWAY].counter.count, await _read(request))
    request[_TOLD].thought = counted.thought.header()
    return _json({"input_tokens": counted.num_tokens})


async def tokenize(request: web.Request) -> web.Response:
    """Return the tokens of a text or a chat."""
    counter = request.app[_GATEWAY].counter
    return _json(await asyncio.to_thread(counter.tokenize, await _read(request)))


async def detokenize(request: web.Request) -> web.Response:
    """Return the text of tokens, control tokens included."""
    counter = request.app[_GATEWAY].counter
    return _json(await asyncio.to_thread(counter.detokenize, await _read(request)))


async def list_models(request: web.Request) -> web.Response:
    """List the one model served here, for OpenAI's and Anthropic's clients alike."""
    card = _model_card(request.app[_GATEWAY])
    model_id = card["id"]
    return _json(
        {"object": "list", "data": [card], "has_more": False, "first_id": model_id, "last_id": model_id}
    )


async def get_model(request: web.Request) -> web.Response:
    """Describe the served model."""
    gateway = request.app[_GATEWAY]
    asked = request.match_info["model"]
    if asked != gateway.settings.model_id:
        raise UnknownModel(asked, gateway.settings.model_id)
    return _json(_model_card(gateway))


async def describe(request: web.Request) -> web.Response:
    """Return the OpenAPI description of every route of this module."""
    description = render_description(request.app[_GATEWAY].settings.model_id)
    return web.Response(body=description, content_type="application/json")


def _caller(request: web.Request) -> Caller:
    return request.get(CALLER) or Caller(address=request.remote or "")


async def _read(request: web.Request) -> bytes:
    return await request.app[_GATEWAY].gate.read(request, _caller(request))


def _model_card(gateway: _Gateway) -> dict[str, str | int]:
    started = datetime.fromtimestamp(gateway.started_at, UTC)
    return {
        "id": gateway.settings.model_id,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "deskfleet",
        "max_model_len": gateway.engine.max_model_len,
        "type": "model",
        "display_name": gateway.settings.model_id,
        "created_at": started.isoformat().replace("+00:00", "Z"),
    }


def _json(data: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), status=status, content_type="application/json")


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    request[RECORD].key = _caller(request).key
    if not isinstance(response, EventStream):  # which was made with them
        told = request.get(_TOLD) or _Told()
        response.headers.update(_own_headers(request.app[_GATEWAY], request[RECORD], told))


def _own_headers(gateway: _Gateway, record: RequestRecord, told: _Told) -> dict[str, str]:
    """What is said of a request beside its answer, as far as it is known."""
    headers = {"x-request-id": record.request_id}
    if record.path.startswith(_ANTHROPIC_ROUTES):
        headers["request-id"] = record.own_id  # where Anthropic's clients look
    if told.thought is not None:
        headers[THINKING_HEADER] = told.thought
    if told.max_tokens is not None:
        headers[MAX_TOKENS_HEADER] = str(told.max_tokens)
        replicas = gateway.replicas
        if replicas is not None and not replicas.exact_tokens:
            headers[TOKENS_HEADER] = RETOKENISED
    return headers


def _boundary(protocols: Mapping[str, GeneratingProtocol]) -> Middleware:
    """Return the middleware that turns every exception into an answer: a status, or an event once a stream is open."""

    @web.middleware
    async def boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = request[RECORD]
        protocol = protocols.get(record.path)
        request[REQUEST_ID] = own_id = f"{protocol.id_prefix if protocol else 'req-'}{os.urandom(16).hex()}"
        record.own_id = own_id
        record.request_id = record.request_id or own_id
        request[_TOLD] = _Told()
        try:
            return await handler(request)
        except Exception as error:  # noqa: BLE001  the boundary: whatever it is becomes an answer
            return await _answer_error(request, record, error)

    return boundary


async def _answer_error(request: web.Request, record: RequestRecord, error: Exception) -> web.StreamResponse:
    opened = request.get(OPEN_STREAM)
    if isinstance(error, ConnectionResetError):
        # The client is gone, there is nobody to answer. A begun response ends the connection quietly.
        record.outcome = "cancelled"
        if opened is not None:
            response: web.StreamResponse = opened.response
            return response
        raise error
    failure = describe_failure(error)
    record.error = failure.message
    if failure.status >= 500:
        unforeseen = None if isinstance(error, DeskfleetError) else error
        logger.error("%s: %s", record.request_id, failure.message, exc_info=unforeseen)
    if opened is not None:
        return await fail_stream(opened, failure)
    style: ErrorStyle = "anthropic" if request.path.startswith(_ANTHROPIC_ROUTES) else "openai"
    answer = web.Response(
        body=failure.to_json(style, request[REQUEST_ID]),
        status=failure.status,
        content_type="application/json",
        headers=failure.headers,
    )
    if isinstance(error, web.HTTPMethodNotAllowed):
        answer.headers["Allow"] = error.headers["Allow"]
    return answer


__all__ = ["CALLER", "REQUEST_ID", "Middleware", "Policies", "create_app", "serve", "serving"]
