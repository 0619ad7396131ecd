"""The queue in front of the engine, in simulated time. Takes about two seconds."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from deskfleet.endpoint import GenerateRequest, SamplingParams, TokenChunk
from deskfleet.errors import EngineError
from deskfleet.gateway.admission import (
    REFUSED,
    Admission,
    AdmissionSettings,
    ShareSettings,
    Ticket,
)
from deskfleet.gateway.policies.contract import Caller, Draft, Wishes
from deskfleet.gateway.policies.counting import Counters
from deskfleet.gateway.refusals import DeadlinePassed, Refusal, ServerStopping, TooManyRequests, WaitedTooLong


class _Instant(selectors.BaseSelector):
    """Waits for nothing: the clock jumps to when something is due instead."""

    def __init__(self) -> None:
        self._inner = selectors.DefaultSelector()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._inner.select(0)
        if not ready:
            assert timeout is not None, "everybody waits for somebody else"
            self.now_s += timeout
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def get_map(self) -> Any:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class _SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._instant = _Instant()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now_s


def simulate(main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` in a time that passes only while everybody waits."""
    with asyncio.Runner(loop_factory=_SimulatedLoop) as runner:

        async def run() -> None:
            await main()

        runner.run(run())


def draft(
    key: str | None = None, *, prompt: int = 100, max_tokens: int = 100, timeout_s: float | None = None
) -> Draft:
    return Draft(
        generate=GenerateRequest("r", (1,), SamplingParams(max_tokens=max_tokens), timeout_s=timeout_s),
        wishes=Wishes(thinking=False),
        caller=Caller(key),
        model_id="m",
        num_prompt_tokens=prompt,
        max_model_len=4096,
    )


class Traffic:
    """Requests on their way through one queue, and in which order they ran and ended."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.started: list[str] = []
        self.ended: list[tuple[str, float]] = []
        self.failed: dict[str, BaseException] = {}
        self.running: Tally[str | None] = Tally()
        self.most_running: Tally[str | None] = Tally()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def send(
        self,
        name: str,
        key: str | None = None,
        *,
        takes_s: float = 1.0,
        share: ShareSettings | None = None,
        num_generated: int = 100,
        **request: Any,
    ) -> asyncio.Task[None]:
        """Send a request that runs for `takes_s`."""

        async def run() -> None:
            begin_s = asyncio.get_running_loop().time()
            try:
                async with self.admission.admitted(draft(key, **request), share or ShareSettings()) as ticket:
                    self.started.append(name)
                    for who in (key, ...):
                        self.running[who] += 1  # type: ignore[index]
                        self.most_running[who] = max(self.most_running[who], self.running[who])  # type: ignore[index]
                    try:
                        await asyncio.sleep(takes_s)
                        ticket.push(TokenChunk((7,) * num_generated, None, request.get("prompt", 100)))
                    finally:
                        for who in (key, ...):
                            self.running[who] -= 1  # type: ignore[index]
                    self.ended.append((name, asyncio.get_running_loop().time() - begin_s))
            except (Refusal, EngineError) as error:
                self.failed[name] = error

        self.tasks[name] = asyncio.ensure_future(run())
        return self.tasks[name]

    def send_many(self, names: Iterable[str], key: str | None = None, **request: Any) -> None:
        for name in names:
            self.send(name, key, **request)

    async def settle(self) -> None:
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


def at_most(max_running: int, **settings: Any) -> Admission:
    return Admission(AdmissionSettings(max_running=max_running, **settings))


def test_eight_means_eight() -> None:
    async def main() -> None:
        traffic = Traffic(Admission(engine_max_running=8))
        traffic.send_many([f"a{n}" for n in range(100)])
        await traffic.settle()
        assert len(traffic.ended) == 100
        assert traffic.most_running[...] == 8  # type: ignore[index]
        assert max(waited_s for _, waited_s in traffic.ended) == 13.0, "100 requests, 8 at a time, no gaps"

    simulate(main)


def test_without_a_limit_nobody_waits() -> None:
    async def main() -> None:
        traffic = Traffic(Admission())
        traffic.send_many([f"a{n}" for n in range(500)])
        await traffic.settle()
        assert {waited_s for _, waited_s in traffic.ended} == {1.0}

    simulate(main)


def test_one_key_with_a_hundred_requests_does_not_hold_up_another() -> None:
    async def main() -> None:
        traffic = Traffic(at_most(2))
        traffic.send_many([f"a{n}" for n in range(100)], "alice")
        await asyncio.sleep(10.5)  # alice has been alone for a while
        traffic.send_many([f"b{n}" for n in range(5)], "bob")
        await traffic.settle()
        place = traffic.started.index("b0")
        assert place <= 22 + 1, "bob's first goes at the next turn, or the one after"
        after = traffic.started[place : place + 9]
        assert sum(name.startswith("b") for name in after) == 5, "then one each"

    simulate(main)


def test_a_key_that_was_alone_owes_nothing() -> None:
    async def main() -> None:
        traffic = Traffic(at_most(1))
        for n in range(50):
            await traffic.send(f"a{n}", "alice")
        traffic.send_many([f"c{n}" for n in range(4)], "alice")
        traffic.send_many([f"b{n}" for n in range(4)], "bob")
        await traffic.settle()
        assert sorted(traffic.started[50:54]) == ["b0", "b1", "c0", "c1"]

    simulate(main)


def test_work_is_shared_not_requests() -> None:
    async def main() -> None:
        traffic = Traffic(at_most(1))
        traffic.send("first")
        traffic.send_many([f"long{n}" for n in range(10)], "alice", prompt=10_000)
        traffic.send_many([f"short{n}" for n in range(60)], "bob", prompt=400)
        await traffic.settle()
        order = traffic.started[1:]
        until_second_long = order[: order.index("long1")]
        assert 15 <= sum(name.startswith("short") for name in until_second_long) <= 30, (
            "about 10,100 tokens of each"
        )

    simulate(main)


def test_work_is_put_right_when_a_request_ends() -> None:
    async def main() -> None:
        traffic = Traffic(at_most(1))
        traffic.send("first")
        # Both ask for the same, and wait from the beginning; what alice gets is ten times as long.
        traffic.send_many([f"a{n}" for n in range(20)], "alice", max_tokens=9000, num_generated=4900)
        traffic.send_many([f"b{n}" for n in range(80)], "bob", max_tokens=9000, num_generated=400)
        await traffic.settle()
        first = traffic.started[1:61]
        # 100 tokens of prompt each: ten of bob's for one of alice's.
        assert 4 <= sum(name.startswith("a") for name in first) <= 8

    simulate(main)


def test_a_key_held_up_by_its_own_limit_saves_nothing_up() -> None:
    async def main() -> None:
        traffic = Traffic(at_most(2))
        share = ShareSettings(max_running=1)
        traffic.send_many([f"a{n}" for n in range(30)], "alice", takes_s=10.0, share=share)
        traffic.send_many([f"b{n}" for n in range(200)], "bob")
        await asyncio.sleep(95.5)  # alice has had one place, bob the other
        traffic.send_many([f"c{n}" for n in range(20)], "carol")
        await asyncio.sleep(10)
        assert sum(name.startswith("c") for name in traffic.started) >= 4, "carol and bob take turns"
        await traffic.settle()

    simulate(main)


def test_weight() -> None:
    async def main() -> None:
        traffic = Traffic(at_most(1))
        traffic.send("first")
        traffic.send_many([f"a{n}" for n in range(40)], "alice", share=ShareSettings(weight=3.0))
        traffic.send_many([f"b{n}" for n in range(40)], "bob")
        await traffic.settle()
        first = traffic.started[1:41]
        assert 28 <= sum(name.startswith("a") for name in first) <= 32

    simulate(main)


def test_a_key_has_no_more_running_than_it_may() -> None:
    async def main() -> None:
        traffic = Traffic(at_most(4))
        traffic.send_many([f"a{n}" for n in range(10)], "alice", share=ShareSettings(max_running=2))
        traffic.send_many([f"b{n}" for n in range(10)], "bob")
        await traffic.settle()
        assert traffic.most_running["alice"] == 2
        assert traffic.most_running[...] == 4, "the places that alice may not have are bob's"  # type: ignore[index]
        assert len(traffic.ended) == 20

    simulate(main)


def test_a_full_queue_refuses_with_a_time_learnt_from_what_ended() -> None:
    async def main() -> None:
        counters = Counters()
        admission = Admission(AdmissionSettings(max_running=2, max_waiting=20), counters=counters)
        traffic = Traffic(admission)
        traffic.send_many([f"a{n}" for n in range(42)], takes_s=4.0)
        await asyncio.sleep(1)
        assert len(traffic.failed) == 20
        first = next(iter(traffic.failed.values()))
        assert isinstance(first, TooManyRequests)
        assert first.headers == {"Retry-After": "10"}, "nothing has ended yet, so nothing is known"
        await asyncio.sleep(8)
        traffic.send_many([f"b{n}" for n in range(5)], takes_s=4.0)
        await asyncio.sleep(0.1)
        late = traffic.failed["b4"]
        assert isinstance(late, TooManyRequests)
        assert 18 <= late.retry_after_s <= 28, "half of 20, at one every two seconds"
        assert counters.read()[REFUSED] == {("m", "", "full"): 21.0}
        await traffic.settle()
        # Who comes back when told finds room.
        assert admission.state().waiting == ()

    simulate(main)


def test_no_key_can_fill_the_queue() -> None:
    async def main() -> None:
        traffic = Traffic(at_most(1, max_waiting=10))
        traffic.send_many([f"a{n}" for n in range(11)], "alice")
        await asyncio.sleep(0.1)
        traffic.send_many([f"b{n}" for n in range(7)], "bob")
        await asyncio.sleep(0.1)
        assert set(traffic.failed) == {"a10", "a9", "a8", "a7", "a6", "b5", "b6"}, (
            "half each, the last to come go"
        )
        await traffic.settle()
        assert len(traffic.ended) == 11

    simulate(main)


def test_a_keys_own_bound_of_waiting_requests() -> None:
    async def main() -> None:
        traffic = Traffic(at_most(1))
        share = ShareSettings(max_waiting=2)
        traffic.send_many([f"a{n}" for n in range(5)], "alice", share=share)
        traffic.send_many([f"b{n}" for n in range(5)], "bob")
        await traffic.settle()
        assert set(traffic.failed) == {"a3", "a4"}
        assert "2 requests of this key wait already" in str(traffic.failed["a3"])

    simulate(main)


def test_waiting_too_long_and_deadlines() -> None:
    async def main() -> None:
        traffic = Traffic(at_most(1))
        traffic.send("long", takes_s=100.0, timeout_s=60.0)
        traffic.send("patient", timeout_s=None, share=ShareSettings(max_wait_s=None))
        traffic.send("impatient", share=ShareSettings(max_wait_s=5.0))
        traffic.send("late", timeout_s=30.0)
        await traffic.settle()
        assert [name for name, _ in traffic.ended] == ["patient"]
        assert traffic.ended[0][1] == 61.0, "its turn came when the long one's deadline passed"
        kinds = {name: type(error) for name, error in traffic.failed.items()}
        assert kinds == {"impatient": WaitedTooLong, "late": DeadlinePassed, "long": DeadlinePassed}
        assert str(traffic.failed["long"]) == "the deadline passed after 60.0 s, with 0 tokens generated"
        assert "waited 5.0 s" in str(traffic.failed["impatient"])
        assert "after 30.0 s" in str(traffic.failed["late"])

    simulate(main)


def test_a_timeout_of_the_block_itself_is_its_own() -> None:
    async def main() -> None:
        admission = at_most(1)
        with pytest.raises(TimeoutError):
            async with admission.admitted(draft(timeout_s=100.0), ShareSettings()), asyncio.timeout(1):
                await asyncio.sleep(50)
        assert admission.state().num_running == 0

    simulate(main)


def test_a_client_that_leaves_gives_up_its_place() -> None:
    async def main() -> None:
        admission = at_most(1)
        traffic = Traffic(admission)
        traffic.send_many(["a", "b", "c", "d"])
        await asyncio.sleep(0.5)
        assert [(w.position, w.waited_s) for w in admission.state().waiting] == [(1, 0.5), (2, 0.5), (3, 0.5)]
        traffic.tasks["b"].cancel()
        traffic.tasks["a"].cancel()  # runs
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert admission.state().num_running == 1
        await traffic.settle()
        assert [name for name, _ in traffic.ended] == ["c", "d"]
        assert admission.state() == admission.state().__class__(0, 1, (), None)

    simulate(main)


def test_a_turn_given_to_a_client_that_has_just_left_goes_to_the_next() -> None:
    async def main() -> None:
        traffic = Traffic(at_most(1))
        traffic.send_many(["a", "b", "c"])
        await asyncio.sleep(0.5)
        traffic.tasks["a"].cancel()
        traffic.tasks["b"].cancel()  # in the same moment
        await traffic.settle()
        assert [name for name, _ in traffic.ended] == ["c"]

    simulate(main)


def test_draining_lets_running_requests_finish() -> None:
    async def main() -> None:
        admission = at_most(2)
        traffic = Traffic(admission)
        traffic.send("a", takes_s=3.0)
        traffic.send("b", takes_s=8.0)
        traffic.send("waits")
        await asyncio.sleep(1)
        drained = asyncio.ensure_future(admission.drain("the server is stopping", 30.0))
        await asyncio.sleep(0.1)
        traffic.send("new")
        await asyncio.sleep(0.1)
        for name in ("waits", "new"):
            assert isinstance(traffic.failed[name], ServerStopping)
            assert str(traffic.failed[name]) == "the server is stopping"
        with pytest.raises(ServerStopping):
            admission.check_open()
        assert await drained is True
        assert asyncio.get_running_loop().time() == 1008.0, "as soon as the last one ends, not later"
        assert [name for name, _ in traffic.ended] == ["a", "b"]

    simulate(main)


def test_draining_ends_what_takes_too_long() -> None:
    async def main() -> None:
        admission = at_most(2, drain_s=5)
        traffic = Traffic(admission)
        traffic.send("a", takes_s=3.0)
        traffic.send("b", takes_s=8000.0)
        await asyncio.sleep(1)
        assert await admission.drain("the server is stopping") is False
        await traffic.settle()
        assert asyncio.get_running_loop().time() == 1006.0
        assert [name for name, _ in traffic.ended] == ["a"]
        assert isinstance(traffic.failed["b"], ServerStopping)
        assert "before the answer was complete; 5 s were not enough" in str(traffic.failed["b"])
        assert await admission.drain("again") is True

    simulate(main)


def test_a_dead_engine_frees_everybody_who_waits() -> None:
    async def main() -> None:
        admission = at_most(1)
        traffic = Traffic(admission)
        traffic.send_many(["a", "b", "c"])
        await asyncio.sleep(0.1)
        admission.refuse_waiting(EngineError("rank 1 died"))
        await traffic.settle()
        assert set(traffic.failed) == {"b", "c"}
        assert [name for name, _ in traffic.ended] == ["a"]

    simulate(main)


def test_changed_settings_hold_at_once() -> None:
    async def main() -> None:
        admission = at_most(1)
        traffic = Traffic(admission)
        traffic.send_many([f"a{n}" for n in range(9)])
        await asyncio.sleep(0.5)
        admission.change(AdmissionSettings(max_running=8))
        await asyncio.sleep(0.1)
        assert admission.state().num_running == 8
        await traffic.settle()

    simulate(main)


@examples(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["alice", "bob", None]),
            st.sampled_from([0.0, 0.3, 2.0]),  # pause before it
            st.sampled_from([0.2, 1.0, 5.0]),  # how long it takes
            st.sampled_from([None, None, 0.5, 3.0]),  # its deadline
            st.sampled_from([None, None, 0.1, 1.5]),  # when its client leaves
        ),
        max_size=25,
    ),
    st.integers(1, 3),
    st.integers(0, 4),
    st.sampled_from([None, 1, 2]),
)
def test_whatever_comes_everybody_gets_an_answer_and_nothing_is_left(
    requests: list[tuple[str | None, float, float, float | None, float | None]],
    max_running: int,
    max_waiting: int,
    own_limit: int | None,
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        admission = at_most(max_running, max_waiting=max_waiting)
        traffic = Traffic(admission)
        share = ShareSettings(max_running=own_limit)
        for number, (key, pause_s, takes_s, timeout_s, leaves_s) in enumerate(requests):
            await asyncio.sleep(pause_s)
            task = traffic.send(str(number), key, takes_s=takes_s, timeout_s=timeout_s, share=share)
            if leaves_s is not None:
                loop.call_later(leaves_s, task.cancel)
        await traffic.settle()
        left = {name for name, task in traffic.tasks.items() if task.cancelled()}
        ended = {name for name, _ in traffic.ended}
        assert len(left | ended | set(traffic.failed)) == len(requests)
        assert traffic.most_running[...] <= max_running  # type: ignore[index]
        for key in ("alice", "bob", None):
            assert own_limit is None or traffic.most_running[key] <= own_limit
        state = admission.state()
        assert (state.num_running, state.waiting) == (0, ())
        await traffic.send("afterwards")
        assert traffic.ended[-1] == ("afterwards", 1.0)

    simulate(main)


def test_a_thousand_keys_cost_no_time() -> None:
    """A turn among a thousand waiting keys takes well under a millisecond."""

    async def main() -> None:
        admission = at_most(1, max_waiting=2000)
        traffic = Traffic(admission)
        for n in range(1000):
            traffic.send(f"k{n}", f"key{n}", takes_s=0.001)
        await asyncio.sleep(0)
        start_s = time.thread_time()
        await traffic.settle()
        assert (time.thread_time() - start_s) / 1000 < 2e-3
        assert len(traffic.ended) == 1000

    simulate(main)


def test_a_ticket_counts_what_ran() -> None:
    async def main() -> None:
        async with at_most(1).admitted(draft(prompt=1000), ShareSettings()) as ticket:
            assert isinstance(ticket, Ticket)
            chunk = TokenChunk((1, 2), None, 1000, num_cached_tokens=900)
            assert ticket.push(chunk) is chunk
            assert ticket.done_work == 102

    simulate(main)
