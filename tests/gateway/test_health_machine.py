"""The health state machine over scripted histories, in simulated seconds: when it is right, and when it holds still."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskfleet.endpoint import EngineStats, RankHealth
from deskfleet.errors import ConfigError
from deskfleet.gateway.health import HealthMachine, Verdict
from deskfleet.gateway.symptoms import CanaryResult, HealthSettings, Sample, Traffic

GIB = 1 << 30
SETTINGS = HealthSettings(memory_floor_bytes=5 * GIB, memory_critical_bytes=1 * GIB)


class Fleet:
    """Three ranks, a gateway and a clock, all of them numbers. `tick` is one second and one sample."""

    def __init__(self, settings: HealthSettings = SETTINGS, num_ranks: int = 3) -> None:
        self.now_s = 1000.0
        self.machine = HealthMachine(settings, now_s=self.now_s)
        self.stats: EngineStats | None = EngineStats()
        self.ranks = [RankHealth(rank, heartbeat_age_s=0.5) for rank in range(num_ranks)]
        self.traffic = Traffic()
        self.failure: str | None = None
        self.available_bytes = 60 * GIB
        self.frozen: set[int] = set()
        self.canary: CanaryResult | None = None
        self.canary_error: Callable[[], str | None] = lambda: None
        self.history: list[Verdict] = []

    def tick(self, *, moves: int = 0, steps: int = 0, chunks: int = 0) -> Verdict:
        self.now_s += 1.0
        self.ranks = [self._beat(rank, moves, steps) for rank in self.ranks]
        if steps and self.stats is not None:
            self.stats = replace(self.stats, num_steps=self.stats.num_steps + steps)
        self.traffic = replace(self.traffic, num_chunks=self.traffic.num_chunks + chunks)
        verdict = self.machine.observe(
            Sample(
                now_s=self.now_s,
                failure=self.failure,
                stats=self.stats,
                ranks=tuple(self.ranks),
                traffic=self.traffic,
                canary=self.canary,
                available_bytes=self.available_bytes,
            )
        )
        if verdict.wants_canary:  # it has ended by the next sample
            number = 1 if self.canary is None else self.canary.number + 1
            self.canary = CanaryResult(number, self.now_s + 0.5, 0.5, self.canary_error())
        self.history.append(verdict)
        return verdict

    def _beat(self, rank: RankHealth, moves: int, steps: int) -> RankHealth:
        if rank.rank in self.frozen:
            return replace(rank, heartbeat_age_s=(rank.heartbeat_age_s or 0) + 1)
        return replace(
            rank,
            heartbeat_age_s=0.5,
            num_moves=rank.num_moves + moves + steps,
            num_steps=rank.num_steps + steps,
        )

    def run(self, seconds: int, **each: int) -> set[str]:
        """The states of so many seconds."""
        return {self.tick(**each).state for _ in range(seconds)}

    def until(self, state: str, *, within: int, **each: int) -> int:
        """Seconds until `state`."""
        for second in range(1, within + 1):
            if self.tick(**each).state == state:
                return second
        pytest.fail(f"not {state} after {within} s, but {self.history[-1]}")

    def works(self, state: str = "decode", num_tokens: int = 1, **traffic: int) -> None:
        """Requests run on every rank."""
        self.stats = replace(self.stats or EngineStats(), num_running=1)
        self.ranks = [replace(rank, state=state, num_tokens=num_tokens) for rank in self.ranks]
        self.traffic = replace(self.traffic, **{"num_open": 1, "num_waiting": 1, **traffic})

    def rests(self) -> None:
        """Nothing runs any more."""
        self.stats = replace(self.stats or EngineStats(), num_running=0, num_waiting=0)
        self.ranks = [replace(rank, state="idle", num_tokens=0) for rank in self.ranks]
        self.traffic = replace(self.traffic, num_open=0, num_waiting=0, num_tokens_ahead=0)


def test_ready_then_busy_then_ready() -> None:
    fleet = Fleet()
    assert fleet.run(30) == {"ready"}
    fleet.works()
    assert fleet.run(30, steps=20, chunks=20) == {"busy"}
    fleet.rests()
    assert fleet.run(5) == {"ready"}
    assert all(verdict.can_answer and verdict.reason is None for verdict in fleet.history)


# --- the scenarios of the reports: a rank dies, one freezes, a long prefill, empty answers, one missed probe


def test_a_rank_that_dies_turns_red_within_30_s_even_if_the_engine_says_nothing() -> None:
    fleet = Fleet()
    fleet.works()
    fleet.run(5, steps=3)
    fleet.ranks[2] = replace(fleet.ranks[2], state="ended")
    assert fleet.until("stuck", within=30) <= 5
    verdict = fleet.history[-1]
    assert (verdict.can_answer, verdict.reasons) == (False, ("the process of rank 2 has ended",))


def test_the_engines_own_word_is_believed_at_once() -> None:
    fleet = Fleet()
    fleet.works()
    fleet.run(5, steps=3)
    fleet.failure = "rank 2 was killed by SIGKILL; the group was stopped"
    assert fleet.until("dead", within=30) == 1
    assert fleet.history[-1].reason == fleet.failure


def test_a_frozen_rank_is_named_within_30_s_and_its_return_needs_proof() -> None:
    fleet = Fleet()
    fleet.works()
    fleet.run(5, steps=3)
    fleet.frozen = {1}
    seconds = fleet.until("stuck", within=30)
    assert 9 < seconds < 20
    reason = fleet.history[-1].reason or ""
    assert reason.startswith("rank 1 has been silent for"), reason
    assert not any(verdict.wants_canary for verdict in fleet.history), (
        "a frozen engine is not given more work"
    )

    fleet.rests()  # what ran was failed
    fleet.frozen = set()
    assert fleet.tick().state == "stuck"
    assert "has not answered since: rank 1 has been silent" in (fleet.history[-1].reason or "")
    assert fleet.until("ready", within=10) <= 2, "one good canary is proof"


def test_all_ranks_alive_and_stuck_in_a_collective() -> None:
    fleet = Fleet()
    fleet.works()
    fleet.run(5, steps=3)
    assert fleet.until("stuck", within=30) <= 20
    assert "(rank 0 is in decode, rank 1 is in decode, rank 2 is in decode)" in (
        fleet.history[-1].reason or ""
    )


@pytest.mark.parametrize("what", ["steps", "moves"])
def test_a_prefill_of_60_s_that_moves_stays_busy(what: str) -> None:
    """Also one single pass of 60 s: its layers are moves."""
    fleet = Fleet()
    fleet.works("prefill", num_tokens=2048)
    for _ in range(6):
        assert fleet.run(9) == {"busy"}
        assert fleet.run(1, **{what: 1}) == {"busy"}


def test_a_long_prompt_on_an_engine_without_counters_has_time_and_a_short_one_has_not() -> None:
    for num_tokens, expected in ((20_000, {"busy"}), (100, {"busy", "stuck"})):
        fleet = Fleet(num_ranks=0)
        fleet.traffic = Traffic(num_open=1, num_waiting=1, num_tokens_ahead=num_tokens)
        assert fleet.run(60) == expected


def test_a_slow_client_is_not_a_stuck_engine() -> None:
    """Its request is open, but nobody waits for the engine."""
    fleet = Fleet()
    fleet.traffic = Traffic(num_open=1, num_waiting=0)
    assert fleet.run(300) == {"ready"}


def fail(fleet: Fleet, what: str) -> None:
    traffic = fleet.traffic
    fleet.traffic = replace(
        traffic,
        num_failed=traffic.num_failed + 1,
        num_failed_in_a_row=traffic.num_failed_in_a_row + 1,
        latest_failure=what,
    )


def answer(fleet: Fleet) -> None:
    fleet.traffic = replace(fleet.traffic, num_answered=fleet.traffic.num_answered + 1, num_failed_in_a_row=0)


def test_empty_answers_are_stuck_when_the_canary_gets_one_too() -> None:
    fleet = Fleet(num_ranks=0)
    fleet.run(3)
    fleet.canary_error = lambda: "the answer was empty"
    for _ in range(3):
        fail(fleet, "the engine stopped answering before the end")
        fleet.tick()
    assert fleet.until("stuck", within=30) <= 3
    assert "the answer was empty" in (fleet.history[-1].reason or "")
    fleet.canary_error = lambda: None
    assert fleet.until("degraded", within=30) <= 10, "it answers again, and is watched"


def test_bad_prompts_do_not_take_a_good_engine_down() -> None:
    """Three requests in a row fail, the canary does not: it was them."""
    fleet = Fleet()
    fleet.run(3)
    for _ in range(5):
        fail(fleet, "3 logits of this request are not finite at position 64")
        fleet.tick()
    assert fleet.run(60) == {"degraded"}
    assert fleet.history[-1].can_answer
    assert "5 answers failed in the last 5 minutes, the latest: 3 logits" in (fleet.history[-1].reason or "")
    num_canaries = 0 if fleet.canary is None else fleet.canary.number
    assert 1 <= num_canaries <= 2, "one canary tells; asking on and on would be load"
    answer(fleet)
    assert "ready" in fleet.run(260), "forgotten after five minutes"


@pytest.mark.parametrize(("num_misses", "states"), [(1, {"ready"}), (2, {"ready", "degraded"})])
def test_one_missed_canary_changes_nothing_and_two_are_a_doubt(num_misses: int, states: set[str]) -> None:
    fleet = Fleet()
    misses = ["no token within 10 s"] * num_misses
    fleet.canary_error = lambda: misses.pop() if misses else None
    assert fleet.run(150) == states
    assert fleet.tick().state == "ready"


def test_three_missed_canaries_of_an_idle_engine_are_stuck_and_in_the_end_it_is_given_up() -> None:
    fleet = Fleet()
    fleet.canary_error = lambda: "no token within 10 s"
    first = fleet.until("stuck", within=90)
    assert first < 60 + 3 * 7
    assert (
        fleet.history[-1].reason == "3 canary generations failed in a row, the latest: no token within 10 s"
    )
    actions = [fleet.tick().action for _ in range(130)]
    assert "abandon" not in actions[:118]
    assert actions[-1] == "abandon"
    assert set(fleet.run(5)) == {"stuck"}


def test_a_canary_is_asked_for_when_idle_and_never_when_busy() -> None:
    fleet = Fleet()
    fleet.run(130)
    assert fleet.canary is not None
    assert fleet.canary.number == 2
    fleet.works()
    fleet.run(300, steps=1, chunks=1)
    assert fleet.canary.number == 2


def test_the_canary_has_more_time_the_more_is_before_it() -> None:
    fleet = Fleet()
    assert fleet.tick().canary_deadline_s == SETTINGS.canary_deadline_s
    fleet.works(num_open=4, num_tokens_ahead=10_000)
    fleet.stats = EngineStats(num_running=4, num_waiting=2)
    assert fleet.tick(steps=1).canary_deadline_s == pytest.approx(10 + 6 * 1.0 + 10_000 * 0.005)


def test_a_saturated_engine_is_busy_for_as_long_as_it_moves() -> None:
    fleet = Fleet()
    fleet.works(num_open=600, num_waiting=600, num_tokens_ahead=10**6)
    fleet.stats = EngineStats(num_running=64, num_waiting=536)
    for _ in range(360):
        assert fleet.run(9) == {"busy"}
        assert fleet.run(1, steps=1) == {"busy"}


def test_a_canary_that_waits_behind_others_proves_nothing() -> None:
    """Bad prompts raise doubt while the engine is full for minutes: the canary never gets its turn in time."""
    fleet = Fleet()
    fleet.works(num_open=600, num_waiting=600)
    fleet.stats = EngineStats(num_running=64, num_waiting=536)
    for _ in range(3):
        fail(fleet, "8 logits are not finite")
        fleet.tick(steps=1, chunks=1)
    for number in range(1, 30):
        fleet.canary = CanaryResult(number, fleet.now_s, 600.0, "no answer within 600 s", timed_out=True)
        assert fleet.run(20, steps=1, chunks=1) <= {"busy", "degraded"}, fleet.history[-1]
    fleet.canary = CanaryResult(99, fleet.now_s, 10.0, "a log probability is not finite")
    assert fleet.tick(steps=1, chunks=1).state == "stuck", "one that gets nonsense does prove something"


# --- garbage


def test_logits_that_are_not_finite_degrade_and_then_stop_it() -> None:
    fleet = Fleet()
    fleet.run(5)
    fleet.stats = EngineStats(num_not_finite=1)
    fail(fleet, "8 logits of this request are not finite at position 5")
    assert fleet.run(20) == {"ready"}, "one alone changes nothing"
    fleet.stats = EngineStats(num_not_finite=2)
    fail(fleet, "8 logits of this request are not finite at position 6")
    assert fleet.tick().state == "degraded"
    assert fleet.history[-1].reasons[0] == "the logits of 2 requests were not finite in the last 5 minutes"
    fleet.canary_error = lambda: "a log probability is not finite"
    fleet.stats = EngineStats(num_not_finite=3)
    fail(fleet, "8 logits of this request are not finite at position 7")
    assert fleet.until("stuck", within=10) <= 3
    assert not fleet.history[-1].can_answer
    assert fleet.until("stuck", within=1) == 1
    assert any(fleet.tick().action == "abandon" for _ in range(125))


# --- memory


def test_memory_that_runs_out_stops_admission_in_time() -> None:
    """MemAvailable as one log had it; one more second at each of the last values."""
    fleet = Fleet()
    fleet.ranks[1] = replace(fleet.ranks[1], memory_bytes=61 * GIB, host_available_bytes=40 * GIB)
    answering = []
    for available in (34.0, 20.1, 12.7, 6.0, 4.8, 4.7, 4.7):
        fleet.available_bytes = int(available * GIB)
        answering.append(fleet.tick().can_answer)
    assert answering == [True] * 6 + [False]
    verdict = fleet.history[-1]
    assert verdict.state == "degraded"
    assert "4.70 GiB of memory are available on this host, below the floor of 5.00 GiB" in verdict.reasons[0]
    assert "rank 1 holds most, 61.00 GiB" in verdict.reasons[0]
    assert verdict.action == "none", "what runs may finish"
    fleet.available_bytes = int(5.2 * GIB)
    assert fleet.run(10) == {"degraded"}, "just above the floor is not enough yet"
    fleet.available_bytes = 9 * GIB
    assert fleet.until("ready", within=5) == 3


def test_one_noisy_sample_of_memory_changes_nothing() -> None:
    fleet = Fleet()
    for _ in range(50):
        fleet.available_bytes = GIB // 2
        assert fleet.tick().state == "ready"
        fleet.available_bytes = 9 * GIB
        assert fleet.run(4) == {"ready"}


def test_the_host_with_least_memory_counts() -> None:
    fleet = Fleet()
    fleet.ranks[2] = replace(fleet.ranks[2], host_available_bytes=4 * GIB)
    fleet.run(3)
    assert "on the host of rank 2" in (fleet.history[-1].reason or "")


def test_below_the_critical_floor_prompts_are_failed_one_by_one_and_then_the_engine_goes() -> None:
    fleet = Fleet()
    fleet.works(num_open=2, num_waiting=2)
    fleet.run(3, steps=1)
    fleet.available_bytes = GIB // 2
    actions = [fleet.tick(steps=1).action for _ in range(3)]
    assert actions == ["none", "none", "relieve"]
    assert [fleet.tick(steps=1).action for _ in range(3)] == ["none", "none", "relieve"], "one at a time"
    fleet.rests()
    later = [fleet.tick().action for _ in range(14)]
    assert "relieve" not in later
    assert later.index("abandon") >= 10
    fleet.available_bytes = 2 * GIB
    assert fleet.tick().action == "none"


# --- what must not be taken for an engine's fault


def test_an_observer_that_slept_draws_no_conclusions() -> None:
    """The whole machine was suspended for an hour in the middle of an answer."""
    fleet = Fleet()
    fleet.works()
    fleet.run(5, steps=3)
    fleet.now_s += 3600
    fleet.ranks = [replace(rank, heartbeat_age_s=3600.5) for rank in fleet.ranks]
    fleet.frozen = {0, 1, 2}  # their first heartbeats are still under way
    assert fleet.run(2) == {"busy"}
    fleet.frozen = set()
    assert fleet.run(10) == {"busy"}, "what it was at takes as long as it would have taken"
    assert fleet.run(10, steps=1) == {"busy"}


def test_time_that_the_observer_slept_does_not_make_a_stuck_engine_a_dead_one() -> None:
    fleet = Fleet()
    fleet.canary_error = lambda: "no token within 10 s"
    fleet.works()
    fleet.until("stuck", within=30)
    fleet.now_s += 3600
    actions = [fleet.tick().action for _ in range(121)]
    assert actions == [*["none"] * 120, "abandon"]


def test_an_engine_elsewhere_that_may_come_back_is_given_up_too() -> None:
    """Its router calls it dead; who can end it must be told, and is not when it comes back in time."""
    fleet = Fleet()
    fleet.run(5)
    fleet.failure = "http://a:8000 does not answer"
    assert {fleet.tick().action for _ in range(110)} == {"none"}
    fleet.failure = None
    fleet.run(10)
    assert fleet.tick().state == "ready"
    fleet.failure = "http://a:8000 does not answer"
    assert [fleet.tick().action for _ in range(121)] == [*["none"] * 120, "abandon"]


def test_loading_is_starting_and_takes_as_long_as_it_takes() -> None:
    fleet = Fleet()
    fleet.ranks = [RankHealth(rank, state="loading", heartbeat_age_s=30.0) for rank in range(3)]
    assert fleet.run(900) == {"starting"}
    assert fleet.history[-1].reason == "rank 0, 1, 2 loads"
    assert not fleet.history[-1].can_answer
    assert fleet.canary is None
    fleet.ranks = [replace(rank, state="idle") for rank in fleet.ranks]
    assert fleet.tick().state == "ready"


def test_an_upstream_is_not_ready_before_it_has_answered_once() -> None:
    fleet = Fleet(replace(SETTINGS, needs_first_answer=True), num_ranks=0)
    fleet.stats = None
    assert fleet.run(30) == {"starting"}
    assert fleet.canary is None, "nothing is sent to what has not been reached"
    fleet.stats = EngineStats()
    fleet.canary_error = lambda: "connection refused"
    assert fleet.run(8) == {"starting"}
    fleet.canary_error = lambda: None
    assert fleet.until("ready", within=10)


def test_an_engine_that_says_nothing_any_more_is_stuck() -> None:
    fleet = Fleet(num_ranks=0)
    fleet.run(5)
    fleet.stats = None
    assert fleet.run(2) == {"ready"}
    assert fleet.tick().reason == "the engine does not say how it is"


@settings(deadline=None)
@given(st.data())
def test_a_moving_engine_is_never_stuck(data: st.DataObject) -> None:
    """Whatever happens: something moves at least every 12 s, heartbeats are at most 9 s old, one canary may fail."""
    fleet = Fleet()
    quiet_s = since_miss = 0
    for _ in range(60):
        kind = data.draw(st.sampled_from(("work", "rest", "quiet", "late", "miss")))
        if kind == "work":
            fleet.works(num_open=3, num_waiting=data.draw(st.integers(0, 3)))
        elif kind == "rest":
            fleet.rests()
        elif kind == "miss" and since_miss > 3:
            number = 1 if fleet.canary is None else fleet.canary.number + 1
            fleet.canary = CanaryResult(number, fleet.now_s, 10.0, "no token within 10 s")
            since_miss = 0
        since_miss += 1
        late = kind == "late"
        fleet.frozen = {data.draw(st.integers(0, 2))} if late else set()
        num_quiet = data.draw(st.integers(1, 8)) if kind in ("quiet", "late") else 1
        for _ in range(num_quiet):
            quiet_s = 0 if quiet_s >= 11 else quiet_s + 1
            assert fleet.tick(moves=int(quiet_s == 0)).state in ("ready", "busy", "degraded"), fleet.history[
                -1
            ]
        fleet.frozen = set()
        fleet.tick(moves=1)
        quiet_s = 0


@settings(deadline=None)
@given(st.lists(st.sampled_from(("work", "rest", "chunk", "step")), max_size=30), st.booleans())
def test_work_that_stands_still_is_found_within_30_s_whatever_came_before(
    before: list[str], has_ranks: bool
) -> None:
    fleet = Fleet(num_ranks=2 if has_ranks else 0)
    for kind in before:
        if kind == "work":
            fleet.works()
        elif kind == "rest":
            fleet.rests()
        fleet.tick(steps=int(kind == "step"), chunks=int(kind == "chunk"))
    fleet.works("prefill", num_tokens=512)
    fleet.until("stuck", within=30)


@pytest.mark.parametrize("changes", [{"strikes": 0}, {"silent_s": 0.0}, {"memory_critical_bytes": 6 * GIB}])
def test_thresholds_that_cannot_work_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        replace(SETTINGS, **changes)
