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

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE

from deskfleet.endpoint import TokenChunk
from deskfleet.errors import EngineError
from deskfleet.gateway.failures import Failure
from deskfleet.gateway.protocol import AnswerParser, Watch

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

    `headers` are all there will be, besides those of every event stream and of HTTP itself. Head and chunks are spelled
    here: what they are is known, and aiohttp would find it out for each (docs/decisions/0025-time-to-first-token.md).
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**_HEADERS, **headers})
        self._head = b""
        self._is_chunked = True
        self._last = b""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Make the head, which goes with the first event. Does nothing when that has been done."""
        if self._payload_writer is not None or self._eof_sent:
            return self._payload_writer
        version = request.version
        self._is_chunked = version >= HttpVersion11  # else the body ends with the connection
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive and self._is_chunked
        lines = "".join([f"{name}: {value}\r\n" for name, value in self.headers.items()])
        if self._is_chunked:
            lines += _CHUNKED if self._keep_alive else _CHUNKED_AND_CLOSED
        self._head = (
            f"HTTP/{version.major}.{version.minor} 200 OK\r\n{lines}Date: {rfc822_formatted_time()}\r\n\r\n"
        ).encode()
        writer = self._payload_writer = request.writer
        return writer

    async def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        """Send events. Waits while the client is behind. Raises ConnectionResetError when it has gone."""
        writer = self._payload_writer
        if writer is None or self._eof_sent:
            raise RuntimeError("events are written after the head, and before the end")
        if not data:
            return  # an empty chunk would be the end
        if self._is_chunked:
            data = b"%b%x\r\n%b\r\n" % (self._head, len(data), bytes(data))
        elif self._head:
            data = self._head + data
        self._head = b""
        await writer.write(data)

    def keep(self, last: bytes) -> None:
        """Send the last events when the request is over, as whole answers are.

        Whoever asks again as soon as he has his answer then need not wait until all about it has been counted.
        """
        self._last = last

    async def write_eof(self, data: bytes = b"") -> None:
        """Send the last events, if there are any left, and the end of the body with them."""
        writer = self._payload_writer
        if self._eof_sent or writer is None:
            return
        data = data or self._last
        if self._is_chunked:
            last = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data = b"%b%b0\r\n\r\n" % (self._head, last)
        elif self._head:
            data = self._head + data
        self._head = b""
        await writer.write_eof(data)
        self._eof_sent = True
        self._payload_writer = None


class OpenStream(NamedTuple):
    """A stream whose headers are sent, and whoever knows how its protocol spells an error."""

    response: EventStream
    parser: AnswerParser


OPEN_STREAM: web.RequestKey[OpenStream] = web.RequestKey("open_stream", OpenStream)
"""The event stream a request has begun to answer with: from then on errors are events, not statuses."""


class Ready(NamedTuple):
    """What an answer needs from its first token on. `response` is where its events go, if it is sent in events."""

    parser: AnswerParser
    watchers: Sequence[Watch]
    response: EventStream


_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events into blocks
    "Server": SERVER_SOFTWARE,
}
_CHUNKED = "Transfer-Encoding: chunked\r\n"
_CHUNKED_AND_CLOSED = f"{_CHUNKED}Connection: close\r\n"
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
        has_ended = chunk.finish_reason is not None
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
            last = (parser.encode(events) if events else b"") + parser.end()
            if has_ended and has_taken_everything(request.transport):
                response.keep(last)  # the engine has no more to do with it, so that nothing can take long
            else:
                await response.write_eof(last)
            return response
        if events:
            await response.write(parser.encode(events))
    raise EngineError(_CUT_SHORT)


def has_taken_everything(transport: asyncio.Transport | None) -> bool:
    """Whether nothing waits to be sent, so that what is sent next is gone at once."""
    return transport is not None and not transport.get_write_buffer_size()


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
    response.keep(b"")
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
