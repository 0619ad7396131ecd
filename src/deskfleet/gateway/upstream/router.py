"""Several replicas of one model as one `TokenEngine`: who gets a request, and who gets it when the first one fails.

A request goes to the replica that has seen the longest beginning of its prompt, unless that one has too much to do
compared with the others; without such a replica, to the one with the least to do. Before the first token, and only
then, a failed request is sent to another replica. Replicas that fail are left alone for a while and then tried by
requests of our own. Knows nothing of how a replica is talked to.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import Self

from msgspec import Struct

from deskfleet.endpoint import EngineStats, GenerateRequest, TokenChunk
from deskfleet.errors import ConfigError, DeskfleetError, EngineError, RequestError
from deskfleet.gateway.engram_rows import RankRows
from deskfleet.gateway.upstream.breaker import Breaker, BreakerState
from deskfleet.gateway.upstream.failures import (
    UpstreamBusy,
    UpstreamFailed,
    UpstreamLost,
    UpstreamUnreachable,
)
from deskfleet.gateway.upstream.http_upstream import HttpUpstream
from deskfleet.gateway.upstream.prefixes import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_BLOCKS,
    PrefixMemory,
    block_keys,
)

logger = logging.getLogger(__name__)

_RETRY_PAUSES_S = (0.1, 0.5)  # before the same replica is asked again, when there is no other
_WATCH_S = 0.25  # how often somebody looks whether a probe is due


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """How replicas are chosen.

    A replica may be chosen for its prefix while it has fewer than `min_bound` requests, or fewer than `balance`
    times the average. `first_pause_s` and `longest_pause_s` are how long a failed replica is left alone.
    """

    block_size: int = DEFAULT_BLOCK_SIZE
    max_blocks: int = DEFAULT_MAX_BLOCKS
    min_bound: int = 4
    balance: float = 1.5
    max_failures: int = 3
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica at one moment. `max_model_len` is 0 until it has answered once.

    `reason` says why it gets no requests, or what failed last.
    """

    url: str
    engine: str
    state: BreakerState
    reason: str | None
    model: str
    max_model_len: int
    exact_tokens: bool
    num_running: int
    num_requests: int
    num_failures: int
    last_token_age_s: float | None


@dataclass(slots=True)
class _Replica:
    upstream: HttpUpstream
    breaker: Breaker
    is_connected: bool = False
    num_running: int = 0
    num_requests: int = 0
    num_failures: int = 0
    last_chosen: int = 0
    last_token_s: float | None = None
    stats: EngineStats = field(default_factory=EngineStats)


class Router:
    """Replicas behind the TokenEngine contract. `async with Router(upstreams) as engine: ...`.

    Entering connects; at least one replica must answer, the others are tried again and again. `max_model_len` is the
    smallest of those that answered then: one that comes later with less is not used.
    """

    def __init__(self, upstreams: Sequence[HttpUpstream], options: RouterOptions | None = None) -> None:
        """Raises ConfigError without upstreams, and for the same one twice."""
        self.options = options or RouterOptions()
        if not upstreams:
            raise ConfigError("a gateway needs at least one upstream", hint="--upstream http://HOST:PORT")
        urls = [upstream.url for upstream in upstreams]
        if twice := next((url for url in urls if urls.count(url) > 1), None):
            raise ConfigError(f"{twice} is named twice among the upstreams", hint="name each replica once")
        self._replicas = [_Replica(upstream, self._new_breaker()) for upstream in upstreams]
        self._prefixes = PrefixMemory(self.options.max_blocks)
        self._max_model_len = 0
        self._num_chosen = 0
        self._watcher: asyncio.Task[None] | None = None
        self._probes: set[asyncio.Task[None]] = set()

    def _new_breaker(self) -> Breaker:
        return Breaker(self.options.max_failures, self.options.first_pause_s, self.options.longest_pause_s)

    # --- contract -------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self._max_model_len

    @property
    def exact_tokens(self) -> bool:
        """Whether every replica that has answered sends its own token ids."""
        return all(replica.upstream.exact_tokens for replica in self._replicas if replica.is_connected)

    @property
    def failure(self) -> str | None:
        """None while any replica may answer. Unlike an engine's, it becomes None again when one comes back."""
        for replica in self._replicas:
            if replica.breaker.state == "closed":
                return None
        reasons = dict.fromkeys(replica.breaker.reason or "not tried yet" for replica in self._replicas)
        return "; ".join(reasons)

    @property
    def replicas(self) -> tuple[ReplicaStatus, ...]:
        """How each replica is, in the order in which they were named."""
        return tuple(map(_status, self._replicas))

    @property
    def rows(self) -> tuple[RankRows, ...]:
        """What the ranks of each replica told last of Engram rows."""
        return tuple(rank for replica in self._replicas for rank in replica.upstream.rows)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the tokens of one request as they come (see TokenEngine.generate).

        Raises UpstreamBusy when no replica takes more requests, and otherwise what the last replica said.
        """
        loop = asyncio.get_running_loop()
        course = _Course(request, self._keys(request), loop.time())
        while True:
            index = self._choose(course)
            replica = self._begin(index, course)
            has_begun = False
            chunks = replica.upstream.generate(course.remaining())
            try:
                try:
                    async for chunk in chunks:
                        has_begun = True
                        if replica.breaker.reason is not None:
                            replica.breaker.succeed()
                        replica.last_token_s = loop.time()
                        yield chunk
                finally:
                    await chunks.aclose()
                return
            except UpstreamFailed as error:
                replica.num_failures += 1
                self._fail(index, error)
                if has_begun:
                    raise
                course.note(index, error)
            except RequestError as error:
                replica.breaker.succeed()  # who refuses with a sentence lives
                if has_begun or not isinstance(error, UpstreamBusy):
                    raise
                course.note(index, error)
            finally:
                replica.num_running -= 1
            if not self._usable(course.tried):
                await course.pause_or_raise(index)

    async def stats(self) -> EngineStats:
        """Return the replicas' counters, added up; one that does not answer keeps those it told last.

        Raises EngineError when none answers.
        """
        usable = [self._replicas[index] for index in self._usable(frozenset())]
        answers = await asyncio.gather(
            *(replica.upstream.stats() for replica in usable), return_exceptions=True
        )
        told = []
        for replica, answer in zip(usable, answers, strict=True):
            if isinstance(answer, EngineStats):
                replica.stats = answer
                told.append(replica)
            elif not isinstance(answer, EngineError):
                raise answer
        if not told:
            raise EngineError(self.failure or "no replica has told its counters")
        return _added([(replica.stats, replica in told) for replica in self._replicas])

    # --- choosing -------------------------------------------------------------------------------------

    def _keys(self, request: GenerateRequest) -> list[int]:
        """What replicas are chosen by; nothing where there is but one."""
        if len(self._replicas) == 1:
            return []
        return block_keys(request.prompt_token_ids, self.options.block_size)

    def _usable(self, tried: Collection[int]) -> list[int]:
        """The replicas that may be sent a request and are not among `tried`."""
        return [
            index
            for index, replica in enumerate(self._replicas)
            if replica.breaker.state == "closed" and index not in tried
        ]

    def _choose(self, course: _Course) -> int:
        """Return the index of the replica to ask. Raises UpstreamFailed when there is none."""
        if course.again is not None:
            index, course.again = course.again, None
            return index
        usable = self._usable(course.tried)
        if not usable:
            raise UpstreamFailed(self.failure or "every replica has failed this request")
        if len(usable) == 1:
            return usable[0]
        loads = [replica.num_running for replica in self._replicas]
        matched = self._prefixes.match(course.keys, len(self._replicas))
        average = (sum(loads[index] for index in usable) + 1) / len(usable)
        bound = max(self.options.min_bound, math.ceil(self.options.balance * average))
        known = [index for index in usable if matched[index] and loads[index] < bound]
        if known:
            return max(known, key=lambda index: (matched[index], -loads[index], -index))
        return min(usable, key=lambda index: (loads[index], self._replicas[index].last_chosen, index))

    def _begin(self, index: int, course: _Course) -> _Replica:
        """Return a replica that is about to be asked, and count that."""
        replica = self._replicas[index]
        self._num_chosen += 1
        replica.last_chosen = self._num_chosen
        replica.num_running += 1
        replica.num_requests += 1
        self._prefixes.add(course.keys, index)
        return replica

    # --- life -----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self._connect()
        except BaseException:
            await self.close()
            raise
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection: streams under way fail. Safe to call twice."""
        tasks = [*self._probes, *([self._watcher] if self._watcher is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.upstream.close() for replica in self._replicas))

    async def _connect(self) -> None:
        """Connect to every replica and let each say one token. Raises what the first failed with when none can."""
        answers = await asyncio.gather(
            *(self._greet(replica) for replica in self._replicas), return_exceptions=True
        )
        failures = [answer for answer in answers if answer is not None]
        # A wrong address is one thing; a replica that must never be asked is refused at once.
        for failure in failures:
            if not isinstance(failure, EngineError):
                raise failure
        for index, answer in enumerate(answers):
            if isinstance(answer, EngineError):
                self._fail(index, answer, at_once=True)
            else:
                self._replicas[index].breaker.succeed()
        if len(failures) == len(self._replicas):
            raise failures[0]
        self._max_model_len = min(
            replica.upstream.max_model_len for replica in self._replicas if replica.is_connected
        )

    async def _greet(self, replica: _Replica) -> None:
        """Ask a replica what it is, and for one token: answers before traffic."""
        await replica.upstream.connect()
        if replica.upstream.max_model_len < self._max_model_len:
            raise UpstreamFailed(
                f"{replica.upstream.url} now serves a context of {replica.upstream.max_model_len} tokens, "
                f"less than the {self._max_model_len} of this gateway",
                hint="start the gateway again",
            )
        await replica.upstream.probe()
        replica.is_connected = True

    def _fail(self, index: int, error: EngineError, *, at_once: bool = False) -> None:
        replica = self._replicas[index]
        was = replica.breaker.state
        at_once = at_once or isinstance(error, UpstreamUnreachable)
        replica.breaker.fail(asyncio.get_running_loop().time(), error.message, at_once=at_once)
        if was == "closed" and replica.breaker.state == "open":
            logger.warning("%s gets no more requests: %s", replica.upstream.url, error.message)

    async def _watch(self) -> None:
        """Probe replicas that have failed, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_WATCH_S, self.options.first_pause_s))
            for index, replica in enumerate(self._replicas):
                if replica.breaker.try_probe(loop.time()):
                    task = asyncio.create_task(self._probe(index))
                    self._probes.add(task)
                    task.add_done_callback(self._probes.discard)

    async def _probe(self, index: int) -> None:
        replica = self._replicas[index]
        try:
            await self._greet(replica)
        except DeskfleetError as error:
            failure = error if isinstance(error, EngineError) else EngineError(error.message)
            self._fail(index, failure)
            return
        self._prefixes.forget(index)  # it was started again, or may have been
        replica.breaker.succeed()
        logger.warning("%s answers again", replica.upstream.url)


class _Course(Struct):
    """Where one request has been sent and what came of it."""

    request: GenerateRequest
    keys: list[int]
    _started_s: float
    tried: set[int] = set()  # of its own, as msgspec has it
    again: int | None = None
    _failures: list[UpstreamBusy | UpstreamFailed] = []
    _num_pauses: int = 0

    def note(self, index: int, failure: UpstreamBusy | UpstreamFailed) -> None:
        """Replica `index` has failed before the first token."""
        self.tried.add(index)
        self._failures.append(failure)

    async def pause_or_raise(self, index: int) -> None:
        """No other replica is left: wait a little where that may help, else raise.

        It may help where nothing was asked yet: the connection was refused, or lost before an answer began.
        """
        latest = self._failures[-1]
        is_worth_it = isinstance(latest, UpstreamUnreachable | UpstreamLost)
        if is_worth_it and self._num_pauses < len(_RETRY_PAUSES_S):
            pause_s = _RETRY_PAUSES_S[self._num_pauses]
            rest_s = self.remaining().timeout_s
            if rest_s is None or rest_s > pause_s:
                self._num_pauses += 1
                self.again = index
                await asyncio.sleep(pause_s)
                return
        busy = [failure for failure in self._failures if isinstance(failure, UpstreamBusy)]
        raise min(busy, key=lambda each: each.retry_after_s) if busy else latest

    def remaining(self) -> GenerateRequest:
        """Return the request with what is left of its time. An id of its own for every try."""
        request = self.request
        if self._failures:
            request = replace(request, request_id=f"{request.request_id}-try{len(self._failures) + 1}")
        if request.timeout_s is None:
            return request
        gone_s = asyncio.get_running_loop().time() - self._started_s
        return replace(request, timeout_s=max(request.timeout_s - gone_s, 0.0))


def _status(replica: _Replica) -> ReplicaStatus:
    upstream = replica.upstream
    age_s = None
    if replica.last_token_s is not None:
        age_s = asyncio.get_running_loop().time() - replica.last_token_s
    return ReplicaStatus(
        url=upstream.url,
        engine=upstream.engine,
        state=replica.breaker.state,
        reason=replica.breaker.reason,
        model=upstream.model,
        max_model_len=upstream.max_model_len if replica.is_connected else 0,
        exact_tokens=upstream.exact_tokens,
        num_running=replica.num_running,
        num_requests=replica.num_requests,
        num_failures=replica.num_failures,
        last_token_age_s=age_s,
    )


def _added(parts: Sequence[tuple[EngineStats, bool]]) -> EngineStats:
    """Sum of stats. Of a replica that does not answer now (False), the counters stay and the gauges are 0."""
    total = EngineStats()
    for stats, is_fresh in parts:
        changes = {}
        for each in fields(stats):
            kind = each.metadata.get("kind")
            if kind is None or (kind == "gauge" and not is_fresh):
                continue
            ours, theirs = getattr(total, each.name), getattr(stats, each.name)
            changes[each.name] = max(ours, theirs) if each.name == "oldest_wait_s" else ours + theirs
        total = replace(total, **changes)
    return total


__all__ = ["ReplicaStatus", "Router", "RouterOptions"]
