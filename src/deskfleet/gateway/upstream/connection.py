"""HTTP to one engine: look-ups with a limit, and streams that end one way or another.

Owns time limits, and what makes an answer a stream. Knows nothing of sockets or of what is said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from deskfleet import __version__
from deskfleet.endpoint import GenerateRequest
from deskfleet.errors import ConfigError, DeskfleetError, EngineError
from deskfleet.gateway.upstream.events import EventSplitter
from deskfleet.gateway.upstream.failures import UpstreamFailed, UpstreamLost, failure_of, shorten
from deskfleet.gateway.upstream.http_client import HttpClient, Response
from deskfleet.gateway.upstream.options import UpstreamOptions
from deskfleet.gateway.upstream.silence import SilenceWatch

_MAX_BODY_BYTES = 32 * 2**20
_ERROR_BODY_S = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer to a look-up."""

    status: int
    body: bytes


def parse_url(url: str) -> str:
    """Return an engine's root URL, without `/v1` or a slash at the end. Raises ConfigError for what is none."""
    text = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # of names too
        is_good = False
    if not is_good or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is no address of an engine", hint="e.g. http://10.0.0.1:8000")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("an upstream's address may not hold a password", hint="use --upstream-key-file")
    return text


class Connection:
    """The HTTP client of one upstream. Opened by `open` inside an event loop, closed by `close`."""

    def __init__(self, url: str, options: UpstreamOptions) -> None:
        self.url = parse_url(url)
        self._options = options
        self._client: HttpClient | None = None

    async def open(self) -> None:
        """Make the client; nothing is sent yet. Does nothing when it is open."""
        if self._client is not None:
            return
        headers = {
            "User-Agent": f"deskfleet/{__version__}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        }
        if self._options.api_key is not None:
            headers["Authorization"] = f"Bearer {self._options.api_key}"
        self._client = HttpClient(self.url, headers, self._options.connect_s)

    async def close(self) -> None:
        """Close every connection. Safe to call twice."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def get(self, path: str, *, timeout_s: float) -> Answer:
        """Ask and return whatever status comes. Raises UpstreamUnreachable, or UpstreamFailed after `timeout_s`."""
        try:
            return await self._ask("GET", path, None, timeout_s)
        except UpstreamLost:  # as when a server closes an idle connection while we write into it
            return await self._ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: bytes, *, timeout_s: float) -> Answer:
        """As `get`, with a body, and never asked twice."""
        return await self._ask("POST", path, body, timeout_s)

    async def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._live.request(method, path, body, timeout_s=timeout_s)
                with closing(response):
                    return Answer(response.status, await _read_whole(response))
        except TimeoutError as error:
            raise UpstreamFailed(f"{self.url} did not answer {path} within {timeout_s:.0f} s") from error

    async def events(
        self, path: str, body: bytes, request: GenerateRequest, watch: SilenceWatch
    ) -> EventStream:
        """Send `body` and return the stream of events that answers it; whoever has it closes it.

        Raises what `failure_of` makes of an answer other than 200, and UpstreamFailed for one that is no stream.
        """
        is_stream = False

        def begin(response: Response) -> bool:
            # Both engines send the head at once, and the first tokens when they have them: who waits for those is
            # woken for those.
            nonlocal is_stream
            is_stream = response.status == 200 and response.content_type == "text/event-stream"
            if is_stream:
                watch.start(response.fail)
            return is_stream

        try:
            response = await self._send(path, body, watch, begin)
            if not is_stream:
                with closing(response):
                    raise await self._refusal(response, request)
        except BaseException:
            watch.stop()
            raise
        return EventStream(response, watch, self.url)

    async def _send(
        self, path: str, body: bytes, watch: SilenceWatch, on_head: Callable[[Response], bool]
    ) -> Response:
        limit_s = self._options.answer_s
        rest_s = watch.rest_s
        if rest_s is not None:
            limit_s = min(limit_s, rest_s)
        try:
            return await self._live.request("POST", path, body, timeout_s=limit_s, on_head=on_head)
        except TimeoutError as error:
            if limit_s == rest_s:
                raise EngineError("the deadline passed before the engine answered") from error
            raise UpstreamFailed(
                f"{self.url} took a request and did not answer for {limit_s:.0f} s"
            ) from error

    async def _refusal(self, response: Response, request: GenerateRequest) -> DeskfleetError:
        """Return the exception for an answer that is no stream of events."""
        body = b""
        with suppress(TimeoutError):  # the status says enough
            async with asyncio.timeout(_ERROR_BODY_S):
                body = await _read_whole(response)
        if response.status != 200:
            retry_after = response.headers.get("retry-after")
            return failure_of(response.status, body, self.url, request=request, retry_after=retry_after)
        if not body:
            return UpstreamFailed(f"{self.url} answered 200 with an empty body")
        kind = response.content_type or "no media type"
        shown = shorten(body[:80].decode(errors="replace"))
        return UpstreamFailed(f"{self.url} answered with {kind}, not with a stream of events: {shown}")

    @property
    def _live(self) -> HttpClient:
        if self._client is None:
            raise UpstreamFailed(f"the connection to {self.url} is closed")
        return self._client


class EventStream:
    """The events of one answer, which `watch` watches already.

    Closed early, it closes the connection: so both engines learn that nobody listens.
    """

    def __init__(self, response: Response, watch: SilenceWatch, url: str) -> None:
        self._response = response
        self._watch = watch
        self._url = url
        self._splitter = EventSplitter()

    async def next(self) -> list[bytes]:
        """Return the payloads of the events that have come together since, none at the end.

        Raises UpstreamFailed when the stream breaks off, and whatever the watch gives it up with.
        """
        watch = self._watch
        watch.heard()
        while data := await self._response.read():
            if payloads := self._splitter.push(data):
                watch.pause()  # a slow reader of ours is no silence of theirs
                return payloads
            watch.heard()
        if not self._splitter.is_empty:
            raise UpstreamFailed(f"{self._url} broke off in the middle of an event")
        return []

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come, read or not."""
        return self._response.is_whole

    def close(self) -> None:
        """Listen no more. Safe to call twice."""
        self._watch.stop()
        self._response.close()


async def _read_whole(response: Response) -> bytes:
    """Return a body, of a very long one the beginning."""
    body = bytearray()
    while len(body) < _MAX_BODY_BYTES and (data := await response.read()):
        body += data
    return bytes(body[:_MAX_BODY_BYTES])


__all__ = ["Answer", "Connection", "EventStream", "parse_url"]
