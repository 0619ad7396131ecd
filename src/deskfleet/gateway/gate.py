"""What stands between clients and one engine: keys, limits, policies and the queue, put together for `app.py`.

Owns in which order they meet a request, and reading its body within the limits. Decides nothing itself.

    key -> may anything come in -> body -> size, nesting -> images fetched -> (protocol) -> policies -> queue -> engine
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from weakref import WeakKeyDictionary

from aiohttp import web
from aiohttp.typedefs import Middleware

from deskfleet.gateway.admission import Admission, Ticket
from deskfleet.gateway.image_fetch import ImageFetcher
from deskfleet.gateway.keys import require_key
from deskfleet.gateway.observation import ObservationSettings
from deskfleet.gateway.policies.completion_cap import HEADER as MAX_TOKENS_HEADER
from deskfleet.gateway.policies.contract import Caller, Draft, Policy
from deskfleet.gateway.policies.images import IMAGE_LIMITS, ImageSettings
from deskfleet.gateway.policies.line_runs import Decode
from deskfleet.gateway.policies.request_limits import RequestLimits, check_body
from deskfleet.gateway.policy_file import Policies, PolicySettings, PolicyStore
from deskfleet.gateway.refusals import BodyBroken, BodyTooLarge, BodyTooSlow
from deskfleet.gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)

STOPPING = "the server is stopping and takes no new requests"


class Gate:
    """The gate of one gateway. `policies.counters` and `admission.state()` are what there is to show of it."""

    def __init__(self, settings: GatewaySettings, decode: Decode) -> None:
        """`decode` is the served model's tokens to text, special tokens included."""
        self._model_id = settings.model_id
        store = settings.policies or PolicyStore()
        store.put_on(_said_by(settings))
        self.policies = Policies(store, decode)
        self.admission = Admission(
            store.snapshot.settings.admission,
            engine_max_running=settings.max_running,
            counters=self.policies.counters,
        )
        self._health = store.snapshot.settings.health
        store.on_reload(self._change)
        self._fetcher = ImageFetcher()
        self._unread_s: WeakKeyDictionary[asyncio.BaseTransport, float] = WeakKeyDictionary()

    @property
    def header_timeout_s(self) -> float:
        """How long a connection may take to send the headers of its next request, as the settings say now."""
        return self.policies.store.snapshot.settings.request_limits.header_timeout_s

    def door(self, caller_key: web.RequestKey[Caller]) -> Middleware:
        """Return the middleware that lets in who may come in, and says who it is under `caller_key`."""
        return require_key(self.policies.store.ring, caller_key)

    async def read(self, request: web.Request, caller: Caller) -> bytes:
        """Read a body, checked, with the images in it that were to be fetched.

        From here on, what reads images in this task or in threads that it starts keeps the caller's limits. Raises
        RequestError for a body beyond the limits or an image that cannot be fetched, ServerStopping.
        """
        self.admission.check_open()
        settings = self.policies.settings_for(self._model_id, caller.key)
        self._limit_unread(request, settings.request_limits.unread_timeout_s)
        body = await _read_within(request, settings.request_limits)
        if len(body) > _QUICK_BYTES:
            await asyncio.to_thread(check_body, body, settings.request_limits)
        else:
            check_body(body, settings.request_limits)
        IMAGE_LIMITS.set(settings.images)
        return await self._fetcher.inline_images(body, settings.images)

    def observed(self, own: ObservationSettings) -> ObservationSettings:
        """Return what is observed, with the thresholds of health as the settings file says them.

        Whoever holds the door has it closed for want of memory: two who decide about that would not agree.
        """
        said = self._health if own.intake is None else self._health.without_memory()
        return replace(own, health=said.over(own.health))

    def policies_for(self, caller: Caller) -> Sequence[Policy]:
        """Return the policies of a request, in their order."""
        return self.policies.for_caller(self._model_id, caller.key)

    def admitted(self, draft: Draft) -> AbstractAsyncContextManager[Ticket]:
        """Wait for a turn, and hold it for as long as the block runs. Raises as `Admission.admitted` does."""
        share = self.policies.settings_for(draft.model_id, draft.caller.key).share
        return self.admission.admitted(draft, share)

    async def drain(self) -> bool:
        """Take nothing new and wait for what runs, as long as the settings say. Returns whether all of it finished."""
        return await self.admission.drain(STOPPING)

    def _limit_unread(self, request: web.Request, seconds: float) -> None:
        """Have the system end a connection whose client takes nothing for so long; aiohttp would wait for ever.

        Data that nobody acknowledges counts, and so does a full window: a client that is there and does not read.
        """
        transport = request.transport
        if transport is None or self._unread_s.get(transport) == seconds:
            return  # said for an earlier request of the connection
        self._unread_s[transport] = seconds
        connection = transport.get_extra_info("socket")
        if connection is not None and _TCP_USER_TIMEOUT is not None:
            with suppress(OSError):  # no TCP: whoever is on this machine
                connection.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, math.ceil(seconds * 1000))

    def _change(self, settings: PolicySettings) -> None:
        self.admission.change(settings.admission)
        if settings.health != self._health:
            logger.warning("the settings of health are others now; they hold from the server's next start")


_TCP_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)

_QUICK_BYTES = 256 * 1024
"""Up to so many bytes are checked where they are read: it takes less time than a thread would."""


def _said_by(settings: GatewaySettings) -> PolicySettings:
    """Return what a program has said in code; a settings file lies over it."""
    return PolicySettings(
        images=ImageSettings(
            max_images=settings.max_images,
            max_image_bytes=settings.max_image_bytes,
            max_image_pixels=settings.max_image_pixels,
        ),
        request_limits=RequestLimits.model_construct(max_body_bytes=settings.max_body_bytes),
    )


async def _read_within(request: web.Request, limits: RequestLimits) -> bytes:
    """Read a body that is neither longer nor slower than it may be."""
    content = request.content
    announced = request.content_length
    if announced is not None and announced > limits.max_body_bytes:
        raise BodyTooLarge(f"the body has {announced} bytes, more than {limits.max_body_bytes}")
    body = bytearray()
    try:
        if content.is_eof() and "Content-Encoding" not in request.headers:
            whole = content.read_nowait()  # as most: it came with the headers, and nothing is waited for
            if len(whole) > limits.max_body_bytes:
                raise BodyTooLarge(f"the body has {len(whole)} bytes, more than {limits.max_body_bytes}")
            return whole
        async with asyncio.timeout(limits.body_timeout_s):
            await _read_into(body, request, limits)
    except TimeoutError:
        raise BodyTooSlow(
            f"the body did not arrive within {limits.body_timeout_s:g} s; {len(body)} bytes had"
        ) from None
    except web.RequestPayloadError:
        request.content.feed_eof()  # else aiohttp would read on, to see the error once more
        encoding = request.headers.get("Content-Encoding")
        what = f"Content-Encoding {encoding!r}" if encoding else "chunks"
        raise BodyBroken(f"the headers announce {what}, and the body is something else") from None
    return bytes(body)


async def _read_into(body: bytearray, request: web.Request, limits: RequestLimits) -> None:
    async for block in request.content.iter_any():
        body += block
        if len(body) > limits.max_body_bytes:
            if "Content-Encoding" in request.headers:
                request.content.feed_eof()  # the rest would be unpacked to be thrown away
            raise BodyTooLarge(f"the body has more than {limits.max_body_bytes} bytes")


__all__ = ["MAX_TOKENS_HEADER", "STOPPING", "Gate"]
