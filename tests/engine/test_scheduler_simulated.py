"""The scheduler under a simulated clock: a long prompt, streams and chats at once.

The machine is a law: a step takes 0.03 s + rows / 2,500 per s + 2 ns per row and position before it, and where a test
says so 3 % of noise. Alone, a prompt of 200,000 tokens takes two minutes. The pace is learnt from nothing and no
warm-up is left out: streams are held to the floor from their first token on.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from tests.engine.test_scheduler import FakeRequest, finish_row, make

FLOOR_TOK_S = 5.0
LONG = 200_000
SLOWER = 1.5


class Machine:
    """Runs requests in modelled time and keeps when each token came."""

    def __init__(
        self,
        *,
        noise: float = 0.0,
        num_drafts: int = 0,
        seed: int = 0,
        slower_from_s: float = math.inf,
        max_num_seqs: int = 16,
        **policy: Any,
    ) -> None:
        policy.setdefault("decode_floor_tok_s", FLOOR_TOK_S)
        self.scheduler, _ = make(max_num_seqs=max_num_seqs, rows=2048, num_blocks=2**16, **policy)
        self.now_s = -30.0
        self.token_s: defaultdict[str, list[float]] = defaultdict(list)
        self.waited_s: dict[str, float] = {}
        self._noise = noise
        self._slower_from_s = slower_from_s
        self._num_drafts = num_drafts
        self._random = random.Random(seed)
        self._later: list[FakeRequest] = []

    def send(self, request_id: str, at_s: float, num_prompt_tokens: int, max_tokens: int) -> None:
        self._later.append(FakeRequest(request_id, num_prompt_tokens, max_tokens, arrival_s=at_s))
        self._later.sort(key=lambda request: request.arrival_s)

    def run(self, until: str) -> None:
        """Until that request has ended."""
        while self._later or self.scheduler.find(until):
            while self._later and self._later[0].arrival_s <= self.now_s:
                self.scheduler.add(self._later.pop(0))  # type: ignore[arg-type]
            if self.scheduler:
                self._step()
            else:
                self.now_s = self._later[0].arrival_s

    def _step(self) -> None:
        work = self.scheduler.schedule(self.now_s)
        rows = sum(one.num_rows for one in work)
        pairs = sum(one.num_rows * one.request.num_computed_tokens for one in work)
        seconds = 0.03 + rows / 2500 + 2e-9 * pairs
        seconds *= 1 + self._noise * self._random.uniform(-1, 1)
        seconds *= SLOWER if self.now_s >= self._slower_from_s else 1
        self.now_s += seconds
        self.scheduler.observe(seconds)
        for one in work:
            request: Any = one.request
            gained = finish_row(self.scheduler, one, num_accepted=self._random.randint(0, self._num_drafts))
            self.token_s[request.request_id] += [self.now_s] * gained
            if gained:
                request.draft_token_ids = [0] * self._num_drafts
                self.waited_s.setdefault(request.request_id, self.now_s - request.arrival_s)

    def longest_gap_s(self) -> float:
        """Between two tokens of any stream."""
        return max(later - earlier for times in self.token_s.values() for earlier, later in pairwise(times))


def with_streams(**how: Any) -> Machine:
    """Four streams that have begun when the long prompt comes at 0 s."""
    machine = Machine(**how)
    for number in range(4):
        machine.send(f"stream {number}", -30.0 + number, 1000 * number + 500, 10**5)
    machine.send("long", 0.0, LONG, 1)
    return machine


@pytest.fixture(scope="module")
def alone_s() -> float:
    machine = Machine()
    machine.send("long", 0.0, LONG, 1)
    machine.run(until="long")
    return machine.waited_s["long"]


HOW = pytest.mark.parametrize(
    "how",
    [{}, {"noise": 0.03}, {"num_drafts": 5}, {"noise": 0.03, "num_drafts": 5}],
    ids=["plain", "noise", "drafts", "both"],
)


@HOW
def test_a_short_chat_beside_a_long_prompt_and_four_streams(how: dict[str, Any], alone_s: float) -> None:
    machine = with_streams(**how)
    machine.send("chat", 1.0, 20, 100)
    machine.run(until="long")
    assert machine.waited_s["chat"] < 5.0
    assert machine.longest_gap_s() <= 1 / FLOOR_TOK_S
    assert machine.waited_s["long"] <= 1.3 * alone_s


@HOW
@pytest.mark.parametrize("seed", range(3))
def test_eight_short_chats_at_random_times(how: dict[str, Any], seed: int, alone_s: float) -> None:
    machine = with_streams(seed=seed, **how)
    times = random.Random(seed)
    for number in range(8):
        machine.send(f"chat {number}", times.uniform(0.0, 100.0), times.randint(5, 500), 50)
    machine.run(until="long")
    assert max(machine.waited_s[f"chat {number}"] for number in range(8)) < 5.0
    assert machine.longest_gap_s() <= 1 / FLOOR_TOK_S
    assert machine.waited_s["long"] <= 1.3 * alone_s


def test_without_a_floor_the_same_load_stalls_the_streams() -> None:
    machine = with_streams(decode_floor_tok_s=0.01)
    machine.run(until="long")
    assert machine.longest_gap_s() > 3 / FLOOR_TOK_S


@pytest.mark.parametrize("passes", [True, False])
def test_a_chat_that_may_not_pass_waits_for_the_long_prompt(passes: bool) -> None:
    equal = {} if passes else {"short_prompt_tokens": 1, "long_prefill_tokens": 10**6}
    machine = with_streams(decode_floor_tok_s=0.01, **equal)  # the long prompt fills every step
    machine.send("chat", 1.0, 20, 100)
    machine.run(until="long")
    assert (machine.waited_s["chat"] < 5.0) == passes
    # In the end not for all of it: when memory bounds the chunks, others get the rows that are left.
    assert (machine.waited_s["chat"] > 30.0) == (not passes)


def test_two_long_prompts_run_one_after_the_other_and_chats_wait_for_neither(alone_s: float) -> None:
    machine = with_streams()
    machine.send("long 2", 1.0, LONG, 1)
    for number in range(30):
        machine.send(f"chat {number}", 10.0 * number, 400, 20)
    machine.run(until="long 2")
    assert max(machine.waited_s[f"chat {number}"] for number in range(30)) < 5.0
    assert machine.waited_s["long"] <= 1.3 * alone_s
    assert machine.waited_s["long 2"] <= 2 * 1.3 * alone_s
    assert machine.longest_gap_s() <= 1 / FLOOR_TOK_S


def test_a_machine_that_turns_slower_is_noticed_within_sixteen_steps() -> None:
    machine = with_streams(slower_from_s=40.0)
    machine.run(until="long")
    times = machine.token_s["stream 0"]
    late = [b for a, b in pairwise(times) if b - a > 1 / FLOOR_TOK_S]
    assert 0 < len(late) <= 16
    assert max(late) < 40.0 + 16 * SLOWER / FLOOR_TOK_S


def test_eight_means_eight() -> None:
    machine = Machine(max_num_seqs=8)
    for number in range(12):
        machine.send(str(number), 0.0, 100, 200)
    machine.run(until="7")
    assert len(machine.waited_s) == 8
    assert max(machine.waited_s.values()) < 1.0
    machine.run(until="11")
    assert len(machine.waited_s) == 12
