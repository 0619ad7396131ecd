"""The scheduler's policy, against a cache that counts blocks and checks how it is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.pace import StepTimes, pairs_of, rows_within
from deskfleet.engine.scheduler import BYTES_PER_SCORE, Scheduled, Scheduler, SchedulerPolicy
from deskfleet.errors import ConfigError, EngineError, RequestError

BLOCK = 16


@dataclass(eq=False)
class FakeRequest:
    """What the scheduler reads of a request, without its tokens."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int = 8
    arrival_s: float = 0.0
    deadline_s: float | None = None
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    slot: int | None = None
    score: bool = False
    draft_token_ids: list[int] = field(default_factory=list)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    def drop_drafts(self) -> None:
        self.draft_token_ids = []


class FakeCache:
    """Slots and blocks of BLOCK tokens. `cached` tokens of a request are found when it is admitted."""

    def __init__(self, num_slots: int, num_blocks: int, *, looks_ahead: bool = True) -> None:
        self.num_blocks = num_blocks
        self.looks_ahead = looks_ahead  # whether admission asks for room for all that a request has
        self.cached: dict[str, int] = {}
        self.held: dict[str, int] = {}
        self.num_lookups = 0
        self.admitted: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self._free_slots = set(range(num_slots))

    @property
    def num_free(self) -> int:
        return self.num_blocks - sum(self.held.values())

    def admit(self, request: FakeRequest) -> bool:
        self.num_lookups += 1
        if request.request_id in self.held or request.slot is not None:
            raise RuntimeError(f"{request.request_id} admitted twice")
        if not self._free_slots:
            raise RuntimeError("asked for a slot when there was none")
        needed = _blocks(request.num_tokens) if self.looks_ahead else 0
        if needed > self.num_free:
            return False
        request.slot = self._free_slots.pop()
        request.num_computed_tokens = min(self.cached.get(request.request_id, 0), request.num_tokens - 1)
        if _blocks(request.num_computed_tokens) > self.num_free:
            request.num_computed_tokens = 0
        self.held[request.request_id] = _blocks(request.num_computed_tokens)
        self.admitted[request.request_id] += 1
        return True

    def allocate(self, request: FakeRequest, num_tokens: int) -> bool:
        more = _blocks(request.num_computed_tokens + num_tokens) - self.held[request.request_id]
        if more > self.num_free:
            return False
        self.held[request.request_id] += max(more, 0)
        return True

    def release(self, request: FakeRequest) -> None:
        del self.held[request.request_id]
        self.released[request.request_id] += 1
        if request.slot is None:
            raise RuntimeError(f"{request.request_id} has no slot")
        self._free_slots.add(request.slot)
        request.slot = None

    def max_tokens(self) -> int:
        return self.num_blocks * BLOCK


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def make(
    *,
    max_num_seqs: int = 4,
    rows: int = 64,
    num_blocks: int = 1000,
    looks_ahead: bool = True,
    **policy: Any,
) -> tuple[Scheduler, FakeCache]:
    cache = FakeCache(max_num_seqs, num_blocks, looks_ahead=looks_ahead)
    scheduler = Scheduler(
        cache,  # type: ignore[arg-type]
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rows,
        policy=SchedulerPolicy(**policy),
    )
    return scheduler, cache


def add(scheduler: Scheduler, *requests: FakeRequest) -> None:
    for request in requests:
        scheduler.add(request)  # type: ignore[arg-type]


def run(scheduler: Scheduler, now_s: float = 0.0, *, num_accepted: int = 0) -> dict[str, int]:
    """One step: schedule, compute, sample, finish. Rows by request id."""
    work = scheduler.schedule(now_s)
    for one in work:
        finish_row(scheduler, one, num_accepted)
    return {one.request.request_id: one.num_rows for one in work}


def finish_row(scheduler: Scheduler, work: Scheduled, num_accepted: int = 0) -> int:
    """What the engine does with one request after a step: the number of tokens it gained."""
    request: Any = work.request
    completes = work.completes
    accepted = min(num_accepted, work.num_draft_tokens)
    request.num_computed_tokens += work.num_tokens
    if not completes:
        return 0
    gained = min(1 + accepted, request.max_tokens - request.num_output_tokens)
    request.num_output_tokens += gained
    request.num_computed_tokens += gained - 1
    if request.num_output_tokens == request.max_tokens:
        scheduler.remove(request)
    return gained


def ids(requests: Iterable[Any]) -> list[str]:
    return [request.request_id for request in requests]


# --- rows -----------------------------------------------------------------------------------------------


def test_as_many_run_as_there_are_slots() -> None:
    scheduler, _ = make(max_num_seqs=8, rows=8)
    add(scheduler, *(FakeRequest(str(n), 3, max_tokens=99) for n in range(9)))
    for _ in range(9):
        run(scheduler)
    assert len(run(scheduler)) == 8
    assert scheduler.num_waiting == 1


def test_streams_come_first_and_prompts_take_what_is_left() -> None:
    scheduler, _ = make(rows=10, min_prefill_tokens=10)
    add(scheduler, FakeRequest("a", 1), FakeRequest("b", 1))
    run(scheduler)
    add(scheduler, FakeRequest("long", 30))
    assert run(scheduler) == {"a": 1, "b": 1, "long": 8}


def test_drafts_are_cut_evenly_and_next_rows_never() -> None:
    scheduler, _ = make(rows=9)
    requests = [FakeRequest(name, 1) for name in "abc"]
    add(scheduler, *requests)
    run(scheduler)
    for request, count in zip(requests, (5, 1, 5), strict=True):
        request.draft_token_ids = [0] * count
    work = scheduler.schedule(0.0)
    assert [(one.num_tokens, one.num_draft_tokens) for one in work] == [(1, 2), (1, 1), (1, 2)]
    assert all(one.completes for one in work)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fewer_rows_than_slots_starve_no_stream(rows: int) -> None:
    scheduler, _ = make(rows=rows)
    add(scheduler, *(FakeRequest(str(n), n + 1) for n in range(6)))
    while scheduler:
        streams = {r.request_id for r in scheduler.running if r.num_uncomputed_tokens == 1}
        step = run(scheduler)
        assert streams <= step.keys()
        assert sum(step.values()) <= rows


def test_a_chunk_shrinks_as_the_prefix_grows_under_the_memory_budget() -> None:
    assert pairs_of(4096, 2**20 - 4096) * BYTES_PER_SCORE == 60_129_542_144  # 60.1 GB without the rule
    scheduler, cache = make(rows=2048, num_blocks=2**16, max_transient_bytes=2_800_000_000)
    for request_id, prefix, expected in (("a", 0, 2048), ("b", 133_000, 1280), ("c", 2**20 - 4096, 160)):
        cache.cached[request_id] = prefix
        request = FakeRequest(request_id, prefix + 4000)
        add(scheduler, request)
        assert run(scheduler) == {request_id: expected}
        assert pairs_of(expected, prefix) * BYTES_PER_SCORE <= 2_800_000_000
        scheduler.remove(request)  # type: ignore[arg-type]


def test_a_step_is_never_planned_by_more_than_twice_of_what_was_tried() -> None:
    scheduler, _ = make(rows=2048, min_prefill_tokens=16)
    add(scheduler, FakeRequest("stream", 1, max_tokens=99))
    run(scheduler)
    add(scheduler, FakeRequest("prompt", 9000))
    before = 0
    for _ in range(8):
        rows = run(scheduler)["prompt"]
        assert rows <= max(2 * before + 1, 16)
        scheduler.observe(0.001)
        before = rows
    assert before > 100


def test_without_a_measurement_that_allows_more_prompts_go_on_slowly() -> None:
    scheduler, _ = make(rows=2048, min_prefill_tokens=16, decode_floor_tok_s=5.0)
    add(scheduler, FakeRequest("stream", 1, max_tokens=99))
    run(scheduler)
    add(scheduler, FakeRequest("prompt", 9000))
    for _ in range(5):
        assert run(scheduler)["prompt"] == 16
        scheduler.observe(0.3)  # the floor cannot be kept, whatever is done
    add(scheduler, FakeRequest("short", 20))
    assert run(scheduler) == {"stream": 1, "short": 8, "prompt": 8}


def test_who_gets_no_row_is_not_admitted_and_is_tried_again() -> None:
    scheduler, cache = make(num_blocks=10_000, min_prefill_tokens=1, short_prompt_tokens=8)
    add(scheduler, FakeRequest("stream", 8, max_tokens=99))
    run(scheduler)
    scheduler.observe(0.01)
    cache.cached["deep"] = 100_000
    deep = FakeRequest("deep", 100_005)
    add(scheduler, FakeRequest("other", 1, max_tokens=99), deep)
    assert run(scheduler) == {"stream": 1, "other": 1}
    assert (deep.slot, deep.num_computed_tokens, cache.num_lookups) == (None, 0, 3)
    assert run(scheduler) == {"stream": 1, "other": 1, "deep": 1}


# --- light and heavy ------------------------------------------------------------------------------------

LIGHT = {"short_prompt_tokens": 8, "long_prefill_tokens": 100}


def test_a_short_prompt_passes_a_long_one_that_has_begun_and_leaves_it_half() -> None:
    scheduler, _ = make(**LIGHT)
    add(scheduler, FakeRequest("long", 1000))
    assert run(scheduler) == {"long": 64}
    add(scheduler, FakeRequest("short", 8))
    assert run(scheduler) == {"short": 8, "long": 56}
    add(scheduler, FakeRequest("ordinary", 90))
    assert run(scheduler) == {"short": 1, "ordinary": 31, "long": 32}


def test_three_weights_share_a_step() -> None:
    scheduler, _ = make(max_num_seqs=9, **LIGHT)
    add(scheduler, FakeRequest("long", 1000))
    run(scheduler)
    add(scheduler, FakeRequest("ordinary", 100))
    run(scheduler)
    add(scheduler, *(FakeRequest(f"short {n}", 8) for n in range(6)))
    assert run(scheduler) == {"short 0": 8, "short 1": 8, "ordinary": 16, "long": 32}


def test_one_long_prompt_at_a_time_and_others_do_not_wait_for_it() -> None:
    scheduler, _ = make(max_num_seqs=3, **LIGHT)
    add(scheduler, FakeRequest("long 0", 400), FakeRequest("long 1", 400), FakeRequest("ordinary", 50))
    for _ in range(3):
        run(scheduler, now_s=100.0)  # all of them have waited beyond the limit
        assert ids(scheduler.running) == ["long 0", "ordinary"] or ids(scheduler.running) == ["long 0"]
    assert "ordinary" in ids(scheduler.running)
    assert scheduler.queue(1) == ("long 1",)
    while scheduler.find("long 0"):
        run(scheduler, now_s=100.0)
    assert "long 1" in ids(scheduler.running)


def test_a_prompt_that_turns_out_to_be_long_waits_for_the_long_one_before_it() -> None:
    scheduler, _ = make(max_transient_bytes=14 * 10_000, **LIGHT)  # leaves rows of every later step unused
    first, second = FakeRequest("first", 400), FakeRequest("second", 400, num_computed_tokens=395)
    add(scheduler, first)
    assert run(scheduler) == {"first": 64}
    add(scheduler, second)
    assert run(scheduler) == {"first": 32, "second": 32}  # what was expected in the cache is not there
    while first.num_uncomputed_tokens > 1:
        assert run(scheduler).keys() == {"first"}
    assert run(scheduler).keys() == {"first", "second"}


def test_what_is_cached_makes_a_prompt_light() -> None:
    scheduler, cache = make(**LIGHT)
    cache.cached["return"] = 995
    add(scheduler, FakeRequest("return", 1000), FakeRequest("long", 1000))
    assert run(scheduler) == {"return": 5, "long": 59}


def test_a_waiting_prompt_is_passed_so_many_times_and_no_more() -> None:
    scheduler, _ = make(max_num_seqs=1, max_overtakes=3, max_overtaken_s=1e9, **LIGHT)
    add(scheduler, FakeRequest("running", 1, max_tokens=2))
    run(scheduler)
    add(scheduler, FakeRequest("early 0", 2), FakeRequest("early 1", 2), FakeRequest("ordinary", 50))
    add(scheduler, *(FakeRequest(f"short {n}", 2) for n in range(5)))
    order = order_of_admission(scheduler)
    assert order == ["early 0", "early 1", "short 0", "short 1", "short 2", "ordinary", "short 3", "short 4"]
    assert scheduler.num_overtaken == 3


def test_a_waiting_prompt_is_passed_for_so_long_and_no_more() -> None:
    scheduler, _ = make(max_num_seqs=1, max_overtakes=99, max_overtaken_s=10.0, **LIGHT)
    add(scheduler, FakeRequest("running", 1, max_tokens=2))
    run(scheduler)
    add(scheduler, FakeRequest("ordinary", 50, arrival_s=5.0), FakeRequest("short", 2, arrival_s=6.0))
    late = make(max_num_seqs=1, max_overtakes=99, max_overtaken_s=10.0, **LIGHT)[0]
    add(late, FakeRequest("ordinary", 50, arrival_s=5.0), FakeRequest("short", 2, arrival_s=6.0))
    assert order_of_admission(scheduler, now_s=14.9) == ["short", "ordinary"]
    assert order_of_admission(late, now_s=15.0) == ["ordinary", "short"]


def order_of_admission(scheduler: Scheduler, now_s: float = 0.0) -> list[str]:
    order: list[str] = []
    seen = set(ids(scheduler.running))
    while scheduler:
        work = scheduler.schedule(now_s)
        new = [i for i in ids(scheduler.running) if i not in seen]
        order += new
        seen.update(new)
        for one in work:
            finish_row(scheduler, one)
    return order


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from((1, 5, 8, 20, 60, 100, 150, 400))), max_size=40
    ),
    max_overtakes=st.integers(0, 5),
    max_overtaken_s=st.sampled_from((0.0, 5.0, 20.0, 1e9)),
    max_num_seqs=st.integers(1, 4),
)
def test_nobody_is_passed_beyond_the_limits(
    arrivals: list[tuple[int, int]], max_overtakes: int, max_overtaken_s: float, max_num_seqs: int
) -> None:
    """Counted from outside: admissions of later and lighter requests while the next long one could have begun."""
    scheduler, _ = make(
        max_num_seqs=max_num_seqs, max_overtakes=max_overtakes, max_overtaken_s=max_overtaken_s, **LIGHT
    )
    pending, now_s = list(enumerate(arrivals)), 0.0
    arrived: dict[str, int] = {}
    passed: Counter[str] = Counter()
    due_s = 0.0
    while pending or scheduler:
        while pending and due_s + pending[0][1][0] <= now_s:
            number, (gap, length) = pending.pop(0)
            due_s += gap
            add(scheduler, FakeRequest(str(number), length, max_tokens=3, arrival_s=now_s))
            arrived[str(number)] = number
        before: list[Any] = scheduler.running
        has_long = any(r.num_prompt_tokens > 100 and r.num_output_tokens == 0 for r in before)
        work = scheduler.schedule(now_s) if scheduler else []
        new: list[Any] = [request for request in scheduler.running if request not in before]
        waiting: list[Any] = [r for r in map(scheduler.find, arrived) if r and r not in scheduler.running]
        for request in waiting:
            if has_long and request.num_prompt_tokens > 100:
                continue
            ahead = [n for n in new if arrived[n.request_id] > arrived[request.request_id]]
            passed[request.request_id] += len(ahead)
            assert not ahead or now_s - request.arrival_s < max_overtaken_s
        for one in work:
            finish_row(scheduler, one)
        now_s += 1.0
    assert max(passed.values(), default=0) <= max_overtakes


# --- room -----------------------------------------------------------------------------------------------


def test_the_youngest_gives_way_to_a_stream_and_comes_back_with_its_output() -> None:
    scheduler, cache = make(num_blocks=4)
    old, young = FakeRequest("old", 30, max_tokens=20), FakeRequest("young", 20, max_tokens=20)
    add(scheduler, old, young, FakeRequest("newer", 20))
    while not young.num_preemptions:
        young.draft_token_ids = [1, 2]
        run(scheduler)
    assert young.draft_token_ids == []
    assert (young.num_output_tokens, young.num_computed_tokens, young.slot) == (3, 0, None)
    assert ids(scheduler.running) == ["old"]
    assert scheduler.queue(1) == ("young",)
    while old.num_output_tokens < old.max_tokens:
        run(scheduler)
    run(scheduler)
    assert ids(scheduler.running)[0] == "young"
    assert young.num_output_tokens == 4
    while scheduler:
        run(scheduler)
    assert cache.num_free == 4
    assert scheduler.num_preemptions == 1
    assert cache.released == cache.admitted == Counter(old=1, young=2, newer=1)


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    scheduler, _ = make(num_blocks=4, **LIGHT)
    young = FakeRequest("young", 20, max_tokens=20)
    add(scheduler, FakeRequest("old", 30, max_tokens=20), young)
    run(scheduler)
    add(scheduler, FakeRequest("small", 2))
    while not young.num_preemptions:
        assert "small" not in run(scheduler)
    assert run(scheduler).keys() == {"old", "small"}


def test_drafts_cost_nobody_a_block() -> None:
    scheduler, _ = make(num_blocks=2)
    requests = [FakeRequest(name, 15, max_tokens=1) for name in "ab"]
    for request in requests:
        request.max_tokens = 2
        add(scheduler, request)
    run(scheduler)
    requests[0].draft_token_ids = [1] * 5
    assert run(scheduler) == {"a": 1, "b": 1}
    assert scheduler.num_preemptions == 0


def test_a_prompt_takes_no_blocks_from_streams_but_from_later_prompts() -> None:
    scheduler, _ = make(num_blocks=10, rows=32, looks_ahead=False, min_prefill_tokens=64, **LIGHT)
    first, stream = FakeRequest("first", 150), FakeRequest("stream", 2, max_tokens=30)
    add(scheduler, first)
    run(scheduler)
    add(scheduler, stream)
    run(scheduler)
    add(scheduler, FakeRequest("later", 60))
    seen = set()
    while first.num_uncomputed_tokens > 1:
        step = run(scheduler)
        seen |= step.keys()
        assert "stream" in step or scheduler.find("stream") is None
    assert "later" in seen
    assert stream.num_preemptions == first.num_preemptions == 0
    assert scheduler.num_preemptions >= 1


def test_who_finds_no_room_is_passed_by_lighter_ones_only_within_the_limits() -> None:
    scheduler, cache = make(num_blocks=6, max_overtakes=2, max_overtaken_s=1e9, **LIGHT)
    add(scheduler, FakeRequest("stream", 2, max_tokens=14))
    run(scheduler)
    add(scheduler, FakeRequest("big", 85))  # 6 blocks, of which 5 are free
    lookups = cache.num_lookups
    run(scheduler)
    run(scheduler)
    assert cache.num_lookups == lookups + 1, "looked up again though nothing had become free"
    add(scheduler, *(FakeRequest(f"short {n}", 2, max_tokens=1) for n in range(4)))
    order = order_of_admission(scheduler)
    assert order == ["short 0", "short 1", "big", "short 2", "short 3"]


def test_who_finds_no_room_stops_those_behind_it() -> None:
    scheduler, _ = make(num_blocks=6)
    add(scheduler, FakeRequest("stream", 2, max_tokens=14))
    run(scheduler)
    add(scheduler, FakeRequest("big", 85), FakeRequest("small", 2))
    for _ in range(12):
        assert run(scheduler).keys() == {"stream"}
    assert run(scheduler).keys() == {"stream"}
    assert run(scheduler).keys() == {"big"}


def test_what_can_never_run_is_refused_with_numbers() -> None:
    scheduler, _ = make(num_blocks=10, max_transient_bytes=14 * 120)
    with pytest.raises(
        RequestError,
        match="prompt of 100 tokens plus max_tokens 61 needs room for 161, but the cache holds 160",
    ):
        add(scheduler, FakeRequest("a", 100, max_tokens=61))
    with pytest.raises(
        RequestError, match=r"prompt of 100 tokens plus max_tokens 21 needs 1694 bytes .* 1680"
    ):
        add(scheduler, FakeRequest("a", 100, max_tokens=21))
    assert not scheduler
    add(
        scheduler, FakeRequest("a", 100, max_tokens=20), FakeRequest("score", 120, score=True, max_tokens=999)
    )
    with pytest.raises(RequestError, match="request id a is in use"):
        add(scheduler, FakeRequest("a", 1))


def test_a_cache_that_does_not_keep_its_word_stops_the_engine() -> None:
    scheduler, cache = make(num_blocks=10)
    add(scheduler, FakeRequest("a", 100))
    cache.num_blocks = 6
    with pytest.raises(EngineError, match="request a of 100 tokens is alone and finds no room"):
        run(scheduler)


# --- ends -----------------------------------------------------------------------------------------------


def test_removal_frees_at_once_and_only_once() -> None:
    scheduler, cache = make(max_num_seqs=1)
    first, second, third = (FakeRequest(name, 20) for name in "abc")
    add(scheduler, first, second, third)
    run(scheduler)
    for request in (first, first, third):
        scheduler.remove(request)  # type: ignore[arg-type]
    assert cache.held == {}
    assert cache.released == {"a": 1}
    assert run(scheduler) == {"b": 20}
    scheduler.remove(FakeRequest("b", 20))  # type: ignore[arg-type]  # a namesake is somebody else
    assert ids(scheduler.running) == ["b"]


def test_deadlines_end_those_that_wait_and_those_that_run() -> None:
    scheduler, cache = make(max_num_seqs=1)
    names = {"runs": 5.0, "waits": 4.0, "gone": 1.0, "patient": None, "later": 9.0}
    requests = {name: FakeRequest(name, 20, deadline_s=deadline) for name, deadline in names.items()}
    add(scheduler, *requests.values())
    run(scheduler)
    scheduler.remove(requests["gone"])  # type: ignore[arg-type]
    assert scheduler.expire(3.9) == []
    assert ids(scheduler.expire(5.0)) == ["waits", "runs"]
    assert cache.held == {}
    assert scheduler.num_expired == 2
    assert run(scheduler, now_s=5.0) == {"patient": 20}
    assert ids(scheduler.expire(1e9)) == ["later"]


def test_position_and_wait_are_visible() -> None:
    scheduler, _ = make(max_num_seqs=1, **LIGHT)
    assert scheduler.waiting_s(3.0) == 0.0
    add(scheduler, *(FakeRequest(str(n), length, arrival_s=n) for n, length in enumerate((2, 50, 200, 2))))
    assert scheduler.waiting_s(3.0) == 3.0
    run(scheduler)
    assert (scheduler.queue(9), scheduler.queue(2)) == (("1", "2", "3"), ("1", "2"))
    assert scheduler.waiting_s(11.0) == 10.0
    assert scheduler.num_waiting == 3


class Watched(FakeRequest):
    """Remembers which of its kind were looked at."""

    touched: set[str] = set()  # noqa: RUF012  # shared on purpose

    @property
    def num_uncomputed_tokens(self) -> int:
        Watched.touched.add(self.request_id)
        return super().num_uncomputed_tokens


def test_fifty_thousand_waiting_do_not_slow_a_step() -> None:
    scheduler, _ = make(max_num_seqs=4, rows=64, num_blocks=10**6)
    lengths = (3, 700, 9000)
    add(scheduler, *(Watched(str(n), lengths[n % 3], max_tokens=2, deadline_s=1e9) for n in range(50_000)))
    for _ in range(20):
        Watched.touched.clear()
        scheduler.expire(0.0)
        run(scheduler)
        assert len(Watched.touched) <= 4 + 4 + 3, "looks at more than the batch and the heads of the queue"
    request: Any = scheduler.find("40000")
    Watched.touched.clear()
    scheduler.remove(request)
    assert len(Watched.touched) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("short_prompt_tokens", 0),
        ("min_prefill_tokens", 0),
        ("decode_floor_tok_s", 0.0),
        ("decode_floor_tok_s", float("nan")),
        ("max_overtakes", -1),
        ("max_overtaken_s", -0.5),
        ("max_transient_bytes", 13),
        ("long_prefill_tokens", 511),
    ],
)
def test_a_policy_that_cannot_work_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}.* {value}"):
        SchedulerPolicy(**{name: value})


# --- pace -----------------------------------------------------------------------------------------------


@given(st.integers(0, 10**7), st.integers(0, 2 * 10**6))
def test_rows_within_is_the_longest(pairs: int, prefix: int) -> None:
    rows = rows_within(pairs, prefix)
    assert pairs_of(rows, prefix) <= pairs < pairs_of(rows + 1, prefix)


@settings(max_examples=300)
@given(
    law=st.tuples(*(st.sampled_from(values) for values in ((0, 0.03), (0, 4e-4, 1e-2), (0, 2e-9, 1e-6)))),
    past=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 10**6)), max_size=20),
    step=st.tuples(st.integers(0, 50), st.integers(0, 10**7)),
    prefix=st.integers(0, 10**6),
    limit_s=st.sampled_from((0.02, 0.2, 2.0)),
)
def test_a_chunk_that_is_promised_ends_in_time(
    law: tuple[float, float, float],
    past: list[tuple[int, int]],
    step: tuple[int, int],
    prefix: int,
    limit_s: float,
) -> None:
    def seconds(rows: int, pairs: int) -> float:
        return law[0] + law[1] * rows + law[2] * pairs

    times = StepTimes()
    for rows, before in past:
        pairs = pairs_of(rows, before)
        times.observe(rows=rows, pairs=pairs, seconds=seconds(rows, pairs))
    chunk = times.rows_within(limit_s, rows=step[0], pairs=step[1], prefix=prefix)
    if chunk > 0:
        assert seconds(step[0] + chunk, step[1] + pairs_of(chunk, prefix)) <= limit_s * (1 + 1e-9)
        assert step[0] + chunk <= 2 * max(rows for rows, _ in past)


def test_the_chunk_settles_at_what_the_limit_allows() -> None:
    times, rows, pairs = StepTimes(), 4, 40_000
    times.observe(rows=rows, pairs=pairs, seconds=0.03 + rows / 2500 + 2e-9 * pairs)
    chunks = []
    for number in range(30):
        chunk = max(times.rows_within(0.18, rows=4, pairs=40_000, prefix=100_000), 64)
        rows, pairs = 4 + chunk, 40_000 + pairs_of(chunk, 100_000)
        delay_s = 3.0 if number == 20 else 0.0  # a step that something else delayed
        times.observe(rows=rows, pairs=pairs, seconds=0.03 + rows / 2500 + 2e-9 * pairs + delay_s)
        chunks.append(chunk)
    assert chunks[:2] == [64, 132]
    assert chunks[10:] == [chunks[10]] * 20
    assert chunks[10] == 246  # 0.03 + 250 / 2500 + 2e-9 * (40,000 + 246 * 100,246) = 0.1794 s


def test_a_slower_machine_costs_rows_in_proportion() -> None:
    times = StepTimes()
    times.observe(rows=4, pairs=400, seconds=0.03)
    for seconds in (0.18, 0.2):
        for _ in range(16):
            times.observe(rows=304, pairs=3_000_000, seconds=seconds)
    # Of 0.17 s above the shortest step 0.15 s are left: 304 x 15 / 17 rows, of which 4 are taken.
    assert times.rows_within(0.18, rows=4, pairs=400, prefix=0) == 264


# --- everything at once ---------------------------------------------------------------------------------


class Churn(RuleBasedStateMachine):
    """Arrivals, cancellations, deadlines and ends in any order; at the end everybody has run or was ended."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.live: dict[str, FakeRequest] = {}
        self.count = 0
        self.finished: set[str] = set()

    @initialize(
        max_num_seqs=st.integers(1, 5),
        rows=st.sampled_from((1, 2, 3, 7, 32, 100)),
        num_blocks=st.sampled_from((4, 9, 30, 200)),
        looks_ahead=st.booleans(),
        short=st.sampled_from((1, 8, 40)),
        long=st.sampled_from((40, 90)),
        overtakes=st.integers(0, 4),
        floor=st.sampled_from((0.5, 5.0, 50.0)),
        min_prefill=st.sampled_from((1, 16)),
    )
    def begin(
        self,
        max_num_seqs: int,
        rows: int,
        num_blocks: int,
        looks_ahead: bool,
        short: int,
        long: int,
        overtakes: int,
        floor: float,
        min_prefill: int,
    ) -> None:
        self.rows = rows
        self.scheduler, self.cache = make(
            max_num_seqs=max_num_seqs,
            rows=rows,
            num_blocks=num_blocks,
            looks_ahead=looks_ahead,
            short_prompt_tokens=short,
            long_prefill_tokens=long,
            max_overtakes=overtakes,
            decode_floor_tok_s=floor,
            min_prefill_tokens=min_prefill,
        )

    @rule(
        length=st.integers(1, 150),
        max_tokens=st.integers(1, 40),
        cached=st.sampled_from((0, 0, 16, 64)),
        patience_s=st.sampled_from((None, None, 1.0, 30.0)),
    )
    def arrive(self, length: int, max_tokens: int, cached: int, patience_s: float | None) -> None:
        self.count += 1
        deadline_s = None if patience_s is None else self.now_s + patience_s
        request = FakeRequest(str(self.count), length, max_tokens, self.now_s, deadline_s)
        self.cache.cached[request.request_id] = cached
        if length + max_tokens > self.cache.max_tokens():
            with pytest.raises(RequestError):
                add(self.scheduler, request)
            return
        add(self.scheduler, request)
        self.live[request.request_id] = request

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        self.scheduler.remove(request)  # type: ignore[arg-type]
        assert request.slot is None

    @rule(seconds=st.sampled_from((0.5, 5.0, 20.0)))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        for request in self.scheduler.expire(self.now_s):
            assert request.deadline_s is not None
            assert request.deadline_s <= self.now_s
            del self.live[request.request_id]
        assert all(r.deadline_s is None or r.deadline_s > self.now_s for r in self.live.values())

    @rule(num_drafts=st.integers(0, 5), num_accepted=st.integers(0, 5), seconds=st.floats(0.001, 1.0))
    def step(self, num_drafts: int, num_accepted: int, seconds: float) -> None:
        for request in self.live.values():
            if request.num_output_tokens and request.num_uncomputed_tokens == 1:
                request.draft_token_ids = [0] * num_drafts
        streams = {r.request_id for r in self.scheduler.running if r.num_uncomputed_tokens == 1}
        work = self.scheduler.schedule(self.now_s)
        self.scheduler.observe(seconds)
        assert sum(one.num_rows for one in work) <= self.rows
        assert all(one.num_tokens >= 1 for one in work)
        assert all(one.num_rows <= 1 + num_drafts for one in work if one.request.request_id in streams)
        assert len({one.request.request_id for one in work}) == len(work)
        preempted = {r.request_id for r in self.live.values() if r.slot is None}
        assert streams <= {one.request.request_id for one in work} | preempted
        assert bool(work) == bool(self.live)
        for one in work:
            assert one.request.slot is not None
            held = self.cache.held[one.request.request_id]
            assert held * BLOCK >= one.request.num_computed_tokens + one.num_rows
            finish_row(self.scheduler, one, num_accepted)
            if self.scheduler.find(one.request.request_id) is None:
                del self.live[one.request.request_id]
                self.finished.add(one.request.request_id)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        running: list[Any] = self.scheduler.running
        slots = [request.slot for request in running]
        assert None not in slots
        assert len(set(slots)) == len(slots) <= self.scheduler.max_num_seqs
        assert {r.request_id for r in running} == set(self.cache.held)
        assert len(running) + self.scheduler.num_waiting == len(self.live)
        assert self.cache.num_free >= 0
        for request_id, count in self.cache.admitted.items():
            assert self.cache.released[request_id] == count - (request_id in self.cache.held)
        queue = self.scheduler.queue(len(self.live))
        assert set(queue) == {i for i in self.live if i not in self.cache.held}
        assert len(queue) == self.scheduler.num_waiting

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        left = set(self.live)
        for _ in range(100 * (1 + sum(r.num_tokens + r.max_tokens for r in self.live.values()))):
            if not self.live:
                break
            self.step(2, 1, 0.05)
        assert not self.live
        assert left <= self.finished
        assert self.cache.released == self.cache.admitted
        assert self.cache.num_free == self.cache.num_blocks


TestChurn = Churn.TestCase
TestChurn.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
