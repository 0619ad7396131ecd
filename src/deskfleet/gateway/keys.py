"""Who may talk to this server. Owns how a key is sent and recognised; the file of keys is key_file.py's.

With keys, every route asks for one except GET /health/live, also routes that do not exist. A key is sent as

    Authorization: Bearer KEY       OpenAI clients and most others
    x-api-key: KEY                  Anthropic clients
    Authorization: Basic ...        a browser, which asks its user for a password: the key, under any name

A browser sends what it was once given with every request, whoever's page made it; so from a page of another origin
such a request is refused unless it only reads.

What was sent is compared by digest: one hash and one look into a table, whatever the number of keys, then once more in
constant time. It is kept nowhere, and no message, log line or trace repeats it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from deskfleet.gateway.key_file import KeyFile
from deskfleet.gateway.policies.contract import Caller
from deskfleet.gateway.redaction import redact_logs
from deskfleet.gateway.refusals import NotAuthenticated

OPEN_PATHS = frozenset({"/health/live"})
"""What anybody may ask for."""

_MAX_LENGTH = 4096
_HINT = "send it as Authorization: Bearer KEY or as x-api-key: KEY"
_READING = frozenset({hdrs.METH_GET, hdrs.METH_HEAD})


class KeyRing:
    """The keys that are valid now. Holds digests; nothing in it shows a key."""

    def __init__(self, file: KeyFile) -> None:
        self._file = file
        self._valid = {key.digest: key for key in file.keys if key.revoked is None}

    def __len__(self) -> int:
        return len(self._valid)

    def __repr__(self) -> str:
        return f"KeyRing({len(self)} keys)"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all keys, revoked ones too."""
        return self._file.names

    def name_of(self, secret: str) -> str | None:
        """Return the name of the key that was sent, None when it is none of these."""
        digest = self._file.digest(secret[:_MAX_LENGTH])
        key = self._valid.get(digest)
        # Without the salt nobody can aim at a digest; the comparison is for whoever has read the file.
        found = hmac.compare_digest(digest, key.digest if key is not None else bytes(len(digest)))
        return key.name if key is not None and found else None


def require_key(current: Callable[[], KeyRing | None], caller_key: web.RequestKey[Caller]) -> Middleware:
    """Return the middleware that lets in whoever has a key of the ring that is `current` then, all where there is none.

    It says under `caller_key` who asks. Raises NotAuthenticated inside of whatever middleware makes answers of errors.
    """
    redact_logs("aiohttp.server", "aiohttp.web", "aiohttp.access", "aiohttp.internal", "asyncio")

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        ring = current()
        name = None
        if ring is not None and not (request.path in OPEN_PATHS and request.method in _READING):
            name = _authenticate(request, ring)
        request[caller_key] = Caller(key=name, address=request.remote or "")
        return await handler(request)

    return check_key


def _authenticate(request: web.Request, ring: KeyRing) -> str:
    asks_browser = request.method in _READING and "text/html" in request.headers.get(hdrs.ACCEPT, "")
    sent = sent_keys(request.headers)
    if not sent:
        raise NotAuthenticated("no key was sent", asks_browser=asks_browser, hint=_HINT)
    for secret, from_browser in sent:
        name = ring.name_of(secret)
        if name is None:
            continue
        if from_browser and request.method not in _READING and _is_foreign(request):
            raise NotAuthenticated("a page of another origin cannot use a browser's password", hint=_HINT)
        return name
    raise NotAuthenticated("the key is not valid here", asks_browser=asks_browser, hint=_HINT)


def sent_keys(headers: Mapping[str, str]) -> list[tuple[str, bool]]:
    """Return what was sent as keys, and whether a browser sent it by itself. Unreadable headers carry none."""
    scheme, _, rest = headers.get(hdrs.AUTHORIZATION, "").strip().partition(" ")
    sent = []
    if scheme.lower() == "bearer" and rest.strip():
        sent.append((rest.strip(), False))
    elif scheme.lower() == "basic":
        password = _password(rest.strip())
        if password:
            sent.append((password, True))
    own = headers.get("x-api-key", "").strip()
    return [*sent, (own, False)] if own else sent


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _is_foreign(request: web.Request) -> bool:
    origin = request.headers.get(hdrs.ORIGIN)
    return origin is not None and urlsplit(origin).netloc.lower() != request.host.lower()


__all__ = ["OPEN_PATHS", "KeyRing", "require_key", "sent_keys"]
