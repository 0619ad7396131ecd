"""Answers on the wire: one JSON object, or server-sent events.

Owns how an answer leaves the process and what a half-sent stream is told when something breaks. Knows nothing
of prompts or of the engine's insides: it pulls token chunks and sends what the parser makes of them.

Nothing is held back: every engine chunk is written, as one write, before the next one is asked for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from aiohttp import web
from deepseek_recipe import ChatCompletionChunk, ChatCompletionResponse

from deskfleet.endpoint import GenerateRequest, TokenChunk, TokenEngine
from deskfleet.errors import EngineError
from deskfleet.gateway.failures import Failure
from deskfleet.gateway.metrics import GatewayMetrics
from deskfleet.gateway.protocol import AnswerParser

OPEN_STREAM: web.RequestKey[web.StreamResponse] = web.RequestKey("open_stream", web.StreamResponse)
"""The event stream a request has begun to answer with: from then on errors are events, not statuses."""

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events into blocks
}


@asynccontextmanager
async def generating(
    engine: TokenEngine, request: GenerateRequest
) -> AsyncIterator[AsyncIterator[TokenChunk]]:
    """Run one generation; leaving the block early cancels it in the engine."""
    tokens = engine.generate(request)
    try:
        yield tokens
    finally:
        close = getattr(tokens, "aclose", None)
        if close is not None:
            await close()


async def stream_answer(
    request: web.Request, tokens: AsyncIterator[TokenChunk], parser: AnswerParser, metrics: GatewayMetrics
) -> web.StreamResponse:
    """Send the answer as events. They begin with the first token, so that errors before it have a status."""
    response: web.StreamResponse | None = None
    async for chunk in tokens:
        metrics.count_chunk(chunk)
        events = parser.push(chunk)
        if response is None:
            response = await _open(request)
        if events:
            await response.write(_encode_events(events))
        if parser.finished:
            break
    if response is None or not parser.finished:
        raise EngineError("the engine stopped answering before the end")
    await response.write(f"data: {ChatCompletionResponse.sse_done_data()}\n\n".encode())
    await response.write_eof()
    return response


async def whole_answer(
    tokens: AsyncIterator[TokenChunk], parser: AnswerParser, metrics: GatewayMetrics
) -> web.Response:
    """Send the answer as one chat.completion object."""
    answer = parser.whole_answer()
    async for chunk in tokens:
        metrics.count_chunk(chunk)
        answer.add(parser.push(chunk))
        if parser.finished:
            break
    if not parser.finished:
        raise EngineError("the engine stopped answering before the end")
    return web.Response(text=answer.to_json(), content_type="application/json")


async def fail_stream(response: web.StreamResponse, failure: Failure) -> web.StreamResponse:
    """Tell a client whose stream is open what went wrong, then end the stream and the connection."""
    response.force_close()
    await response.write(b"data: " + failure.to_json() + b"\n\n")
    await response.write_eof()
    return response


async def _open(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers=_HEADERS)
    await response.prepare(request)
    request[OPEN_STREAM] = response
    return response


def _encode_events(chunks: Iterable[ChatCompletionChunk]) -> bytes:
    return "".join([f"data: {chunk.to_json()}\n\n" for chunk in chunks]).encode()


__all__ = ["OPEN_STREAM", "fail_stream", "generating", "stream_answer", "whole_answer"]
