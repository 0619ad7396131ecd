"""What is restarted and what is given up, as a table; and the view of a fleet's events, as users have it."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deskfleet.fleet.state import FleetState, Phase, Record, now
from deskfleet.fleet.watch import (
    Event,
    GateFailed,
    HeartbeatLost,
    MemoryStop,
    NodeBack,
    NodeLost,
    Policy,
    RankEnded,
    Serving,
    StartFailed,
    StopAsked,
    Supervised,
    Tick,
    Watcher,
    decide,
)

POLICY = Policy(final_codes=frozenset({1, 2}))
BOOTS = {"head": "boot-a", "worker": "boot-b"}
DIED = RankEnded(1, "worker", 137)
HEAD_DIED = RankEnded(0, "head", 3)
LOST = NodeLost("worker", "it does not answer")
BACK, REBOOTED = NodeBack("worker", "boot-b"), NodeBack("worker", "boot-c")
HEAD_REBOOTED = NodeBack("head", "boot-d")
MINUTE = 60.0

CASES: dict[str, list[tuple[float, Event, str, str]]] = {
    "a rank dies: all stop, and start when ten seconds are over": [
        (0, Serving(), "nothing", ""),
        (100, DIED, "stop_all", "rank 1 on worker ended with 137; restart 1 of 3 in 10 s"),
        (109.9, Tick(), "nothing", ""),
        (110, Tick(), "start_all", "restart 1 of 3"),
        (111, Tick(), "nothing", ""),
    ],
    "its peers die of it: that is one failure": [
        (100, DIED, "stop_all", "restart 1 of 3"),
        (100.1, HEAD_DIED, "nothing", ""),
        (100.2, HeartbeatLost(0, "head"), "nothing", ""),
        (110, Tick(), "start_all", ""),
    ],
    "the head's rank dies: workers are stopped too, for they wait for a meeting that is over": [
        (0, Serving(), "nothing", ""),
        (100, HEAD_DIED, "stop_all", "rank 0 on head ended with 3; restart 1 of 3 in 10 s"),
        (110, Tick(), "start_all", ""),
    ],
    "three restarts, each longer in coming, then the end": [
        (0, DIED, "stop_all", "restart 1 of 3 in 10 s"),
        (10, Tick(), "start_all", ""),
        (20, HeartbeatLost(1, "worker"), "stop_all", "does not answer any more; restart 2 of 3 in 30 s"),
        (49, Tick(), "nothing", ""),
        (50, Tick(), "start_all", ""),
        (60, StartFailed("no such image"), "stop_all", "no such image; restart 3 of 3 in 90 s"),
        (150, Tick(), "start_all", ""),
        (160, DIED, "give_up", "that was failure 4 without 30 minutes of service between them"),
        (300, Tick(), "nothing", ""),
        (301, DIED, "nothing", ""),
    ],
    "loading for a quarter of an hour does not make it forget": [
        (0, DIED, "stop_all", "1 of 3"),
        (10, Tick(), "start_all", ""),
        (15 * MINUTE, Serving(), "nothing", ""),
        (20 * MINUTE, DIED, "stop_all", "2 of 3"),
        (21 * MINUTE, Tick(), "start_all", ""),
        (36 * MINUTE, Serving(), "nothing", ""),
        (40 * MINUTE, DIED, "stop_all", "3 of 3"),
        (42 * MINUTE, Tick(), "start_all", ""),
        (57 * MINUTE, Serving(), "nothing", ""),
        (60 * MINUTE, DIED, "give_up", "failure 4"),
    ],
    "half an hour of service does": [
        (0, DIED, "stop_all", "1 of 3"),
        (10, Tick(), "start_all", ""),
        (60, Serving(), "nothing", ""),
        (60 + 30 * MINUTE, DIED, "stop_all", "restart 1 of 3 in 10 s"),
    ],
    "a wrong answer is no accident": [
        (0, GateFailed("arithmetic", "4 for 2 + 3"), "give_up", "a restart would not change answers"),
        (10, Tick(), "nothing", ""),
    ],
    "a rank that refuses what it was told would again": [
        (0, RankEnded(1, "worker", 2), "give_up", "rank 1 on worker ended with 2: it would again"),
    ],
    "a plan that does not fit would not tomorrow": [
        (0, StartFailed("fleet.toml: no such node", is_final=True), "give_up", "no such node"),
    ],
    "the watchdog stops the ranks: that is a failure like others": [
        (0, MemoryStop("worker", "worker: 0.90 GiB available"), "stop_all", "0.90 GiB available; restart 1"),
        (10, Tick(), "start_all", ""),
    ],
    "out of memory is said": [
        (0, RankEnded(0, "head", 137, is_out_of_memory=True), "stop_all", "ended with 137, out of memory"),
    ],
    "ssh is gone, ranks are not: served on": [
        (0, Serving(), "nothing", ""),
        (10, LOST, "note", "worker cannot be reached: it does not answer; its ranks may live on"),
        (11, LOST, "nothing", ""),
        (500, Tick(), "nothing", ""),
        (600, BACK, "note", "worker can be reached again"),
    ],
    "a cable is pulled: nothing starts before the node is there": [
        (0, Serving(), "nothing", ""),
        (10, HeartbeatLost(1, "worker"), "stop_all", "restart 1 of 3"),
        (11, LOST, "note", "worker cannot be reached: it does not answer"),
        (30, Tick(), "nothing", ""),
        (300, BACK, "note", "can be reached again"),
        (301, Tick(), "start_all", ""),
    ],
    "a node is rebooted, and that is seen first by its boot id": [
        (0, Serving(), "nothing", ""),
        (10, REBOOTED, "stop_all", "worker has been rebooted; restart 1 of 3 in 10 s"),
        (11, DIED, "nothing", ""),
        (20, Tick(), "start_all", ""),
        (30, REBOOTED, "nothing", ""),
    ],
    "a node is rebooted, and its rank's silence was first": [
        (0, Serving(), "nothing", ""),
        (10, HeartbeatLost(1, "worker"), "stop_all", "restart 1 of 3"),
        (11, LOST, "note", ""),
        (200, REBOOTED, "note", "worker has been rebooted"),
        (201, Tick(), "start_all", ""),
    ],
    "the head is rebooted, and the supervisor lives elsewhere": [
        (0, HEAD_REBOOTED, "stop_all", "head has been rebooted"),
        (10, Tick(), "start_all", ""),
    ],
    "a node does not come back": [
        (0, LOST, "note", ""),
        (29 * MINUTE, DIED, "stop_all", ""),
        # It was not needed while its ranks served: the half hour begins when they are due.
        (31 * MINUTE, Tick(), "nothing", ""),
        (60 * MINUTE, Tick(), "give_up", "worker cannot be reached for 30 minutes: nothing can start"),
    ],
    "asked to stop, it stops for good": [
        (0, DIED, "stop_all", "restart 1 of 3"),
        (5, StopAsked(), "stop_all", "it was asked to stop"),
        (10, Tick(), "nothing", ""),
        (11, DIED, "nothing", ""),
    ],
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_table(case: list[tuple[float, Event, str, str]]) -> None:
    state = Supervised(boot_ids=BOOTS)
    for time_s, event, kind, reason in case:
        state, decision = decide(state, event, time_s, POLICY)
        assert (time_s, decision.kind) == (time_s, kind), decision.reason
        assert reason in decision.reason
        assert (decision.reason == "") == (kind == "nothing")


# --- the view -------------------------------------------------------------------------------------


FLEET = """\
name = "desk"
[[nodes]]
name = "here"
kind = "local"
address = "local"
paths = { checkpoint = "/srv/checkpoint", engram = "/srv/engram", cache = "/srv/cache" }
[checkpoint]
model = "pocket"
[engine]
name = "native"
"""


@pytest.fixture
def state(tmp_path: Path) -> FleetState:
    (tmp_path / "fleet.toml").write_text(FLEET)
    return FleetState("desk", {"XDG_STATE_HOME": str(tmp_path / "state")})


def record(state: FleetState, launch_id: str, phase: Phase, **more: Any) -> None:
    """Let the supervisor have written this."""
    state.launch(launch_id).make()
    state.write_record(
        Record(
            launch_id=launch_id,
            pid=os.getpid(),
            phase=phase,
            started_at=now(),
            changed_at=now(),
            fleet_file="fleet.toml",
            digest="",
            **more,
        )
    )


def command(state: FleetState, *words: str) -> tuple[list[str], dict[str, str], Path]:
    """The verb's argv, environment and working directory."""
    base = state.directory.parents[2]
    argv = [str(Path(sys.executable).with_name("deskfleet")), "fleet", "watch", *words]
    return argv, {**os.environ, "XDG_STATE_HOME": str(base / "state"), "TERM": "xterm"}, base


def lines_of(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def test_a_look_tells_only_what_is_new(state: FleetState) -> None:
    watcher = Watcher(state)
    assert watcher.look().record is None
    record(state, "1", "starting")
    state.launch("1").append("rank-started", rank=1)
    with state.supervising():
        news = watcher.look()
        assert news.is_changed
        assert (news.supervisor, [each["event"] for each in news.events]) == (os.getpid(), ["rank-started"])
        assert (watcher.look().is_changed, watcher.look().events) == (False, ())
        # Half a line is not there yet.
        with state.launch("1").events_path.open("a") as file:
            file.write('{"at": "", "event": "ha')
            file.flush()
            assert watcher.look().events == ()
            file.write('lf"}\n')
        assert [each["event"] for each in watcher.look().events] == ["half"]
        state.launch("1").append("last-of-1")
        record(state, "2", "starting")
        state.launch("2").append("first-of-2")
        told = [(each["launch_id"], each["event"]) for each in watcher.look().events]
        assert told == [("1", "last-of-1"), ("2", "first-of-2")]
    gone = watcher.look()
    assert (gone.is_changed, gone.supervisor) == (True, None)


def test_lines_of_json_until_ctrl_c(state: FleetState) -> None:
    record(state, "1", "loading")
    state.launch("1").append("progress", share=0.25)
    argv, env, base = command(state, "--json")
    process = subprocess.Popen(argv, env=env, cwd=base, stdout=subprocess.PIPE, text=True)
    try:
        lines = lines_of(process)
        first, second = next(lines), next(lines)
        assert (first["event"], first["share"], first["launch_id"]) == ("progress", 0.25, "1")
        assert (second["event"], second["phase"], second["supervisor"]) == ("watch", "loading", None)
        record(state, "1", "serving", url="http://127.0.0.1:8000")
        assert next(lines)["url"] == "http://127.0.0.1:8000"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


def test_on_a_terminal(state: FleetState) -> None:
    """The screen names the phase and what a dead supervisor means; Ctrl-C leaves. A log steers no terminal."""
    record(state, "1", "serving", url="http://127.0.0.1:8000")
    state.launch("1").append("note", text="evil \x1b[31m line\nsecond")
    argv, env, base = command(state)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(argv, env=env, cwd=base, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        deadline = time.monotonic() + 20
        while b"second" not in seen and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    text = seen.decode()
    assert "its supervisor is gone; it was serving. See deskfleet fleet status" in text
    assert "evil [31m line second" in text


def test_nothing_was_launched(state: FleetState) -> None:
    argv, env, base = command(state)
    ran = subprocess.run(argv, env=env, cwd=base, capture_output=True, text=True, check=False, timeout=30)
    assert ran.returncode == 2
    assert "nothing is known of fleet desk on this machine" in ran.stderr
