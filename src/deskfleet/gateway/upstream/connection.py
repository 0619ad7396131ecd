"""HTTP to one engine: look-ups with a limit, and streams that end one way or another.

Owns the client session, time limits and the translation of network errors. Knows nothing of what is said.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from deskfleet.endpoint import GenerateRequest
from deskfleet.errors import ConfigError, EngineError
from deskfleet.gateway.upstream.events import EventSplitter
from deskfleet.gateway.upstream.failures import (
    UpstreamFailed,
    UpstreamLost,
    UpstreamUnreachable,
    failure_of,
    shorten,
)
from deskfleet.gateway.upstream.options import UpstreamOptions
from deskfleet.gateway.upstream.silence import SilenceWatch

_MAX_BODY_BYTES = 32 * 2**20
_KEEPALIVE_S = (
    4.0  # below the 5 s after which uvicorn closes, so that we rarely write into a closing connection
)
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
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
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
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the session; nothing is sent yet. Does nothing when it is open."""
        if self._session is not None:
            return
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._options.api_key is not None:
            headers["Authorization"] = f"Bearer {self._options.api_key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._options.connect_s),
        )

    async def close(self) -> None:
        """Close every connection. Safe to call twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, *, timeout_s: float) -> Answer:
        """Ask and return whatever status comes. Raises UpstreamUnreachable, or UpstreamFailed after `timeout_s`."""
        return await self._ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: bytes, *, timeout_s: float) -> Answer:
        """As `get`, with a body."""
        return await self._ask("POST", path, body, timeout_s)

    async def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Answer:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._live.request(method, self.url + path, data=body, allow_redirects=False) as response,
            ):
                content = await response.content.read(_MAX_BODY_BYTES)
                while not response.content.at_eof() and len(content) < _MAX_BODY_BYTES:
                    content += await response.content.read(_MAX_BODY_BYTES - len(content))
                return Answer(response.status, content)
        except aiohttp.ClientError as error:
            raise self._lost(error) from error
        except TimeoutError as error:
            raise UpstreamFailed(f"{self.url} did not answer {path} within {timeout_s:.0f} s") from error
        except OSError as error:
            raise self._lost(error) from error

    async def events(
        self, path: str, body: bytes, request: GenerateRequest, watch: SilenceWatch
    ) -> AsyncGenerator[list[bytes], None]:
        """Send `body` and yield the payloads of the answer's events, those that came together in one list.

        Leaving early closes the connection, which is how both engines learn that nobody listens. Raises what
        `failure_of` makes of an answer other than 200, and UpstreamFailed when the stream breaks off, is no stream,
        or is given up by `watch`.
        """
        response = await self._send(path, body, watch)
        try:
            await self._check_head(response, request)
            watch.start(response.content.set_exception)
            splitter = EventSplitter()
            while data := await response.content.readany():
                watch.heard()
                if payloads := splitter.push(data):
                    watch.pause()  # a slow reader of ours is no silence of theirs
                    yield payloads
                    watch.heard()
            if not splitter.is_empty:
                raise UpstreamFailed(f"{self.url} broke off in the middle of an event")
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error
        finally:
            watch.stop()
            response.close()  # a response that was read to its end has already given its connection back

    async def _send(self, path: str, body: bytes, watch: SilenceWatch) -> aiohttp.ClientResponse:
        limit_s = self._options.answer_s
        rest_s = watch.rest_s
        if rest_s is not None:
            limit_s = min(limit_s, rest_s)
        try:
            async with asyncio.timeout(limit_s):
                return await self._live.post(self.url + path, data=body, allow_redirects=False)
        except aiohttp.ClientError as error:
            failure = self._lost(error)
            raise (
                failure if isinstance(failure, UpstreamUnreachable) else UpstreamLost(failure.message)
            ) from error
        except TimeoutError as error:
            if limit_s == rest_s:
                raise EngineError("the deadline passed before the engine answered") from error
            raise UpstreamFailed(
                f"{self.url} took a request and did not answer for {limit_s:.0f} s"
            ) from error
        except OSError as error:
            raise UpstreamLost(self._lost(error).message) from error

    async def _check_head(self, response: aiohttp.ClientResponse, request: GenerateRequest) -> None:
        if response.status == 200 and response.content_type == "text/event-stream":
            return
        body = b""
        try:
            async with asyncio.timeout(_ERROR_BODY_S):
                body = await response.content.read(_MAX_BODY_BYTES)
        except TimeoutError:
            pass  # the status says enough
        if response.status != 200:
            retry_after = response.headers.get("Retry-After")
            raise failure_of(response.status, body, self.url, request=request, retry_after=retry_after)
        if not body:
            raise UpstreamFailed(f"{self.url} answered 200 with an empty body")
        shown = shorten(body[:80].decode(errors="replace"))
        raise UpstreamFailed(
            f"{self.url} answered with {response.content_type}, not with a stream of events: {shown}"
        )

    def _lost(self, error: Exception) -> UpstreamFailed:
        """Return our exception for a network error."""
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            reason = getattr(error, "strerror", None) or "no connection in time"
            return UpstreamUnreachable(f"nothing answers at {self.url}: {str(reason).lower()}")
        if isinstance(error, aiohttp.ClientPayloadError):
            return UpstreamFailed(f"{self.url} broke off in the middle of its answer")
        return UpstreamFailed(f"{self.url} closed the connection: {error or type(error).__name__}")

    @property
    def _live(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise UpstreamFailed(f"the connection to {self.url} is closed")
        return self._session


__all__ = ["Answer", "Connection", "parse_url"]
