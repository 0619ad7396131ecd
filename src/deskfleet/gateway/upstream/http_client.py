"""HTTP/1.1 to one server: connections that are used again, and answers that are read as they come.

    HttpClient ── pool ── _Connection: a transport and a parser ── Response: what the reader of one answer holds

Owns the bytes of requests, the pool, TLS, and every limit on what a server may send. Parsing is llhttp's, by way of
httptools (docs/decisions/0020-own-http-client.md). Knows nothing of engines or events. What goes wrong is raised as
what it means to a request: UpstreamUnreachable (nothing was sent), UpstreamLost (no answer had begun), UpstreamFailed.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from socket import SOCK_STREAM, gaierror
from typing import cast
from urllib.parse import quote, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from deskfleet.gateway.upstream.failures import UpstreamFailed, UpstreamLost, UpstreamUnreachable

MAX_OTHER_BYTES = 64 * 2**10
"""How much may come that is no body: a head, interim answers, extensions of chunks, trailers. llhttp has no limit."""

_MAX_HELD_BYTES = 128 * 2**10  # more is left in the socket until the reader has taken what there is
_KEEPALIVE_S = (
    4.0  # below the 5 s after which uvicorn closes, so that we rarely write into a closing connection
)
_RESOLVED_S = 10.0  # as long a host's addresses are believed
_CLOSING_TURNS = 20  # of the loop, in which transports that were aborted say that they are closed


class Response:
    """One answer: its head, then its body in pieces, read by one task.

    Whoever has it calls `close`. An answer that was not read to its end takes its connection with it, which is how a
    server learns that nobody listens. `headers` have names in lower case; of several with one name, the last.
    """

    __slots__ = (
        "_connection",
        "_failure",
        "_loop",
        "_loss",
        "_on_head",
        "_timer",
        "_waiter",
        "_waits_for_body",
        "headers",
        "is_whole",
        "parts",
        "status",
    )

    def __init__(
        self,
        connection: _Connection,
        loop: asyncio.AbstractEventLoop,
        on_head: Callable[[Response], bool] | None = None,
    ) -> None:
        """`on_head` is told that the head is there, and says whether whoever waits for it would rather have something
        of the body as well: one waking less."""
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.is_whole = False
        self.parts: list[bytes] = []  # of the body, not read yet; filled by the connection
        self._connection = connection
        self._loop = loop
        self._loss: UpstreamFailed | None = None  # how the connection ended, told once `parts` are read
        self._failure: Exception | None = None  # why the reader must stop, told at once
        self._waiter: asyncio.Future[None] | None = None
        self._on_head = on_head
        self._waits_for_body = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def content_type(self) -> str:
        """The media type without parameters, empty where the server does not say."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def head(self, until_s: float) -> None:
        """Wait for the status and the headers, which must be there at `until_s` of the loop's clock.

        Raises UpstreamLost when the connection ends before them, TimeoutError.
        """
        self._timer = self._loop.call_at(until_s, self.fail, TimeoutError())
        try:
            while not self.status or not self.has_what_is_wanted:
                await self._wait()
        finally:
            self._timer.cancel()

    @property
    def has_what_is_wanted(self) -> bool:
        """Whether there is anything for whoever waits."""
        return not self._waits_for_body or bool(self.parts) or self.is_whole

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """The head is there: called by the connection."""
        self.status, self.headers = status, headers
        if self._timer is not None:
            self._timer.cancel()
        if self._on_head is not None:
            self._waits_for_body = self._on_head(self)

    async def read(self) -> bytes:
        """Return what has come of the body, at least a byte; nothing at its end.

        Raises UpstreamFailed when the connection breaks off, after what came before, and what `fail` was told at once.
        """
        parts = self.parts
        while not parts:
            if self.is_whole:
                return b""
            await self._wait()
        if self._failure is not None and not self.is_whole:
            raise self._failure
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if not self.is_whole:
            self._connection.resume()
        return data

    def fail(self, failure: Exception) -> None:
        """Have the reader raise `failure`, now or as soon as it reads on, unless everything has come."""
        self._failure = failure
        self.wake()

    def close(self) -> None:
        """Want nothing more. Safe to call twice."""
        if not self.is_whole:
            self._connection.abandon(self)

    def lose(self, loss: UpstreamFailed) -> None:
        """No more will come: called by the connection."""
        self._loss = loss
        self.wake()

    def wake(self) -> None:
        """Something has come: called by the connection."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        failure = self._failure or self._loss
        if failure is not None:
            raise failure
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class _Connection(asyncio.Protocol):
    """One connection, and the answer that comes through it now. The parser calls its `on_...`."""

    def __init__(self, client: HttpClient, loop: asyncio.AbstractEventLoop) -> None:
        self.idle_since_s = 0.0
        self._client = client
        self._loop = loop
        self._url = client.url
        self._transport: asyncio.Transport | None = None
        self._said: dict[bytes, bytes] = {}  # the fields of the head that comes now
        self.on_header = self._said.__setitem__  # the parser's, for every field
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._response: Response | None = None  # None between answers
        self._parts: list[bytes] = []  # the response's
        self._held_bytes = self._other_bytes = 0
        self._is_interim = self._is_paused = False
        self._goes_on = self._ends_with_connection = False

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(
        self, head: bytes, body: bytes | None, on_head: Callable[[Response], bool] | None = None
    ) -> Response:
        """Send a request and return its answer, of which nothing has come yet."""
        response = self._response = Response(self, self._loop, on_head)
        self._parts = response.parts
        self._said.clear()
        self._held_bytes = self._other_bytes = 0
        transport = self._transport
        if transport is None or transport.is_closing():
            self._lose(None)
        else:
            transport.writelines((head,) if body is None else (head, body))
        return response

    def resume(self) -> None:
        """The reader has taken everything."""
        self._held_bytes = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    def abandon(self, response: Response | None = None) -> None:
        """Close at once, also with a request half sent. `response`: unless it is over, and the connection another's."""
        if response is not None and response is not self._response:
            return
        self._response = None
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        """Close, and let whoever reads know."""
        self._lose(None)
        self.abandon()

    # --- transport ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        response, parser = self._response, self._parser
        if response is None or parser is None:
            self.abandon()  # nobody asked
            return
        self._other_bytes += len(data)
        try:
            parser.feed_data(data)
        except HttpParserUpgrade:
            self._break("wants to speak something other than HTTP/1.1")
        except HttpParserError as error:
            self._break(f"does not speak HTTP/1.1: {error}")
        else:
            if response.is_whole:
                self._finish()
            elif self._other_bytes > MAX_OTHER_BYTES:
                self._break(f"sent more than {MAX_OTHER_BYTES} bytes before the body or beside it")
            elif self._held_bytes > _MAX_HELD_BYTES and self._transport is not None:
                self._is_paused = True
                self._transport.pause_reading()
        if response.has_what_is_wanted:
            response.wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = self._parser = None  # the parser holds methods of ours: no cycle stays
        self._client.note_lost(self)
        response = self._response
        if response is not None and response.status and self._ends_with_connection and error is None:
            response.is_whole, self._response = True, None
            response.wake()
        else:
            self._lose(error)

    def _finish(self) -> None:
        """The answer is whole: the connection may take the next request."""
        self._response = None
        transport = self._transport
        if transport is not None and self._goes_on and not transport.get_write_buffer_size():
            self._client.take_back(self)
        else:
            self.abandon()

    def _lose(self, error: Exception | None) -> None:
        response, self._response = self._response, None
        if response is None:
            return
        if response.status:
            response.lose(UpstreamFailed(f"{self._url} broke off in the middle of its answer"))
        else:
            response.lose(UpstreamLost(f"{self._url} closed the connection{f': {error}' if error else ''}"))

    def _break(self, reason: str) -> None:
        """End a connection whose server does what it may not do. What was whole before that stays whole."""
        response = self._response
        self.abandon()
        if response is not None and not response.is_whole:
            response.lose(UpstreamFailed(f"{self._url} {reason}"))

    # --- parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._response is None or self._response.is_whole:
            raise ValueError("an answer that nobody asked for")  # the parser makes an error of its own of it

    def on_headers_complete(self) -> None:
        parser, response = self._parser, self._response
        if parser is None or response is None:
            return
        status = parser.get_status_code()
        self._is_interim = status < 200
        if self._is_interim:
            self._said.clear()
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._said.items()
        }
        self._goes_on = parser.should_keep_alive()
        self._ends_with_connection = (
            "content-length" not in headers and "chunked" not in headers.get("transfer-encoding", "").lower()
        )
        response.begin(status, headers)

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._held_bytes += len(data)
        self._other_bytes = 0

    def on_message_complete(self) -> None:
        if self._response is not None and not self._is_interim:
            self._response.is_whole = True


class HttpClient:
    """Requests to the server at `url`, a root without a slash at its end, from one event loop: the running one.

    `headers` go with every request. `connect_s` is for each of the host's addresses.
    """

    def __init__(self, url: str, headers: Mapping[str, str], connect_s: float) -> None:
        self.url = url
        self._loop = asyncio.get_running_loop()
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = _tls_context() if parts.scheme == "https" else None
        self._connect_s = connect_s
        self._path = quote(parts.path, safe="/%:@!$&'()*+,;=~").encode()
        lines = {"Host": _host_field(self._host, parts.port), "Accept": "*/*"} | dict(headers)
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("ascii")
        self._heads: dict[tuple[str, str], bytes] = {}  # of each thing that is asked: few
        self._addresses: list[str] = []
        self._resolved_s = float("-inf")
        self._idle: list[_Connection] = []  # the latest used last
        self._all: set[_Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        timeout_s: float,
        on_head: Callable[[Response], bool] | None = None,
    ) -> Response:
        """Send a request and return its answer once the head is there, or as much as `on_head` wants (see Response).

        Raises UpstreamUnreachable, UpstreamLost, UpstreamFailed for what is no HTTP, TimeoutError.
        """
        until_s = self._loop.time() + timeout_s
        connection = self._usable()
        if connection is None:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect()
            if self._is_closed:
                connection.end()
        head = self._heads.get((method, path))
        if head is None:
            line = b"%b %b%b HTTP/1.1\r\n" % (method.encode(), self._path, path.encode())
            head = self._heads[method, path] = line + self._head
        end = b"\r\n" if body is None else b"Content-Length: %d\r\n\r\n" % len(body)
        response = connection.send(head + end, body, on_head)
        try:
            await response.head(until_s)
            if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
                raise UpstreamFailed(
                    f"{self.url} answers in Content-Encoding {encoding}, though none was asked for"
                )
        except BaseException:
            response.close()
            raise
        return response

    async def close(self) -> None:
        """End every connection: answers under way fail. Safe to call twice."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._all):
            connection.end()
        for _ in range(_CLOSING_TURNS):
            if not self._all:
                break
            await asyncio.sleep(0)

    # --- connections ----------------------------------------------------------------------------------

    def _usable(self) -> _Connection | None:
        """Take a connection that is open and was used a moment ago, None when there is none."""
        oldest_s = self._loop.time() - _KEEPALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and connection.idle_since_s > oldest_s:
                return connection
            connection.end()
        return None

    async def _connect(self) -> _Connection:
        """Make a connection to the first address that takes one. Raises UpstreamUnreachable with the last's reason."""
        reason = "it has no address"
        for address in await self._resolve():
            try:
                async with asyncio.timeout(self._connect_s):
                    _, connection = await self._loop.create_connection(
                        lambda: _Connection(self, self._loop),
                        address,
                        self._port,
                        ssl=self._tls,
                        server_hostname=self._host if self._tls is not None else None,
                    )
                self._all.add(connection)  # not before: who is cancelled while connecting leaves nothing here
                return connection
            except OSError as error:  # a time-out is one too
                reason = _reason(error)
        self._resolved_s = float("-inf")  # it may have moved
        raise UpstreamUnreachable(f"nothing answers at {self.url}: {reason}")

    async def _resolve(self) -> list[str]:
        if _is_address(self._host):
            return [self._host]
        if self._loop.time() - self._resolved_s > _RESOLVED_S:
            try:
                found = await self._loop.getaddrinfo(self._host, self._port, type=SOCK_STREAM)
            except OSError as error:
                raise UpstreamUnreachable(f"nothing answers at {self.url}: {_reason(error)}") from error
            self._addresses = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
            self._resolved_s = self._loop.time()
        return self._addresses

    def note_lost(self, connection: _Connection) -> None:
        """A connection is closed: called by it."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def take_back(self, connection: _Connection) -> None:
        """A connection has nothing to do: called by it."""
        connection.idle_since_s = self._loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(_KEEPALIVE_S, self._close_old)

    def _close_old(self) -> None:
        self._sweep = None
        oldest_s = self._loop.time() - _KEEPALIVE_S
        for connection in [each for each in self._idle if each.idle_since_s <= oldest_s]:
            self._idle.remove(connection)
            connection.end()
        if self._idle:
            self._sweep = self._loop.call_later(_KEEPALIVE_S, self._close_old)


def _tls_context() -> ssl.SSLContext:
    """The system's authorities are believed, and nobody else."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _host_field(host: str, port: int | None) -> str:
    """Return what the Host header says. Raises UnicodeError for a name that no network knows."""
    name = f"[{host}]" if ":" in host else host.encode("idna").decode()
    return name if port is None else f"{name}:{port}"


def _reason(error: OSError) -> str:
    """Return why there is no connection, in a few words."""
    if isinstance(error, ssl.SSLError | gaierror) or not error.errno:
        return (error.strerror or "no connection in time").lower()
    return os.strerror(error.errno).lower()


__all__ = ["MAX_OTHER_BYTES", "HttpClient", "Response"]
