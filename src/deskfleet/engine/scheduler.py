"""Who runs in the next step. Owns the queue, the running set and the policy; knows nothing of tensors or tokens.

* Streams first: each running stream gets its next row and its drafts before any prompt gets one. When rows are short
  drafts are cut, a stream's next row never.
* Prompts come in chunks. A chunk ends where the prompt, the step's rows or the memory for index scores end, and, while
  streams run, where the step would take longer than the decode floor allows.
* Light prompts pass heavier ones (short < ordinary < long, by tokens left to compute). One that has begun keeps half
  of what the step has for it. One that waits is passed `max_overtakes` times or for `max_overtaken_s`, then no more.
* One long prompt at a time. The next one waits without a place in the batch, and does not hold up others meanwhile.
* A request is admitted when there is a slot and room for all it has. If there is no room nobody behind it is tried, so
  that room gathers for it; only lighter ones may still pass, as often as above.
* When a stream lacks a block, whoever was admitted last gives its own back and waits at the front, its output kept.
  A prompt takes blocks only from prompts that came after it. While anybody lacks a block nobody is admitted.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from deskfleet.engine.pace import StepTimes, pairs_of, rows_within
from deskfleet.errors import ConfigError, EngineError, RequestError
from deskfleet.model.limits import MAX_TRANSIENT_BYTES

if TYPE_CHECKING:  # keeps torch out of the policy
    from deskfleet.engine.request import Request

BYTES_PER_SCORE = 14
"""Of index scoring, per pair of a row and an entry (at most one per position): the scores, those of visible entries and
those of candidates in float32, 4 bytes each, and a mask of 1 byte for either choice."""

_SHORT, _ORDINARY, _LONG = range(3)
_MOST_SCORED_ROWS = 64  # of a prompt with log probabilities: each is a row of logits, on the host too
_PACE_MARGIN = 0.9  # of the time between two tokens: the rest is for work around the step, and for noise


class Cache(Protocol):
    """Slots and blocks, as far as the scheduler needs them (blocks.CacheManager)."""

    def admit(self, request: Request) -> bool:
        """Give a request a slot and what is cached of it; sets `num_computed_tokens`. False, and nothing changed, when
        there is no slot or no room for the rest of it."""

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Make room for its next `num_tokens` positions. False, and nothing changed, when there is none."""

    def release(self, request: Request) -> None:
        """Take slot and blocks of an admitted request back."""

    def max_tokens(self) -> int:
        """The longest request that fits alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPolicy:
    """What an operator may decide. Raises ConfigError for values that cannot work."""

    short_prompt_tokens: int = 512
    long_prefill_tokens: int = 8192
    min_prefill_tokens: int = 64
    """Prompt rows of a step when the decode floor leaves fewer, so that prompts never stand still."""
    decode_floor_tok_s: float = 5.0
    """Slowest a stream may become because prompts are read."""
    max_overtakes: int = 16
    max_overtaken_s: float = 10.0
    """Since arrival: by then nobody passes any more."""
    max_transient_bytes: int = MAX_TRANSIENT_BYTES
    """For index scores of one chunk."""

    def __post_init__(self) -> None:
        for name, is_good, wanted in (
            ("short_prompt_tokens", self.short_prompt_tokens >= 1, "1 or more"),
            ("min_prefill_tokens", self.min_prefill_tokens >= 1, "1 or more"),
            ("decode_floor_tok_s", 0 < self.decode_floor_tok_s < math.inf, "a finite number, more than 0"),
            ("max_overtakes", self.max_overtakes >= 0, "0 or more"),
            ("max_overtaken_s", self.max_overtaken_s >= 0, "0 or more"),
            (
                "max_transient_bytes",
                self.max_transient_bytes >= BYTES_PER_SCORE,
                f"{BYTES_PER_SCORE} or more",
            ),
        ):
            if not is_good:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be {wanted}")
        if self.short_prompt_tokens > self.long_prefill_tokens:
            raise ConfigError(
                f"short_prompt_tokens {self.short_prompt_tokens} is more than "
                f"long_prefill_tokens {self.long_prefill_tokens}",
                hint="a prompt cannot be short and long at once",
            )


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The next `num_tokens` known tokens of one request, and `num_draft_tokens` of its drafts after them."""

    request: Request
    num_tokens: int
    num_draft_tokens: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_tokens + self.num_draft_tokens

    @property
    def completes(self) -> bool:
        """Whether every known token is computed afterwards, so that a next one can be sampled."""
        return self.num_tokens == self.request.num_uncomputed_tokens


@dataclass(eq=False, slots=True)
class _Entry:
    """A live request's place. `number` is its order of arrival, `lane` where it waits."""

    request: Request
    number: int
    lane: int
    lighter_before: int  # requests that had come to lighter lanes before it
    weight: int = _SHORT  # while it runs; may be less than its lane's, by what was cached
    refused_at: int = -1  # value of the release counter when the cache had no room for it


@dataclass(slots=True)
class _Step:
    """A step in the making. `rows` and `pairs` count what is scheduled or reserved."""

    max_rows: int
    now_s: float
    rows: int = 0
    pairs: int = 0
    num_prompt_rows: int = 0
    has_streams: bool = False
    may_admit: bool = True
    work: dict[str, Scheduled] = field(default_factory=dict)

    @property
    def rows_left(self) -> int:
        return self.max_rows - self.rows

    def add(self, work: Scheduled) -> None:
        request = work.request
        self.work[request.request_id] = work
        self.rows += work.num_rows
        self.pairs += pairs_of(work.num_rows, request.num_computed_tokens)

    def reserve(self, rows: int, pairs: int) -> None:
        self.rows += rows
        self.num_prompt_rows += rows
        self.pairs += pairs


class Scheduler:
    """Continuous batching over `max_num_seqs` requests and `max_num_batched_tokens` rows a step.

    Seconds are those of one monotonic clock, the same as of `Request.arrival_s` and `deadline_s`.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: SchedulerPolicy,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy = policy
        self.num_preemptions = 0
        self.num_overtaken = 0  # admissions that passed an older request
        self.num_expired = 0
        self._cache = cache
        self._times = StepTimes()
        self._last_step = (0, 0)  # rows, pairs
        self._entries: dict[str, _Entry] = {}
        self._running: OrderedDict[str, _Entry] = OrderedDict()  # in order of admission
        self._lanes: tuple[OrderedDict[str, _Entry], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        self._num_added = [0, 0, 0]  # per lane
        self._num_left = [0, 0, 0]  # per lane, of those
        self._num_arrived = 0
        self._num_releases = 0
        self._deadlines: list[tuple[float, int, _Entry]] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def running(self) -> list[Request]:
        """Admitted requests, in order of admission."""
        return [entry.request for entry in self._running.values()]

    @property
    def num_waiting(self) -> int:
        return len(self._entries) - len(self._running)

    # --- requests come and go ---------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, with the numbers and nothing changed, when it could never run."""
        self._check(request)
        lane = self._weight(request)
        entry = _Entry(request, self._num_arrived, lane, lighter_before=sum(self._num_added[:lane]))
        self._entries[request.request_id] = entry
        self._lanes[lane][request.request_id] = entry
        self._num_added[lane] += 1
        self._num_arrived += 1
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, entry.number, entry))

    def find(self, request_id: str) -> Request | None:
        """The live request of that id."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.request

    def remove(self, request: Request) -> None:
        """A request ended or was cancelled: free what it holds at once. One that is not here any more is ignored."""
        entry = self._entries.get(request.request_id)
        if entry is None or entry.request is not request:
            return
        del self._entries[request.request_id]
        if self._running.pop(request.request_id, None):
            self._release(request)
        else:
            self._leave_lane(entry)

    def expire(self, now_s: float) -> list[Request]:
        """Remove and return the requests, waiting or running, whose deadline has come."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = heapq.heappop(self._deadlines)[2]
            if self._entries.get(entry.request.request_id) is entry:
                self.remove(entry.request)
                expired.append(entry.request)
        self.num_expired += len(expired)
        return expired

    def queue(self, limit: int) -> tuple[str, ...]:
        """Ids of the waiting requests that came first, at most `limit`, in order of arrival."""
        lanes = (lane.values() for lane in self._lanes)
        waiting = heapq.merge(*lanes, key=lambda entry: entry.number)
        return tuple(entry.request.request_id for entry in islice(waiting, limit))

    def waiting_s(self, now_s: float) -> float:
        """How long the request that came first among the waiting ones has waited; 0 without any."""
        heads = [_first(lane) for lane in self._lanes if lane]
        return now_s - min(heads, key=lambda head: head.number).request.arrival_s if heads else 0.0

    # --- steps ------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> list[Scheduled]:
        """Choose the next step's work, each request at most once. Raises EngineError when nobody can run."""
        step = _Step(self.max_num_batched_tokens, now_s)
        self._schedule_streams(step)
        self._schedule_prompts(step, below=len(self._lanes))
        if self._entries and not step.work:
            request = min(self._entries.values(), key=lambda entry: entry.number).request
            raise EngineError(
                f"request {request.request_id} of {request.num_tokens} tokens is alone and finds no room in a cache "
                f"that should hold {self._cache.max_tokens()}"
            )
        self._last_step = (step.rows, step.pairs)
        return list(step.work.values())

    def observe(self, seconds: float) -> None:
        """Say how long the step took that was scheduled last; only later steps are planned by it."""
        rows, pairs = self._last_step
        if rows:
            self._times.observe(rows=rows, pairs=pairs, seconds=seconds)

    def _schedule_streams(self, step: _Step) -> None:
        streams = [request for request in self.running if request.num_uncomputed_tokens == 1]
        num_drafts = [len(request.draft_token_ids) for request in streams]
        # Never negative: nobody is admitted, and no prompt ends, without a row beside those of all streams.
        spare = self.max_num_batched_tokens - len(streams)
        cap = max(num_drafts, default=0)
        while sum(min(n, cap) for n in num_drafts) > spare:
            cap -= 1
        for request in streams:
            if request.request_id not in self._running:  # preempted for an earlier one
                continue
            drafts = min(len(request.draft_token_ids), cap)
            # Speculation costs nobody a block. As many drafts as fit, not all or none: whether a draft is verified must
            # not depend on what was drafted after it.
            while drafts and not self._cache.allocate(request, 1 + drafts):
                drafts -= 1
            if not drafts and not self._make_room(step, request):
                continue
            step.add(Scheduled(request, 1, drafts))
            step.has_streams = True

    def _make_room(self, step: _Step, request: Request) -> bool:
        """Preempt from the youngest until the next row of a stream fits; False when it was the youngest itself."""
        while not self._cache.allocate(request, 1):
            step.may_admit = False
            youngest = self._youngest()
            self._preempt(youngest)
            if youngest.request is request:
                return False
        return True

    def _schedule_prompts(self, step: _Step, below: int) -> None:
        """Give rows to prompts lighter than `below`, in order of admission, each after lighter ones; then admit."""
        has_long = False
        for entry in list(self._running.values()):
            if entry.weight >= below or not self._is_open(step, entry):
                continue
            if entry.weight == _LONG:
                if has_long:
                    continue
                has_long = True
            self._let_pass(step, entry)
            self._schedule_chunk(step, entry.request)
        self._admit(step, below)

    def _is_open(self, step: _Step, entry: _Entry) -> bool:
        """Whether it runs and has nothing in this step yet."""
        return entry.request.request_id in self._running and entry.request.request_id not in step.work

    def _let_pass(self, step: _Step, entry: _Entry) -> None:
        """Give what lighter prompts need, but half of what there is for this one."""
        if entry.weight == _SHORT:
            return
        half = -(-self._chunk(step, entry.request) // 2)
        pairs = pairs_of(half, entry.request.num_computed_tokens)
        step.reserve(half, pairs)
        self._schedule_prompts(step, below=entry.weight)
        step.reserve(-half, -pairs)

    def _schedule_chunk(self, step: _Step, request: Request) -> bool:
        """Give a prompt its rows of this step; False when there are none, or no room for them."""
        rows = self._chunk(step, request)
        if rows == 0:
            return False
        while not self._cache.allocate(request, rows):
            step.may_admit = False
            youngest = self._youngest()
            if youngest.request is request or youngest.request.request_id in step.work:
                return False  # it keeps what it has and waits: those in the way will end
            self._preempt(youngest)
        step.add(Scheduled(request, rows))
        step.num_prompt_rows += rows
        return True

    def _chunk(self, step: _Step, request: Request) -> int:
        """Rows of the next chunk of a prompt in this step; 0 when there are none for it."""
        prefix = request.num_computed_tokens
        rows = min(step.rows_left, request.num_uncomputed_tokens, self._rows_in_memory(prefix))
        if (
            request.sampling.prompt_logprobs is not None
            and request.num_scored_tokens < request.num_prompt_tokens - 1
        ):
            rows = min(rows, _MOST_SCORED_ROWS)
        if step.has_streams:
            limit_s = _PACE_MARGIN / self.policy.decode_floor_tok_s
            in_time = self._times.rows_within(limit_s, rows=step.rows, pairs=step.pairs, prefix=prefix)
            rows = min(rows, max(in_time, self.policy.min_prefill_tokens - step.num_prompt_rows))
        return max(rows, 0)

    def _rows_in_memory(self, prefix: int) -> int:
        """Rows whose index scores fit. Of few significant bits, so that an allocator meets the same sizes again."""
        rows = rows_within(self.policy.max_transient_bytes // BYTES_PER_SCORE, prefix)
        spare_bits = max(rows.bit_length() - 3, 0)
        return rows >> spare_bits << spare_bits

    # --- admission --------------------------------------------------------------------------------

    def _admit(self, step: _Step, below: int) -> None:
        while step.may_admit and len(self._running) < self.max_num_seqs:
            entry = self._next_waiting(step.now_s)
            if entry is None or entry.lane >= below or not self._chunk(step, entry.request):
                return
            if entry.refused_at == self._num_releases:  # nobody has left since: spare the lookup
                step.may_admit = False
            else:
                self._start(step, entry)

    def _next_waiting(self, now_s: float) -> _Entry | None:
        """The lightest of the waiting, or the oldest of those that must not be passed again."""
        has_long = any(
            e.weight == _LONG and e.request.num_uncomputed_tokens > 1 for e in self._running.values()
        )
        open_lanes = self._lanes[:_LONG] if has_long else self._lanes
        heads = [_first(lane) for lane in open_lanes if lane]
        due = [head for head in heads if self._is_due(head, now_s)]
        return min(due, key=lambda head: head.number) if due else next(iter(heads), None)

    def _is_due(self, entry: _Entry, now_s: float) -> bool:
        """Whether it has been passed often or long enough.

        Lanes are first in, first out: who left a lighter one and is not of those that had come before has passed. That
        counts too many, never too few: the cancelled as well, and the preempted twice.
        """
        num_passed = sum(self._num_left[: entry.lane]) - entry.lighter_before
        return (
            num_passed >= self.policy.max_overtakes
            or now_s - entry.request.arrival_s >= self.policy.max_overtaken_s
        )

    def _start(self, step: _Step, entry: _Entry) -> None:
        """Admit a request with its first chunk, or change nothing and admit nobody else."""
        request = entry.request
        if not self._cache.admit(request):
            step.may_admit = False
            entry.refused_at = self._num_releases
            return
        self._running[request.request_id] = entry
        entry.weight = self._weight(request)
        if self._schedule_chunk(step, request):
            self._leave_lane(entry)
            self.num_overtaken += any(_first(lane).number < entry.number for lane in self._lanes if lane)
            return
        del self._running[request.request_id]
        self._cache.release(request)
        request.num_computed_tokens = 0
        if not step.may_admit:  # for want of room; rows will come by themselves
            entry.refused_at = self._num_releases
        step.may_admit = False

    def _preempt(self, entry: _Entry) -> None:
        """Take everything from a running request but its output, and put it where everybody came later."""
        request = entry.request
        del self._running[request.request_id]
        self._release(request)
        request.num_computed_tokens = 0
        request.drop_drafts()
        request.num_preemptions += 1
        self.num_preemptions += 1
        lane = self._lanes[entry.lane]
        lane[request.request_id] = entry
        lane.move_to_end(request.request_id, last=False)

    def _release(self, request: Request) -> None:
        self._cache.release(request)
        self._num_releases += 1

    def _leave_lane(self, entry: _Entry) -> None:
        del self._lanes[entry.lane][entry.request.request_id]
        self._num_left[entry.lane] += 1

    def _youngest(self) -> _Entry:
        return next(reversed(self._running.values()))

    def _weight(self, request: Request) -> int:
        left = request.num_uncomputed_tokens
        if left <= self.policy.short_prompt_tokens:
            return _SHORT
        return _ORDINARY if left <= self.policy.long_prefill_tokens else _LONG

    def _check(self, request: Request) -> None:
        if request.request_id in self._entries:
            raise RequestError(f"request id {request.request_id} is in use")
        num_tokens = request.num_prompt_tokens + (0 if request.score else request.sampling.max_tokens)
        asked = "" if request.score else f" plus max_tokens {request.sampling.max_tokens}"
        if num_tokens > self._cache.max_tokens():
            raise RequestError(
                f"prompt of {request.num_prompt_tokens} tokens{asked} needs room for {num_tokens}, but the cache holds "
                f"{self._cache.max_tokens()}",
                param="messages",
                hint="shorten the prompt, lower max_tokens, or serve with a larger cache",
            )
        if num_tokens * BYTES_PER_SCORE > self.policy.max_transient_bytes:
            raise RequestError(
                f"prompt of {request.num_prompt_tokens} tokens{asked} needs {num_tokens * BYTES_PER_SCORE} bytes "
                f"for the index scores of one row, more than max_transient_bytes {self.policy.max_transient_bytes}",
                param="messages",
                hint="shorten the prompt, lower max_tokens, or serve with a larger max_transient_bytes",
            )


def _first(lane: OrderedDict[str, _Entry]) -> _Entry:
    return next(iter(lane.values()))


__all__ = ["BYTES_PER_SCORE", "Cache", "Scheduled", "Scheduler", "SchedulerPolicy"]
