"""Requests that are refused for what they ask of this server rather than for how they are written.

Owns each refusal's status, code and headers. Knows nothing of JSON or of protocols, which spell them their own way.

    NotAuthenticated     401   no key, or none of ours                     WWW-Authenticate
    NotPermitted         403   the key is known and may not do this
    TooManyRequests      429   a limit of the key, or a full queue         Retry-After
    BodyBroken           400   a body that is not what its headers announce
    BodyTooSlow          408   a body that does not arrive
    BodyTooLarge         413   more bytes than the limit
    WaitedTooLong        503   its turn did not come in time               Retry-After
    DeadlinePassed       504   it ran for longer than a request may
    ServerStopping       503   the server is draining                      Retry-After
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from deskfleet.errors import RequestError


class Refusal(RequestError):
    """One request is not served now, or not to this caller. The message is meant for the client."""

    status: ClassVar[int] = 400
    code: ClassVar[str] = "refused"

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that go with the status."""
        return {}


class NotAuthenticated(Refusal):
    """The request carries no key, or one that is not valid here. The message never repeats it."""

    status = 401
    code = "invalid_api_key"

    def __init__(self, message: str, *, asks_browser: bool = False, hint: str | None = None) -> None:
        """`asks_browser` makes a browser ask its user for a password, which is the key."""
        super().__init__(message, hint=hint)
        self._scheme = "Basic" if asks_browser else "Bearer"

    @property
    def headers(self) -> Mapping[str, str]:
        """The way to send a key."""
        return {"WWW-Authenticate": f'{self._scheme} realm="deskfleet"'}


class NotPermitted(Refusal):
    """The caller's key is valid and may not do this."""

    status = 403
    code = "not_permitted"


class BodyBroken(Refusal):
    """The body cannot be read as its headers say: neither its chunks nor its compression are what they should be."""

    code = "broken_body"

    @property
    def headers(self) -> Mapping[str, str]:
        """Nobody knows where the next request would begin."""
        return {"Connection": "close"}


class BodyTooSlow(Refusal):
    """The body of the request did not arrive in time."""

    status = 408
    code = "request_timeout"

    @property
    def headers(self) -> Mapping[str, str]:
        """The rest of the body would be taken for another request."""
        return {"Connection": "close"}


class BodyTooLarge(Refusal):
    """The request has more bytes than it may have."""

    status = 413
    code = "request_too_large"

    @property
    def headers(self) -> Mapping[str, str]:
        """What has not been read of the body is not read any more."""
        return {"Connection": "close"}


class _Later(Refusal):
    """Refused now, and worth another try."""

    def __init__(self, message: str, *, retry_after_s: float, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> Mapping[str, str]:
        """Whole seconds, rounded up, at least one."""
        return {"Retry-After": str(max(math.ceil(self.retry_after_s), 1))}


class TooManyRequests(_Later):
    """A limit of the caller's key is used up, or too many requests wait already."""

    status = 429
    code = "rate_limit_exceeded"


class WaitedTooLong(_Later):
    """The request's turn did not come in time."""

    status = 503
    code = "queue_timeout"


class ServerStopping(_Later):
    """The server takes no new requests, or gave up waiting for running ones."""

    status = 503
    code = "server_stopping"


class DeadlinePassed(Refusal):
    """The request ran for longer than it may."""

    status = 504
    code = "deadline_passed"


__all__ = [
    "BodyBroken",
    "BodyTooLarge",
    "BodyTooSlow",
    "DeadlinePassed",
    "NotAuthenticated",
    "NotPermitted",
    "Refusal",
    "ServerStopping",
    "TooManyRequests",
    "WaitedTooLong",
]
