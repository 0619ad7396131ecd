"""Answers on the wire: one JSON object, or server-sent events.

Owns how an answer leaves the process and what a half-sent stream is told when something breaks. Knows nothing
of prompts, of protocols or of the engine's insides: it pulls token chunks, shows them to the policies' watchers, and
sends what the parser makes of them.

Nothing is held back: every engine chunk is written, as one write, before the next one is asked for. What an answer
needs before its first token is made while the engine works on that (`Later`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from aiohttp import web

from deskfleet.endpoint import TokenChunk
from deskfleet.errors import EngineError
from deskfleet.gateway.failures import Failure
from deskfleet.gateway.protocol import AnswerParser, Watch


class OpenStream(NamedTuple):
    """A stream whose headers are sent, and whoever knows how its protocol spells an error."""

    response: web.StreamResponse
    parser: AnswerParser


OPEN_STREAM: web.RequestKey[OpenStream] = web.RequestKey("open_stream", OpenStream)
"""The event stream a request has begun to answer with: from then on errors are events, not statuses."""

T = TypeVar("T")


class Later(Generic[T]):
    """What is made at the loop's next turn, when the engine has the request, or when it is first asked for."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: T | None = None
        asyncio.get_running_loop().call_soon(self)

    def __call__(self) -> T:
        """Return it."""
        if self._made is None:
            self._made = self._make()
        return self._made


class EventStream(web.StreamResponse):
    """A stream whose head waits for the first event: one write, and one packet, until the first token is there.

    `headers` are all there will be, besides those of every event stream and of HTTP itself.
    """

    _send_headers_immediately = False

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**_HEADERS, **headers})


class Ready(NamedTuple):
    """What an answer needs from its first token on. `response` is where its events go, if it is sent in events."""

    parser: AnswerParser
    watchers: Sequence[Watch]
    response: EventStream


_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events into blocks
}
_CUT_SHORT = "the engine stopped answering before the end"


async def stream_answer(
    request: web.Request,
    tokens: AsyncIterator[TokenChunk],
    get_ready: Callable[[], Ready],
) -> web.StreamResponse:
    """Send the answer as events. They begin with the first event, so that errors before it have a status."""
    ready: Ready | None = None
    async for chunk in tokens:
        ready = ready or get_ready()
        parser, watchers, response = ready
        for watch in watchers:
            chunk = watch(chunk)
        events = parser.push(chunk)
        if not response.prepared:
            if not (events or parser.finished):
                continue  # the head would wait for an event; until then a failure still has a status
            await response.prepare(request)
            request[OPEN_STREAM] = OpenStream(response, parser)
        if parser.finished:
            # The last events, what ends the stream and what ends the body: one write, and one packet.
            await response.write_eof((parser.encode(events) if events else b"") + parser.end())
            return response
        if events:
            await response.write(parser.encode(events))
    raise EngineError(_CUT_SHORT)


async def whole_answer(tokens: AsyncIterator[TokenChunk], ready: Ready) -> web.Response:
    """Send the answer as one object."""
    parser, watchers, _ = ready
    answer = parser.whole_answer()
    async for chunk in tokens:
        for watch in watchers:
            chunk = watch(chunk)
        answer.add(parser.push(chunk))
        if parser.finished:
            break
    if not parser.finished:
        raise EngineError(_CUT_SHORT)
    return web.Response(text=answer.to_json(), content_type="application/json")


async def fail_stream(stream: OpenStream, failure: Failure) -> web.StreamResponse:
    """Tell a client whose stream is open what went wrong, then end the stream and the connection."""
    response = stream.response
    response.force_close()
    await response.write(stream.parser.fail(failure))
    await response.write_eof()
    return response


__all__ = [
    "OPEN_STREAM",
    "EventStream",
    "Later",
    "OpenStream",
    "Ready",
    "fail_stream",
    "stream_answer",
    "whole_answer",
]
