"""From a checkpoint to an open port: the order of a launch. Owns the sequence and its end, prints nothing.

    open the checkpoint -> check the layout -> is the port free -> start the ranks -> one token -> (trial) -> open

Nothing listens before every rank is ready and one greedy token has come out with finite logits: answers before
traffic. A trial, where one is asked for, sees the same gateway on a free port of this machine alone. Knows nothing
of terminals or signals; the caller says when to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import socket
import threading
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import psutil

from deskfleet.endpoint import Endpoint, GenerateRequest, SamplingParams
from deskfleet.engine.client import EngineClient, EngineOptions, EngramSource, LoadedRank, LoadProgress
from deskfleet.engine.messages import Receipt
from deskfleet.engine.process import RankStarter
from deskfleet.errors import ConfigError, DeskfleetError, EngineError
from deskfleet.gateway.app import serving
from deskfleet.gateway.observation import ObservationSettings
from deskfleet.gateway.policy_file import PolicyStore
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.embedded import embedded_name
from deskfleet.model.memory import RankMemory
from deskfleet.planner.cuda import check_device, cuda_lines
from deskfleet.planner.native import RankCheck, check_rank, native_lines

_LAST_WORDS_S = 1.0  # after the engine's death, how long clients are still told of it


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve (`gateway.checkpoint`), how to run it, and where to answer.

    `starter` is where ranks come from, None: processes of this machine. `trial` is called with an address that nobody
    else knows before the port opens; what it raises ends the launch.
    """

    gateway: GatewaySettings
    engine: EngineOptions = field(default_factory=EngineOptions)
    starter: RankStarter | None = None
    trial: Callable[[str], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True)
class RanksReady:
    """Every rank is loaded and has met the others; the port is still closed.

    `memory` holds against each other what was planned for each rank and what its process reports; `receipts` say what
    each is made of, and agree.
    """

    ranks: tuple[LoadedRank, ...]
    memory: tuple[RankCheck, ...]
    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The port is open and answers come out of it."""

    endpoint: Endpoint
    ranks: tuple[LoadedRank, ...]
    memory: tuple[RankCheck, ...]
    engram: EngramSource | None

    @property
    def tp_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


ServeEvent = LoadProgress | RanksReady | Ready


def _ignore(event: ServeEvent) -> None:
    """Take an event and do nothing."""


def default_model_id(checkpoint: Path) -> str:
    """Return the name a checkpoint is served under when nobody says otherwise: its own, or its directory's."""
    return embedded_name(checkpoint) or checkpoint.resolve().name


async def serve(
    options: ServeOptions,
    *,
    on_event: Callable[[ServeEvent], None] = _ignore,
    until: asyncio.Event | None = None,
) -> None:
    """Serve a checkpoint until `until` is set, at whatever stage that happens; nothing is left running.

    Raises CheckpointError for a checkpoint that cannot be opened; ConfigError for options it was not made for;
    PackError or WrongPack for a pack of Engram rows that does not serve it;
    DeskfleetError when the port is taken, before any weight is read; EngineError (RankDied) when the launch
    check or, later, a rank fails, once the clients that were waiting have been told.
    """
    launch = asyncio.ensure_future(_launch(options, on_event))
    stop = asyncio.ensure_future((until or asyncio.Event()).wait())
    try:
        await asyncio.wait((launch, stop), return_when=asyncio.FIRST_COMPLETED)
        if launch.done():
            await launch
    finally:
        stop.cancel()
        launch.cancel()
        with contextlib.suppress(asyncio.CancelledError, DeskfleetError):
            await launch


async def _launch(options: ServeOptions, on_event: Callable[[ServeEvent], None]) -> NoReturn:
    settings = options.gateway
    checkpoint = await asyncio.to_thread(Checkpoint.open, settings.checkpoint)
    # Refuses an impossible layout.
    engine = EngineClient(checkpoint, options.engine, on_load=on_event, starter=options.starter)
    check_port(settings.host, settings.port)
    async with engine:
        ranks, memory = engine.ranks, check_memory(engine)
        if options.engine.device == "cpu":  # what is resident on the host
            engine.planned_bytes = {check.rank: check.predicted_bytes for check in memory}
        on_event(RanksReady(ranks, memory, engine.receipts))
        await check_answers(engine)
        running = settings.max_running or engine.limits.max_num_seqs
        observation = with_memory_floors(settings.observation or ObservationSettings())
        settings = replace(settings, max_running=running, observation=observation)
        if options.trial is not None:
            await _try_out(engine, in_private(settings), options.trial)
        async with serving(engine, settings) as endpoint:
            on_event(Ready(endpoint, ranks, memory, engine.engram))
            failure = await engine.wait_failed()
            await asyncio.sleep(_LAST_WORDS_S)
            raise failure


def in_private(settings: GatewaySettings) -> GatewaySettings:
    """Return settings of the same gateway for this machine alone: a free port, no keys, no log of accesses."""
    observation = settings.observation or ObservationSettings()
    policies = settings.policies
    return replace(
        settings,
        host="127.0.0.1",
        port=0,
        policies=None if policies is None else PolicyStore(policies.snapshot.settings),
        observation=replace(observation, access_log=None),
    )


async def _try_out(
    engine: EngineClient, settings: GatewaySettings, trial: Callable[[str], Awaitable[None]]
) -> None:
    """Have the engine tried through a gateway. Raises what the trial raises, or why the engine ended meanwhile."""
    async with serving(engine, settings) as endpoint:
        trying = asyncio.ensure_future(trial(endpoint.url))
        failing = asyncio.ensure_future(engine.wait_failed())
        try:
            await asyncio.wait((trying, failing), return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                raise failing.result()
            await trying
        finally:
            for task in (trying, failing):
                task.cancel()
            await asyncio.gather(trying, failing, return_exceptions=True)


def with_memory_floors(observation: ObservationSettings) -> ObservationSettings:
    """Fill in the floors of available memory that are left open: those that plans keep, scaled to this machine."""
    # Half a second of imports, which nobody waits for here: the ranks took longer to load.
    from deskfleet.planner.plan import UNIFIED_FLOOR

    health = observation.health
    most = psutil.virtual_memory().total // 20
    floor, critical = health.memory_floor_bytes, health.memory_critical_bytes
    floor = min(UNIFIED_FLOOR.rest_bytes, most) if floor is None else floor
    critical = min(UNIFIED_FLOOR.peak_bytes, floor // 2) if critical is None else critical
    return replace(
        observation, health=replace(health, memory_floor_bytes=floor, memory_critical_bytes=critical)
    )


def check_memory(engine: EngineClient) -> tuple[RankCheck, ...]:
    """Plan every rank of a loaded engine and compare; on a GPU, what that holds. Raises EngineError while it loads."""
    return tuple(_check(engine, memory) for memory in engine.memory)


def _check(engine: EngineClient, memory: RankMemory) -> RankCheck:
    if memory.device is None:
        lines = native_lines(engine.plan, engine.limits, memory.rank, with_drafts=engine.with_drafts)
        return check_rank(lines, memory)
    lines = cuda_lines(
        engine.plan,
        engine.limits,
        memory.rank,
        max_step_tokens=engine.max_num_batched_tokens,
        with_drafts=engine.with_drafts,
    )
    return check_device(lines, memory)


async def check_answers(engine: EngineClient) -> None:
    """Generate one greedy token. Raises EngineError unless it is in the vocabulary and its logits are finite."""
    config = engine.checkpoint.config
    request = GenerateRequest(
        request_id=f"launch-check-{uuid.uuid4().hex}",
        prompt_token_ids=(config.bos_token_id,),
        sampling=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1),
    )
    chunks = [chunk async for chunk in engine.generate(request)]
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    if len(logprobs) != 1:
        raise EngineError(f"the launch check asked for one token and got {len(logprobs)}")
    token_id, logprob = logprobs[0].token_id, logprobs[0].logprob
    if not (0 <= token_id < config.vocab_size and math.isfinite(logprob)):
        raise EngineError(f"the launch check got token {token_id} with log probability {logprob}")


def check_port(host: str, port: int) -> None:
    """Find out now, not after minutes of loading, that the address cannot be listened on.

    The port is let go again: what listens is opened when there is something to say. Raises ConfigError for a
    host that does not exist, DeskfleetError when the port is taken or not ours to take.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"cannot listen on host {host!r}: {error.strerror or error}",
            hint="name an address of this machine, e.g. --host 127.0.0.1",
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        # As the gateway will do it: connections of a server that has just ended do not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = f"port {port} of {host} is in use"
            else:
                reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
            hint = "choose another port: --port, or port under [gateway] in fleet.toml; 0 takes any free one"
            raise DeskfleetError(reason, hint=hint) from error


class ServerThread:
    """A server beside a program that does something else: `with ServerThread(options) as ready: ...`.

    Entering returns once the port is open, and raises what `serve` raises. Leaving stops the server.
    """

    def __init__(self, options: ServeOptions, *, on_event: Callable[[ServeEvent], None] = _ignore) -> None:
        """`on_event` is called in the server's thread."""
        self._options = options
        self._on_event = on_event
        self._ready: Future[Ready] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="deskfleet-serve", daemon=True)

    def __enter__(self) -> Ready:
        self._thread.start()
        try:
            return self._ready.result()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server and wait until nothing of it is left. Safe to call twice."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except DeskfleetError as error:
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            if not self._ready.done():
                self._ready.set_exception(EngineError("the server was stopped before it was ready"))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await serve(self._options, on_event=self._tell, until=self._stop)

    def _tell(self, event: ServeEvent) -> None:
        self._on_event(event)
        if isinstance(event, Ready):
            self._ready.set_result(event)


__all__ = [
    "RanksReady",
    "Ready",
    "ServeEvent",
    "ServeOptions",
    "ServerThread",
    "check_answers",
    "check_memory",
    "check_port",
    "default_model_id",
    "in_private",
    "serve",
    "with_memory_floors",
]
