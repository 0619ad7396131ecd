"""Who may run now, who waits, and who is told to come back. Owns the queue in front of the engine.

A request runs when fewer than `max_running` do, and fewer than its key may have. Otherwise it waits, and everybody's
turn comes: work is shared between keys by weight, not between requests, so that of a key's hundred waiting requests
one at most goes before another key's first. Work is tokens: those of the prompt that no cache had, and those generated;
it is estimated when a request starts and put right when it ends. (Start-time fair queueing: each key's next request
has a start tag, where the key's work so far ends or, for a key that was away, the virtual time. The smallest tag goes
next, and is the new virtual time.)

A full queue refuses with a time after which half of it will have gone, at the rate of the last requests. It refuses not
who comes last but the last of whoever waits with most, so that no key can fill it.

Nobody waits for longer than `max_wait_s`, nor beyond the request's own deadline, which goes on while it runs. A waiting
client that leaves gives up its place at once. On draining, new and waiting requests are refused with a sentence and
running ones may finish, until a limit.

Everything happens on one event loop, in its time; nothing here needs a lock. Knows nothing of HTTP or of engines.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from dataclasses import dataclass
from types import TracebackType

from pydantic import Field

from deskfleet.endpoint import TokenChunk
from deskfleet.errors import DeskfleetError
from deskfleet.gateway.policies.contract import Draft
from deskfleet.gateway.policies.counting import Counters, CounterSpec, Place
from deskfleet.gateway.policies.section import Fraction, Seconds, Section
from deskfleet.gateway.refusals import DeadlinePassed, ServerStopping, TooManyRequests, WaitedTooLong

ADMITTED = CounterSpec("queue_admitted", "Requests that were given their turn")
WAITED_S = CounterSpec("queue_wait_seconds", "Seconds that admitted requests had waited for their turn")
REFUSED = CounterSpec("queue_refused", "Requests that the queue refused or gave up, by reason", ("reason",))
COUNTERS = (ADMITTED, WAITED_S, REFUSED)

_EXPECTED_OUTPUT = 256.0
"""Tokens of an answer, before any has been seen."""

_LEARNING = 0.1
"""How much the newest answer counts in the expected length."""

_NUM_ENDINGS = 32
"""The rate of requests is that of so many last ones."""

CUT_SHORT = "the server stopped before the answer was complete;"
"""How a request is told that it was ended at the end of draining."""

_RETRY_S = (1.0, 600.0)
_UNKNOWN_RETRY_S = 10.0


class AdmissionSettings(Section):
    """The queue in front of the engine."""

    max_running: int | None = Field(
        default=None,
        ge=1,
        description="Requests that run at once. None: as many as the engine takes, if it says.",
    )
    max_waiting: int = Field(default=256, ge=0, description="Requests that wait; more are refused with 429.")
    drain_s: Seconds = Field(
        default=30.0, ge=0, description="Seconds that running requests have to finish when the server stops."
    )


class ShareSettings(Section):
    """One key's part of the queue."""

    weight: Fraction = Field(
        default=1.0, gt=0, le=1000, description="Its part of the work, against other keys that wait."
    )
    max_running: int | None = Field(
        default=None, ge=1, description="Its requests that run at once; more wait. None: no limit of its own."
    )
    max_waiting: int | None = Field(
        default=None, ge=0, description="Its requests that wait; more are refused with 429. None: no limit."
    )
    max_wait_s: Seconds | None = Field(
        default=600.0, gt=0, description="Seconds that one waits for its turn, at most. None: no limit."
    )


class Ticket:
    """One request's way through the queue. Is a watcher as well, by which the work that was done is learnt."""

    def __init__(self, draft: Draft, share: ShareSettings, expected_output: float, number: int) -> None:
        self.request_id = draft.generate.request_id
        self.key = draft.caller.key
        self.model_id = draft.model_id
        self.share = share
        self.work = draft.num_prompt_tokens + min(float(draft.sampling.max_tokens), expected_output)
        self.number = number  # in order of arrival
        self.timeout_s = draft.generate.timeout_s
        self.turn: asyncio.Future[None] | None = None  # of one that has to wait for it
        self.arrived_at_s = asyncio.get_running_loop().time()
        self.waited_s = 0.0
        self.num_generated = 0
        self.scope: asyncio.Timeout | None = None
        self.stopping: str | None = None
        self._num_prompt_tokens = draft.num_prompt_tokens

    def push(self, chunk: TokenChunk) -> TokenChunk:
        """Return `chunk`; count its tokens."""
        self.num_generated += len(chunk.token_ids)
        self._num_prompt_tokens = chunk.num_prompt_tokens - chunk.num_cached_tokens
        return chunk

    @property
    def done_work(self) -> float:
        """Tokens that were run for this request, as far as its chunks have told."""
        return float(self._num_prompt_tokens + self.num_generated)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the queue. `position` 1 is the next."""

    request_id: str
    key: str | None
    position: int
    waited_s: float
    work: float


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """The queue at one moment. `closed` is the sentence that new requests get, None while they are taken."""

    num_running: int
    max_running: int | None
    waiting: tuple[Waiting, ...]
    closed: str | None


class Turn:
    """`async with` one request's turn: see `Admission.admitted`.

    A class, not a generator: what runs before the engine has the request is part of the time to the first token.
    """

    __slots__ = ("_admission", "_ticket")

    def __init__(self, admission: Admission, ticket: Ticket) -> None:
        self._admission = admission
        self._ticket = ticket

    async def __aenter__(self) -> Ticket:
        ticket, has_begun = self._ticket, False
        try:
            scope = await self._admission.begin(ticket)
            await scope.__aenter__()
            has_begun = True
        finally:
            if not has_begun:
                self._admission.leave(ticket)
        ticket.scope = scope
        return ticket

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ticket = self._ticket
        scope = ticket.scope
        try:
            if scope is not None:
                await scope.__aexit__(kind, error, trace)
        except TimeoutError as passed:
            error = passed
        finally:
            self._admission.leave(ticket)
        if scope is not None and isinstance(error, TimeoutError) and scope.expired():
            raise self._admission.why_ended(ticket) from None


class Admission:
    """The queue of one gateway. Everything must be called on its event loop."""

    def __init__(
        self,
        settings: AdmissionSettings | None = None,
        *,
        engine_max_running: int | None = None,
        counters: Counters | None = None,
    ) -> None:
        """`engine_max_running` is how many requests the engine runs at once, None where it does not say."""
        self._settings = settings or AdmissionSettings()
        self._engine_max_running = engine_max_running
        self._counters = counters or Counters()
        self._numbers = itertools.count()
        self._running: set[Ticket] = set()
        self._running_of: Counter[str | None] = Counter()
        self._queues: dict[str | None, deque[Ticket]] = {}  # of keys with waiting requests, each in its order
        self._work_ends: dict[
            str | None, float
        ] = {}  # virtual time up to which a key's work has been given out
        self._virtual_time = 0.0
        self._expected_output = _EXPECTED_OUTPUT
        self._endings: deque[float] = deque(maxlen=_NUM_ENDINGS + 1)  # the first is only when counting began
        self._interval_s: float | None = None  # between endings, as last known
        self._closed: str | None = None
        self._emptied = asyncio.Event()
        self._places: dict[tuple[str, str | None], tuple[Place, Place]] = {}  # where turns are counted

    # --- who asks ---------------------------------------------------------------------------------------

    def admitted(self, draft: Draft, share: ShareSettings) -> Turn:
        """Wait for a turn, and hold it for as long as the block runs.

        `draft.generate.timeout_s` holds for both. Raises TooManyRequests, WaitedTooLong, ServerStopping;
        DeadlinePassed also out of the block, which is cancelled then, as is ServerStopping at the end of draining.
        """
        return Turn(self, Ticket(draft, share, self._expected_output, next(self._numbers)))

    def check_open(self) -> None:
        """Raise ServerStopping when no new requests are taken, before anything has been read of one."""
        if self._closed is not None:
            raise ServerStopping(self._closed, retry_after_s=_UNKNOWN_RETRY_S)

    # --- who decides ------------------------------------------------------------------------------------

    def change(self, settings: AdmissionSettings) -> None:
        """Go on with other settings; who runs goes on running."""
        self._settings = settings
        self._give_turns()

    def refuse_waiting(self, error: Exception) -> None:
        """Raise `error` in every request that waits, because waiting has become pointless."""
        for queue in list(self._queues.values()):
            for ticket in list(queue):
                self._refuse(ticket, error)

    def close(self, sentence: str) -> None:
        """Take no new requests and refuse those that wait, with `sentence`. Running ones go on."""
        self._closed = sentence
        for queue in list(self._queues.values()):
            for ticket in list(queue):
                self._refuse(ticket, self._refusal_for_stop(ticket, sentence))

    async def drain(self, sentence: str, limit_s: float | None = None) -> bool:
        """Close, and wait until nothing runs; after `limit_s` (by default as set) end what still does.

        Returns whether everything finished by itself. What is ended is told so, and has left when this returns.
        """
        self.close(sentence)
        limit_s = self._settings.drain_s if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit_s):
                await self._until_empty()
        except TimeoutError:
            now_s = asyncio.get_running_loop().time()
            for ticket in self._running:
                ticket.stopping = f"{CUT_SHORT} {limit_s:g} s were not enough for it"
                if ticket.scope is not None:
                    ticket.scope.reschedule(now_s)
            await self._until_empty()
            return False
        return True

    def state(self) -> AdmissionState:
        """Return who runs and who waits, in the order of their turns as it stands now."""
        now_s = asyncio.get_running_loop().time()
        order: list[tuple[float, int, Ticket]] = []
        for key, queue in self._queues.items():
            start = self._work_ends[key]
            for ticket in queue:
                order.append((start, ticket.number, ticket))
                start += ticket.work / ticket.share.weight
        waiting = tuple(
            Waiting(ticket.request_id, ticket.key, position, now_s - ticket.arrived_at_s, ticket.work)
            for position, (_, _, ticket) in enumerate(sorted(order), 1)
        )
        return AdmissionState(len(self._running), self._max_running, waiting, self._closed)

    def retry_after_s(self) -> float:
        """Return in how many seconds half of the queue will have gone, at the rate of the last requests."""
        if len(self._endings) > 1:
            # A rate that has come to a halt is not what it was: the time since the last ending counts too.
            busy_s = asyncio.get_running_loop().time() - self._endings[0]
            self._interval_s = busy_s / (len(self._endings) - 1)
        if self._interval_s is None:
            return _UNKNOWN_RETRY_S
        num_waiting = sum(map(len, self._queues.values()))
        return min(max(self._interval_s * (num_waiting / 2 + 1), _RETRY_S[0]), _RETRY_S[1])

    # --- turns ------------------------------------------------------------------------------------------

    @property
    def _max_running(self) -> int | None:
        return (
            self._settings.max_running if self._settings.max_running is not None else self._engine_max_running
        )

    def _has_room(self) -> bool:
        limit = self._max_running
        return limit is None or len(self._running) < limit

    async def begin(self, ticket: Ticket) -> asyncio.Timeout:
        """Wait for a ticket's turn. Returns what ends it at its deadline, not entered yet. Raises as `admitted`."""
        deadline = None if ticket.timeout_s is None else ticket.arrived_at_s + ticket.timeout_s
        if self._closed is not None:
            raise self._refusal_for_stop(ticket, self._closed)
        if not self._queues and self._has_room() and self._may_run(ticket):  # as mostly: nobody waits
            self._catch_up(ticket.key)
            self._start(ticket)
        else:
            await self._queue(ticket, deadline)
            ticket.waited_s = asyncio.get_running_loop().time() - ticket.arrived_at_s
        self._count_turn(ticket)
        if ticket.stopping is not None:
            raise self._refusal_for_stop(ticket, ticket.stopping)
        return asyncio.timeout_at(deadline)

    def _count_turn(self, ticket: Ticket) -> None:
        places = self._places.get((ticket.model_id, ticket.key))
        if places is None:
            admitted, waited_s = (
                self._counters.place(each, ticket.model_id, ticket.key) for each in (ADMITTED, WAITED_S)
            )
            places = self._places[ticket.model_id, ticket.key] = admitted, waited_s
        places[0].add(1.0)
        places[1].add(ticket.waited_s)

    async def _queue(self, ticket: Ticket, deadline: float | None) -> None:
        turn = ticket.turn = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault(ticket.key, deque())
        if not queue:
            self._catch_up(ticket.key)
        queue.append(ticket)
        self._give_turns()
        if ticket not in self._running:
            self._make_room(ticket)
            await self._wait(ticket, turn, deadline)

    async def _wait(self, ticket: Ticket, turn: asyncio.Future[None], deadline: float | None) -> None:
        limit_s = ticket.share.max_wait_s
        longest = None if limit_s is None else ticket.arrived_at_s + limit_s
        ends = [moment for moment in (deadline, longest) if moment is not None]
        try:
            async with asyncio.timeout_at(min(ends, default=None)):
                await turn
        except TimeoutError:
            waited_s = asyncio.get_running_loop().time() - ticket.arrived_at_s
            if deadline is not None and deadline == min(ends):
                raise self._passed_deadline(ticket, waited_s) from None
            self._count_refusal(ticket, "waited_too_long")
            raise WaitedTooLong(
                f"the request waited {waited_s:.1f} s for its turn, which did not come",
                retry_after_s=self.retry_after_s(),
            ) from None

    def _catch_up(self, key: str | None) -> None:
        """Begin a key's work no earlier than now: who was away has saved nothing up."""
        self._work_ends[key] = max(self._work_ends.get(key, 0.0), self._virtual_time)

    def _give_turns(self) -> None:
        """Let run whoever is next, for as long as there is room."""
        while self._queues and self._has_room():
            heads = []
            for key, queue in self._queues.items():
                if self._may_run(queue[0]):
                    heads.append(queue[0])
                else:
                    self._catch_up(key)  # its own limit holds it up, so nobody owes it anything for that
            if not heads:
                return
            ticket = min(heads, key=lambda head: (self._work_ends[head.key], head.number))
            self._remove(ticket)
            self._start(ticket)

    def _start(self, ticket: Ticket) -> None:
        """It is this request's turn."""
        if not self._running:
            self._endings.clear()
            self._endings.append(asyncio.get_running_loop().time())
        self._running.add(ticket)
        self._running_of[ticket.key] = self._running_of.get(ticket.key, 0) + 1
        self._virtual_time = max(self._virtual_time, self._work_ends[ticket.key])
        self._work_ends[ticket.key] += ticket.work / ticket.share.weight
        if ticket.turn is not None and not ticket.turn.done():
            ticket.turn.set_result(None)

    def _may_run(self, ticket: Ticket) -> bool:
        limit = ticket.share.max_running
        return limit is None or self._running_of[ticket.key] < limit

    def _make_room(self, newcomer: Ticket) -> None:
        """Refuse somebody when more wait than may: the last one of the key that has the most, by weight."""
        own_limit = newcomer.share.max_waiting
        if own_limit is not None and len(self._queues[newcomer.key]) > own_limit:
            self._refuse(newcomer, self._full(newcomer, f"{own_limit} requests of this key wait already"))
        limit = self._settings.max_waiting
        if sum(map(len, self._queues.values())) > limit:
            # Of equals the newcomer goes: its queue was the last to be made as long as this.
            longest = max(
                self._queues.values(),
                key=lambda queue: (len(queue) / queue[-1].share.weight, queue[-1].number),
            )
            self._refuse(longest[-1], self._full(longest[-1], f"{limit} requests wait already"))

    def _full(self, ticket: Ticket, reason: str) -> TooManyRequests:
        self._count_refusal(ticket, "full")
        retry_after_s = self.retry_after_s()
        return TooManyRequests(
            f"the queue is full: {reason}",
            retry_after_s=retry_after_s,
            hint=f"try again in {retry_after_s:.0f} s",
        )

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        self._remove(ticket)
        if ticket.turn is not None and not ticket.turn.done():
            ticket.turn.set_exception(error)

    def _remove(self, ticket: Ticket) -> None:
        queue = self._queues.get(ticket.key)
        if queue is not None and ticket in queue:
            queue.remove(ticket)
            if not queue:
                del self._queues[ticket.key]

    def leave(self, ticket: Ticket) -> None:
        """Give back a turn or a place, and put the key's work right."""
        turn = ticket.turn
        if turn is not None and turn.done() and not turn.cancelled():
            turn.exception()  # it was raised where it was waited for, or its request has gone
        if ticket not in self._running:
            self._remove(ticket)
            return
        self._running.remove(ticket)
        self._running_of[ticket.key] -= 1
        if not self._running_of[ticket.key]:
            del self._running_of[ticket.key]
        self._endings.append(asyncio.get_running_loop().time())
        self._expected_output += _LEARNING * (ticket.num_generated - self._expected_output)
        surplus = (ticket.done_work - ticket.work) / ticket.share.weight
        self._work_ends[ticket.key] += surplus
        self._give_turns()
        if not self._running and not self._queues:
            self._work_ends.clear()
            self._virtual_time = 0.0
            self._emptied.set()

    async def _until_empty(self) -> None:
        while self._running:
            self._emptied.clear()
            await self._emptied.wait()

    def _refusal_for_stop(self, ticket: Ticket, sentence: str) -> ServerStopping:
        self._count_refusal(ticket, "stopping")
        return ServerStopping(sentence, retry_after_s=_UNKNOWN_RETRY_S)

    def why_ended(self, ticket: Ticket) -> DeskfleetError:
        """Return the error of a request whose scope has ended it, and count that."""
        if ticket.stopping is not None:
            return self._refusal_for_stop(ticket, ticket.stopping)
        return self._passed_deadline(ticket, ticket.timeout_s)

    def _passed_deadline(self, ticket: Ticket, timeout_s: float | None) -> DeadlinePassed:
        self._count_refusal(ticket, "deadline")
        return DeadlinePassed(
            f"the deadline passed after {timeout_s or 0.0:.1f} s, with {ticket.num_generated} tokens generated"
        )

    def _count_refusal(self, ticket: Ticket, reason: str) -> None:
        self._counters.add(REFUSED, ticket.model_id, ticket.key, reason)


__all__ = [
    "COUNTERS",
    "CUT_SHORT",
    "Admission",
    "AdmissionSettings",
    "AdmissionState",
    "ShareSettings",
    "Ticket",
    "Waiting",
]
