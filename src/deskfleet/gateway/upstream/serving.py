"""The gateway alone, in front of engines that run elsewhere: the order of its launch, and its end. Prints nothing.

    read the vocabulary -> is the port free -> reach the engines -> one token from each -> open the port

Nothing listens before an engine has said one token with a finite log probability. Knows nothing of terminals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from deskfleet.endpoint import Endpoint
from deskfleet.errors import ConfigError
from deskfleet.gateway.app import serving
from deskfleet.gateway.observation import ObservationSettings
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.gateway.upstream.failures import UpstreamFailed
from deskfleet.gateway.upstream.http_upstream import HttpUpstream
from deskfleet.gateway.upstream.options import UpstreamOptions
from deskfleet.gateway.upstream.router import ReplicaStatus, Router, RouterOptions
from deskfleet.gateway.upstream.sglang import SglangUpstream
from deskfleet.gateway.upstream.vllm import VllmUpstream
from deskfleet.gateway.upstream.vocabulary import Vocabulary

EngineName = Literal["vllm", "sglang"]

ENGINES: dict[EngineName, type[HttpUpstream]] = {"vllm": VllmUpstream, "sglang": SglangUpstream}

_WAIT_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """Which engines, how to talk to them, and where to answer (`gateway`).

    `wait_s`: how long to wait at the start until one of them answers; engines take minutes to load.
    """

    gateway: GatewaySettings
    urls: tuple[str, ...]
    engine: EngineName
    upstream: UpstreamOptions = field(default_factory=UpstreamOptions)
    router: RouterOptions = field(default_factory=RouterOptions)
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """No engine answers yet; `reason` is what the first of them said."""

    reason: str


@dataclass(frozen=True, slots=True)
class FrontReady:
    """The port is open and answers come out of it. `exact_tokens`: every engine sends its own token ids."""

    endpoint: Endpoint
    engine: EngineName
    exact_tokens: bool
    replicas: tuple[ReplicaStatus, ...]


FrontEvent = StillWaiting | FrontReady


def _ignore(event: FrontEvent) -> None:
    """Take an event and do nothing."""


async def serve_front(
    options: FrontOptions,
    *,
    check_address: Callable[[str, int], None] = lambda host, port: None,
    on_event: Callable[[FrontEvent], None] = _ignore,
    until: asyncio.Event | None = None,
) -> None:
    """Serve until `until` is set, at whatever stage that happens. `check_address` may refuse host and port early.

    Raises CheckpointError or ConfigError for a checkpoint or an engine that does not fit, EngineError when no engine
    answers in time. An engine that dies later ends nothing: it is tried again until it comes back.
    """
    launch = asyncio.ensure_future(_launch(options, check_address, on_event))
    stop = asyncio.ensure_future((until or asyncio.Event()).wait())
    try:
        await asyncio.wait((launch, stop), return_when=asyncio.FIRST_COMPLETED)
        if launch.done():
            await launch
    finally:
        stop.cancel()
        launch.cancel()
        await asyncio.gather(launch, return_exceptions=True)


async def _launch(
    options: FrontOptions,
    check_address: Callable[[str, int], None],
    on_event: Callable[[FrontEvent], None],
) -> None:
    settings = options.gateway
    kind = ENGINES[options.engine]
    vocabulary = await asyncio.to_thread(Vocabulary.from_checkpoint, settings.checkpoint)
    upstreams = [kind(url, vocabulary, options.upstream) for url in options.urls]
    check_address(settings.host, settings.port)
    router = await _connected(Router(upstreams, options.router), options.wait_s, on_event)
    try:
        async with serving(router, replace(settings, observation=_watched(settings))) as endpoint:
            on_event(FrontReady(endpoint, options.engine, router.exact_tokens, router.replicas))
            await asyncio.Event().wait()
    finally:
        await router.close()


def _watched(settings: GatewaySettings) -> ObservationSettings:
    """What is observed, silent streams left out: each of ours ends itself, and knows more of its engine."""
    observation = settings.observation or ObservationSettings()
    return replace(observation, health=replace(observation.health, stall_s=None))


async def _connected(router: Router, wait_s: float, on_event: Callable[[FrontEvent], None]) -> Router:
    """Enter the router once an engine answers. Raises EngineError when none has within `wait_s`."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + wait_s
    said: str | None = None
    while True:
        try:
            return await router.__aenter__()
        except UpstreamFailed as error:
            if loop.time() >= until_s:
                raise
            if error.message != said:
                said = error.message
                on_event(StillWaiting(error.message))
            await asyncio.sleep(min(_WAIT_STEP_S, max(until_s - loop.time(), 0.0)))


def parse_urls(text: str) -> tuple[str, ...]:
    """Return the addresses in `URL[,URL...]`. Raises ConfigError for an empty one."""
    urls = tuple(part.strip() for part in text.split(","))
    if not all(urls):
        raise ConfigError(
            f"--upstream {text!r} holds an empty address", hint="e.g. http://a:8000,http://b:8000"
        )
    return urls


__all__ = [
    "ENGINES",
    "EngineName",
    "FrontEvent",
    "FrontOptions",
    "FrontReady",
    "StillWaiting",
    "parse_urls",
    "serve_front",
]
