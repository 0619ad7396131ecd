"""The supervisor from launch to launch, which are scripted: what is started again, when, and what is written down."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from deskfleet import supervisor
from deskfleet.errors import ConfigError, DeskfleetError, EngineError
from deskfleet.fleet.follow import Ended
from deskfleet.fleet.memory import Action, MemoryLow
from deskfleet.fleet.spec import read_source, read_spec
from deskfleet.fleet.state import Busy, FleetState, Record
from deskfleet.fleet.watch import Policy, spell_due
from deskfleet.supervisor import GatesFailed, Order, policy_of, supervise
from tests.cli.cli_process import deskfleet
from tests.fleet.fleet_texts import write

FILE = """
name = "desk"
checkpoint = { model = "pocket" }
engine = { name = "native", image = "x@sha256:%s" }
restart = { backoff_s = %s, steady_s = 60 }
[[nodes]]
name = "here"
address = "local"
kind = "local"
paths = { checkpoint = "/c", engram = "/e", cache = "/k" }
"""
DIED = EngineError("rank 0 is gone")
LOW = MemoryLow(Action("stop_ranks", "here", 0.0, "here: 1 MiB available"))


@dataclass(frozen=True)
class Step:
    """One launch: whether it comes to serve, and what ends it. None: nothing does."""

    serves: bool
    error: BaseException | None = None


class Fleet:
    """A fleet whose launches go as `steps` say. `seen` is whether others could change it, before each served."""

    def __init__(self, directory: Path, backoff_s: list[float], *steps: Step) -> None:
        (directory / "fleet.toml").write_text(FILE % ("0" * 64, backoff_s))
        self.there = directory / "there"
        self.there.touch()
        self.state = FleetState("desk", {"XDG_STATE_HOME": str(directory)})
        self.order = Order(read_source(directory / "fleet.toml"), "00000000-first", "digest", {})
        self.steps = list(steps)
        self.until = asyncio.Event()
        self.is_locked: list[bool] = []
        self.num_settled = 0

    async def run(self) -> int:
        def settled() -> None:
            self.num_settled += 1

        async with asyncio.timeout(30):
            return await supervise(self.order, self.state, None, until=self.until, on_settled=settled)

    @property
    def record(self) -> Record:
        record = self.state.record()
        assert record is not None
        return record

    def phases(self, launch_id: str) -> list[str]:
        events, _ = self.state.launch(launch_id).events()
        return [each["phase"] for each in events if each["event"] == "phase"]

    def notes(self) -> list[str]:
        events = [each for name in self.state.launches() for each in self.state.launch(name).events()[0]]
        return [each["text"] for each in events if each["event"] == "watch"]


@pytest.fixture
def fleets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fleet]:
    """Makes one. Its only node is this machine, and is there while the file `there` is."""
    made: list[Fleet] = []

    class Scripted(supervisor._Launching):
        async def run(self) -> None:
            fleet, step = made[0], made[0].steps.pop(0)
            self._diary.enter("loading")
            try:
                with fleet.state.acting("somebody"):
                    fleet.is_locked.append(False)
            except Busy:
                fleet.is_locked.append(True)
            if step.serves:
                self._opened("http://127.0.0.1:1", "m", 1)
                with fleet.state.acting("somebody"):
                    pass
            if step.error is not None:
                raise step.error
            await asyncio.Event().wait()

        async def end(self) -> str | None:
            self._ended.append(Ended(0, "here", "deskfleet-desk-0", 137))  # as containers do that we stop
            return await super().end()

    def make(backoff_s: list[float], *steps: Step) -> Fleet:
        made.append(Fleet(tmp_path, backoff_s, *steps))
        return made[0]

    monkeypatch.setattr(supervisor, "_Launching", Scripted)
    monkeypatch.setattr(supervisor, "_IS_THERE", f"[ -e {tmp_path}/there ] || exit 1; echo a-boot-id")
    monkeypatch.setattr(supervisor, "_ASK_NODES_S", 0.05)
    return make


async def until(question: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not question():
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[asyncio.Future[int]]:
    """Its supervisor at work, stopped at the end; yields the task."""
    task = asyncio.ensure_future(fleet.run())
    try:
        await until(lambda: fleet.state.record() is not None)
        yield task
    finally:
        fleet.until.set()
        await asyncio.gather(task, return_exceptions=True)


def test_what_a_file_says_of_restarts(tmp_path: Path) -> None:
    """Nothing: the policy's own numbers. Only our own ranks say by their exit code that they would fail again."""
    spec = read_spec(write(tmp_path))
    assert policy_of(spec) == Policy()
    told = read_spec(write(tmp_path), ["restart.backoff_s=[5, 0.5]", "restart.steady_s=60"])
    assert policy_of(told) == Policy((5.0, 0.5), 60.0)
    native = read_spec(write(tmp_path), ["engine.name=native", "restart.backoff_s=[]"])
    assert policy_of(native) == Policy((), final_codes=frozenset({2}))
    for wrong in (
        "restart.backoff_s=[-1]",
        "restart.backoff_s=soon",
        "restart.steady_s=inf",
        "restart.every_s=1",
    ):
        with pytest.raises(ConfigError, match=f"--set {wrong.partition('=')[0]}"):
            read_spec(write(tmp_path), [wrong])


@pytest.mark.parametrize(
    ("error", "code"),
    [(DIED, 3), (GatesFailed("no"), 3), (GatesFailed("no", wrong=("json",)), 1), (ConfigError("x"), 2)],
)
async def test_what_never_served_fails_at_once(
    fleets: Callable[..., Fleet], error: DeskfleetError, code: int
) -> None:
    fleet = fleets([0.1], Step(False, error), Step(True))
    assert await fleet.run() == code
    assert (fleet.record.phase, fleet.record.exit_code, fleet.record.reason) == (
        "failed",
        code,
        error.message,
    )
    assert fleet.state.launches() == ["00000000-first"]
    assert "waiting" not in fleet.phases("00000000-first")


async def test_it_serves_again_under_another_launch(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets([0.1, 0.1], Step(True, DIED), Step(False, DIED), Step(True))
    async with running(fleet) as task:
        await until(lambda: fleet.record.restart == 2 and fleet.record.phase == "serving")
        assert not fleet.steps
        assert fleet.record.after == "rank 0 is gone"
        assert fleet.num_settled == 1
        assert fleet.is_locked == [False, True, True]  # nobody else may start it meanwhile
        first, *others = fleet.state.launches()
        assert fleet.phases(first) == ["checking", "loading", "serving", "waiting"]
        assert [fleet.phases(launch) for launch in others] == [
            ["checking", "loading", "waiting"],
            ["checking", "loading", "serving"],
        ]
        fleet.until.set()
        assert await task == 0
    assert (fleet.record.phase, fleet.record.reason, fleet.record.url) == ("stopped", None, None)


@pytest.mark.parametrize(
    ("backoff_s", "steps", "code", "said"),
    [
        ([], [Step(True, DIED)], 3, "rank 0 is gone"),
        ([0.1], [Step(True, DIED), Step(False, DIED)], 3, "that was failure 2 without 1 minutes of service"),
        ([0.1], [Step(True, LOW), Step(True, LOW)], 3, "1 MiB available; that was failure 2"),
        ([0.1, 0.1], [Step(True, DIED), Step(False, ConfigError("no such file"))], 2, "no such file"),
        (
            [0.1, 0.1],
            [Step(True, DIED), Step(False, GatesFailed("not opened", wrong=("counting",)))],
            1,
            "gate counting failed, and a restart would not change answers: not opened",
        ),
        # A gate that got no answer is an accident like others.
        ([0.1], [Step(True, DIED), Step(False, GatesFailed("not opened"))], 3, "that was failure 2"),
    ],
)
async def test_the_end_of_it(
    fleets: Callable[..., Fleet], backoff_s: list[float], steps: list[Step], code: int, said: str
) -> None:
    fleet = fleets(backoff_s, *steps)
    assert await fleet.run() == code
    assert not fleet.steps
    assert (fleet.record.phase, fleet.record.exit_code) == ("failed", code)
    assert said in (fleet.record.reason or "")


async def test_stopped_while_it_waits(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets([1000.0], Step(True, DIED), Step(True))
    async with running(fleet) as task:
        await until(lambda: fleet.record.phase == "waiting")
        assert fleet.record.reason == "rank 0 is gone; restart 1 of 1 in 1000 s"
        assert "is due in" in spell_due(fleet.record)
        with fleet.state.acting("deskfleet fleet stop"):
            fleet.until.set()
            assert await task == 0
    assert (fleet.record.phase, fleet.record.exit_code, fleet.record.restart_at) == ("stopped", 0, None)


async def test_it_waits_for_nodes_and_for_whoever_changes_the_fleet(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets([0.1], Step(True, DIED), Step(True))
    fleet.there.unlink()
    async with running(fleet):
        await until(lambda: len(fleet.notes()) == 1)
        await asyncio.sleep(0.5)
        assert fleet.record.phase == "waiting"
        assert "it waits for a node" in spell_due(fleet.record)
        with fleet.state.acting("deskfleet fleet build"):
            fleet.there.touch()
            await until(lambda: len(fleet.notes()) == 3)
            assert fleet.record.phase == "waiting"
        await until(lambda: fleet.record.phase == "serving")
    lost, back, busy = fleet.notes()
    assert (lost.startswith("here cannot be reached: "), back) == (True, "here can be reached again")
    assert busy.startswith("the restart waits: the fleet desk is being changed: deskfleet fleet build")


async def test_a_node_that_stays_away_is_the_end(
    fleets: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleets([0.1], Step(True, DIED), Step(True))
    monkeypatch.setattr(supervisor, "policy_of", lambda spec: Policy((0.1,), absent_s=0.3))
    fleet.there.unlink()
    assert await fleet.run() == 3
    assert fleet.record.reason == "rank 0 is gone; here cannot be reached for 0.3 s: nothing can start"


async def test_what_may_still_run_is_said_and_ended_with_the_fleet(
    fleets: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is cut off in the end of a launch: it is tried again when the fleet is stopped."""
    lefts = ["what may still run: desk-0 on here", None]
    fleet = fleets([1000.0], Step(True, DIED))

    async def end(self: supervisor._Launching) -> str | None:
        return lefts.pop(0)

    monkeypatch.setattr(supervisor._Launching, "end", end)
    async with running(fleet) as task:
        await until(lambda: fleet.record.phase == "waiting")
        assert "; what may still run: desk-0 on here" in (fleet.record.reason or "")
        fleet.until.set()
        assert await task == 0
    assert not lefts


async def test_a_fault_of_ours_ends_it(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets([0.1], Step(True, KeyError("oops")), Step(True))
    with pytest.raises(KeyError):
        await fleet.run()
    assert (fleet.record.phase, fleet.record.exit_code) == ("failed", 3)
    assert "the supervisor itself failed" in (fleet.record.reason or "")


def test_serve_says_what_is_wrong_with_the_gateways_settings(tmp_path: Path) -> None:
    """Its supervisor finds it before anything else; nothing is asked of a node but which containers it has."""
    (tmp_path / "fleet.toml").write_text(FILE % ("0" * 64, []) + '[gateway]\npolicies = "policies.toml"\n')
    (tmp_path / "policies.toml").write_text("[health]\nsilent_s = -1\n")
    (tmp_path / "docker").write_text("#!/bin/sh\n")
    (tmp_path / "docker").chmod(0o755)
    environ = {"XDG_STATE_HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = deskfleet("fleet", "serve", "--file", tmp_path / "fleet.toml", **environ)
    assert done.code == ConfigError.exit_code, done.err
    assert f"{tmp_path}/policies.toml:2: health.silent_s is -1" in done.err
    record = FleetState("desk", environ).record()
    assert record is not None
    assert (record.phase, record.exit_code) == ("failed", 2)
