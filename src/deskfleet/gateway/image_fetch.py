"""Images that a request names by URL. Owns what may be fetched and from where; turns their URLs into data URLs.

Off unless the settings say otherwise. A server that fetches what strangers name can be made to ask its own network
things, so only public addresses are ever connected to, and the check stands where the connection is made: every socket
is made by `_PublicSockets`, which looks at the very address it will connect to. What a name resolved to a moment ago,
what it resolves to on a redirect, how an address is spelled: none of it matters then. Names of which any address is not
public are refused as well, before anything is sent.

Not public: everything that is not global unicast, of IPv4 or IPv6; and every IPv6 address that stands for an IPv4 one
(mapped, NAT64, 6to4, Teredo), whatever it stands for. No proxy of the environment is used, no cookie or key is sent, no
encoding is undone, and http is never gone back to from https. How many, how large, how long and which ports: the
settings (policies/images.py).

Knows of a request only where in its JSON images stand. What it puts there is checked like any other image.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from deskfleet.errors import RequestError
from deskfleet.gateway.policies.images import ImageSettings

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
IsAllowed = Callable[[Address], bool]
Resolve = Callable[[str, int], Awaitable[list[tuple[socket.AddressFamily, str]]]]

_MEDIA = frozenset({"image/png", "image/jpeg", "image/jpg", "image/webp"})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NO_CONTENT = frozenset({"tools", "response_format", "text", "metadata", "arguments", "input"})
_MAX_URL_LENGTH = 2048
_MAX_DEPTH = 16
_BLOCK_BYTES = 64 * 1024

_NEVER = tuple(
    map(
        ipaddress.ip_network,
        (
            # IPv4: RFC 6890 and what came after it.
            "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
            "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24",
            "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
            "224.0.0.0/4", "240.0.0.0/4",
            # IPv6: within global unicast, what is not an ordinary host: IETF protocols (Teredo, ORCHID),
            # documentation, 6to4, AS112, documentation, segment routing.
            "2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20", "5f00::/16",
        ),
    )
)  # fmt: skip
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})


class NotFetched(RequestError):
    """One image could not be fetched, or may not be. The message says which and why, never what was answered."""


def is_public(address: Address) -> bool:
    """Whether `address` belongs to an ordinary host of the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None or address not in _GLOBAL_UNICAST:
            return False  # mapped, compatible and NAT64 addresses lie outside of it
        if (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
            return False
    return not any(address.version == network.version and address in network for network in _NEVER)


class _Refused(OSError):
    """An address that is not connected to. It is not told: what this network looks like is nobody's business."""


class _PublicSockets:
    """Makes sockets for allowed addresses only: the last place that every connection passes."""

    def __init__(self, is_allowed: IsAllowed) -> None:
        self._is_allowed = is_allowed

    def __call__(self, info: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, _, address = info
        if not self._is_allowed(ipaddress.ip_address(address[0])):
            raise _Refused
        return socket.socket(family, kind, protocol)


class _CheckedResolver(AbstractResolver):
    """Resolves a name once, and refuses it when any of its addresses is not allowed."""

    def __init__(self, is_allowed: IsAllowed, resolve: Resolve) -> None:
        self._is_allowed = is_allowed
        self._resolve = resolve

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of `host`."""
        found = await self._resolve(host, port)
        for _, address in found:
            if not self._is_allowed(ipaddress.ip_address(address)):
                raise _Refused
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=kind,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, address in found
        ]

    async def close(self) -> None:
        """Nothing is held open."""


async def _resolve_by_system(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, str(address[0])) for family, _, _, _, address in found]


class ImageFetcher:
    """Fetches images. One for a gateway; at most `max_at_once` are under way at the same time."""

    def __init__(
        self,
        *,
        is_allowed: IsAllowed = is_public,
        resolve: Resolve = _resolve_by_system,
        max_at_once: int = 16,
    ) -> None:
        """`is_allowed` and `resolve` are for tests: both decide where connections go."""
        self._is_allowed = is_allowed
        self._resolve = resolve
        self._places = asyncio.Semaphore(max_at_once)

    async def inline_images(self, body: bytes, limits: ImageSettings) -> bytes:
        """Return the body of a request with every image URL in it replaced by a data URL of what it names.

        A body without such URLs, and one that is no JSON, comes back as it is. Raises NotFetched naming the place.
        """
        if not limits.fetch.enabled or b"http" not in body:
            return body
        try:
            request = msgspec.json.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            return body  # the parser will say what is wrong with it
        places = list(_find_urls(request, ""))
        if not places:
            return body
        if len(places) > limits.fetch.max_urls:
            raise NotFetched(
                f"{len(places)} image URLs, more than {limits.fetch.max_urls}", param=places[-1].path
            )
        try:
            async with asyncio.timeout(limits.fetch.timeout_s), self._session() as session:
                await self._fetch_all(session, places, limits)
        except TimeoutError:
            raise NotFetched(
                f"the images were not fetched within {limits.fetch.timeout_s:g} s", param=places[0].path
            ) from None
        return msgspec.json.encode(request)

    async def _fetch_all(
        self, session: aiohttp.ClientSession, places: list[_Place], limits: ImageSettings
    ) -> None:
        tasks = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._fetch(session, place, limits)) for place in places]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        for place, task in zip(places, tasks, strict=True):
            place.put(*task.result())

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        connector = aiohttp.TCPConnector(
            resolver=_CheckedResolver(self._is_allowed, self._resolve),
            socket_factory=_PublicSockets(self._is_allowed),
            use_dns_cache=False,
            force_close=True,
        )
        async with aiohttp.ClientSession(
            connector=connector,
            trust_env=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={
                "Accept": ", ".join(sorted(_MEDIA)),
                "Accept-Encoding": "identity",
                "User-Agent": "deskfleet",
            },
        ) as session:
            yield session

    async def _fetch(
        self, session: aiohttp.ClientSession, place: _Place, limits: ImageSettings
    ) -> tuple[str, bytes]:
        """Return media type and bytes of one image, redirects followed."""
        url = _check_url(place.url, place, limits)
        async with self._places:
            for _ in range(limits.fetch.max_redirects + 1):
                try:
                    async with session.get(url, allow_redirects=False) as response:
                        if response.status not in _REDIRECTS:
                            return await _read_image(response, place, limits)
                        target = response.headers.get("Location", "")
                except (aiohttp.ClientError, OSError, ValueError) as error:
                    raise _not_fetched(place, _describe(error)) from None
                url = _check_url(target, place, limits, base=url)
        raise NotFetched(f"{place.path}: more than {limits.fetch.max_redirects} redirects", param=place.path)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a URL stands in a request: `holder[name]`, or an Anthropic source, which is replaced as a whole."""

    path: str
    url: str
    holder: dict[str, Any]
    name: str
    is_source: bool = False

    def put(self, media: str, data: bytes) -> None:
        """Put the image there."""
        encoded = base64.b64encode(data).decode()
        if self.is_source:
            self.holder[self.name] = {"type": "base64", "media_type": media, "data": encoded}
        else:
            self.holder[self.name] = f"data:{media};base64,{encoded}"


def _find_urls(value: Any, path: str, depth: int = 0) -> Iterator[_Place]:
    """Yield every image URL: of image_url parts (Chat Completions, Responses) and url sources (Messages)."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from _find_urls(each, f"{path}[{index}]", depth + 1)
    if not isinstance(value, dict):
        return
    kind, inner, source = value.get("type"), value.get("image_url"), value.get("source")
    if kind in ("image_url", "input_image"):
        if _is_web(inner):
            yield _Place(f"{path}.image_url", inner, value, "image_url")
        elif isinstance(inner, dict) and _is_web(inner.get("url")):
            yield _Place(f"{path}.image_url.url", inner["url"], inner, "url")
    elif kind == "image" and isinstance(source, dict):
        if source.get("type") == "url" and _is_web(source.get("url")):
            yield _Place(f"{path}.source.url", source["url"], value, "source", is_source=True)
    else:
        for name, each in value.items():
            # `input` is the conversation at the top, and a call's arguments everywhere else.
            if name not in _NO_CONTENT or (name == "input" and not path):
                yield from _find_urls(each, f"{path}.{name}" if path else name, depth + 1)


def _is_web(url: object) -> TypeGuard[str]:
    return isinstance(url, str) and url[:8].lower().startswith(("http://", "https://"))


def _check_url(text: str, place: _Place, limits: ImageSettings, *, base: URL | None = None) -> URL:
    """Return the URL to connect to. Raises NotFetched for one that is not plain http or https to an allowed port."""
    reason = None
    url = URL()
    try:
        if len(text) > _MAX_URL_LENGTH:
            raise ValueError("too long")
        url = URL(text) if base is None else base.join(URL(text))
        if url.scheme not in ("http", "https"):
            reason = f"{url.scheme or 'no'} scheme"
        elif base is not None and base.scheme == "https" and url.scheme == "http":
            reason = "a redirect from https to http"
        elif url.user is not None or url.password is not None:
            reason = "a user name in the URL"
        elif not url.host:
            reason = "no host"
        elif url.port not in limits.fetch.ports:
            reason = f"port {url.port}, which is none of {', '.join(map(str, limits.fetch.ports))}"
    except ValueError:
        reason = "not a URL"
    if reason is not None:
        raise _not_fetched(place, reason)
    return url


async def _read_image(
    response: aiohttp.ClientResponse, place: _Place, limits: ImageSettings
) -> tuple[str, bytes]:
    media = response.content_type.lower()
    reason = None
    if response.status != 200:
        reason = f"the answer was {response.status}"
    elif media not in _MEDIA:
        reason = "the answer is not PNG, JPEG or WebP"
    elif response.headers.get("Content-Encoding", "identity").lower() != "identity":
        reason = "the answer is compressed"
    elif (response.content_length or 0) > limits.max_image_bytes:
        reason = f"the image has {response.content_length} bytes, more than {limits.max_image_bytes}"
    data = bytearray()
    if reason is None:
        async for block in response.content.iter_chunked(_BLOCK_BYTES):
            data += block
            if len(data) > limits.max_image_bytes:
                reason = f"the image has more than {limits.max_image_bytes} bytes"
                break
    if reason is not None:
        raise _not_fetched(place, reason)
    return ("image/jpeg" if media == "image/jpg" else media), bytes(data)


def _not_fetched(place: _Place, reason: str) -> NotFetched:
    return NotFetched(f"{place.path}: not fetched: {reason}", param=place.path)


def _describe(error: BaseException) -> str:
    """Return what went wrong with a connection, looking through what the HTTP library has wrapped it in."""
    link: BaseException | None = error
    for _ in range(8):
        if isinstance(link, _Refused):
            return "its host has no public address"
        link = link and (getattr(link, "os_error", None) or link.__cause__ or link.__context__)
    return f"its host did not answer as it should ({type(error).__name__})"


__all__ = ["ImageFetcher", "NotFetched", "is_public"]
