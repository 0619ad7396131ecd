"""What is remembered of a fleet, who may act on it (real processes hold locks and die), how a start is read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from launch_cases import CASES

from deskfleet.fleet.launch import LaunchSpec, Milestone, Receipt
from deskfleet.fleet.readiness import LoadReadiness, LogReadiness
from deskfleet.fleet.remote import Remotes
from deskfleet.fleet.spec import read_spec
from deskfleet.fleet.state import KEPT_LAUNCHES, Busy, FleetState, Record
from deskfleet.fleet.status import see_status
from deskfleet.fleet.up import new_launch_id

FILE = """
name = "desk"
checkpoint = { model = "pocket" }
engine = { name = "native", image = "x@sha256:%s" }
[[nodes]]
name = "here"
address = "local"
kind = "local"
paths = { checkpoint = "/c", engram = "/e", cache = "/k" }
""" % ("0" * 64)

_HOLD = """
import os, sys, time
from deskfleet.fleet.state import FleetState
with getattr(FleetState("desk", os.environ), sys.argv[1])(*sys.argv[2:]):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(home: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has one of the fleet's locks."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, *words],
        env={**os.environ, "XDG_STATE_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_one_acts_at_a_time_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    state = FleetState("desk", {"XDG_STATE_HOME": str(tmp_path)})
    with holder(tmp_path, "acting", "deskfleet fleet serve") as other:
        with pytest.raises(Busy) as busy, state.acting("deskfleet fleet stop"):
            pass
        assert f"being changed: deskfleet fleet serve, process {other.pid}, since 20" in busy.value.message
        assert busy.value.exit_code == 3
        assert (state.actor() or "").startswith(f"deskfleet fleet serve, process {other.pid}, since 20")
        other.send_signal(signal.SIGKILL)
        other.wait()
        with state.acting("deskfleet fleet stop") as lock:
            # Whoever inherits the lock keeps it when we are gone.
            child = subprocess.Popen(["sleep", "600"], pass_fds=(lock,))
    try:
        with pytest.raises(Busy, match="deskfleet fleet stop"), state.acting("deskfleet fleet serve"):
            pass
    finally:
        child.kill()
        child.wait()
    with state.acting("deskfleet fleet serve"):
        assert state.actor() is None, "who asks knows of itself"
        assert (tmp_path / "deskfleet/desk").stat().st_mode & 0o077 == 0


async def test_a_launch_whose_supervisor_says_nothing_yet_is_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python takes seconds to import, and the record is still that of the launch before."""
    (tmp_path / "docker").write_text("#!/bin/sh\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "fleet.toml").write_text(FILE)
    spec = read_spec(tmp_path / "fleet.toml")
    state = FleetState("desk", {"XDG_STATE_HOME": str(tmp_path)})

    async def seen() -> tuple[str, int, tuple[str, ...]]:
        async with Remotes(spec.nodes) as remotes:
            found = await see_status(spec, state, remotes)
        return found.verdict, found.exit_code, found.reasons

    (tmp_path / "deskfleet/desk").mkdir(parents=True)
    state.write_record(
        Record(
            launch_id="1", pid=1, phase="failed", started_at="", changed_at="", fleet_file="", digest="",
            reason="rank 0 is gone",
        )
    )  # fmt: skip
    failed = "the last launch failed: rank 0 is gone"
    assert await seen() == ("down", 1, (failed,))
    for actor, verdict, num_reasons in (
        ("launch 20261130-232413-123456", "starting", 1),
        ("deskfleet fleet serve", "starting", 1),
        ("deskfleet fleet stop", "down", 2),
    ):
        with holder(tmp_path, "acting", actor):
            is_now, code, reasons = await seen()
        assert (is_now, code, len(reasons)) == (verdict, 1, num_reasons)
        assert reasons[0].startswith(f"being changed: {actor}, process ")
    with state.acting("deskfleet fleet serve"):
        assert await seen() == ("down", 1, (failed,))


def test_ids_of_launches_sort_by_time(tmp_path: Path) -> None:
    ids = [new_launch_id() for _ in range(100)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)


def test_the_supervisor_is_who_lives_not_who_is_written_down(tmp_path: Path) -> None:
    state = FleetState("desk", {"XDG_STATE_HOME": str(tmp_path)})
    assert state.supervisor() is None
    with holder(tmp_path, "supervising") as other:
        assert state.supervisor() == other.pid
        with pytest.raises(Busy, match="has a supervisor already"), state.supervising():
            pass
        assert state.supervisor() == other.pid
    assert state.supervisor() is None
    assert FleetState("other", {"XDG_STATE_HOME": "relative"}).directory.is_absolute()


def test_events_are_read_from_where_one_was_and_old_launches_are_forgotten(tmp_path: Path) -> None:
    state = FleetState("desk", {"XDG_STATE_HOME": str(tmp_path)})
    for number in range(KEPT_LAUNCHES + 2):
        state.launch(f"2026-{number}").make()
    state.forget_old_launches()
    assert state.launches() == [f"2026-{number}" for number in range(2, KEPT_LAUNCHES + 2)]
    launch = state.launch("2026-3")
    launch.append("phase", phase="loading", text="ü")
    first, offset = launch.events()
    assert [(event["event"], event["text"]) for event in first] == [("phase", "ü")]
    with launch.events_path.open("ab") as file:
        file.write(b'{"event": "ha')  # as a full disk would leave it
    assert launch.events(offset) == ([], offset)


def started() -> LaunchSpec:
    """Two ranks that count shards, and show how many tokens of KV they have."""
    return msgspec.structs.replace(
        CASES["2-nodes-vllm-v4"].render(),
        milestones=(
            Milestone(pattern="loading", what="weights", share=0.2),
            Milestone(pattern=r"shard (?P<done>\d+)/(?P<total>\d+)", what="weights", share=0.2),
            Milestone(pattern="captured", what="graphs", share=0.8),
            Milestone(pattern="listening", what="listening", share=1.0, ranks=(0,)),
        ),
        expected=(
            Receipt(name="KV", pattern=r"KV (?P<value>[\d,]+)", reason="too small", at_least=1000),
            Receipt(
                name="backend", pattern=r"backend (?P<value>\w+)", reason="slow", equals="b12x", ranks=(1,)
            ),
        ),
    )


def test_the_slowest_rank_and_its_receipts_decide() -> None:
    logs = LogReadiness(started(), began_s=100.0)
    assert logs.feed(0, "listening", 110.0) is not None
    assert logs.progress(110.0).share == 0.0
    progress = logs.feed(1, "shard 5/10", 140.0)
    assert progress is not None
    assert progress.share == pytest.approx(0.5)
    assert progress.eta_s == pytest.approx(40.0)
    assert logs.feed(1, "shard 1/10", 141.0) is None  # a second file of weights does not lead back
    assert [text.partition(":")[0] for text in logs.lacking()] == [
        "rank 0 on spark-0 has not shown KV",
        "rank 1 on spark-1 has not shown KV",
        "rank 1 on spark-1 has not shown backend",
    ]
    for rank, line in ((0, "KV 1,000 tokens"), (1, "KV 999 tokens"), (1, "backend triton")):
        logs.feed(rank, line, 150.0)
    assert logs.lacking() == (
        "rank 1 on spark-1 has KV 999, less than 1,000: too small",
        "rank 1 on spark-1 has backend 'triton', not 'b12x': slow",
    )
    logs.feed(1, "KV 2,000 backend b12x", 151.0)
    assert logs.lacking() == ()
    done = logs.feed(1, "captured", 160.0)  # the last that this rank shows
    assert done is not None
    assert done.share == 1.0


def test_bytes_of_all_ranks_make_the_share_of_our_own_engine() -> None:
    loads = LoadReadiness(2, began_s=0.0)
    assert loads.feed(0, 100, 100, 10.0).share == 0.5
    last = loads.feed(1, 50, 100, 30.0)
    assert (last.share, last.eta_s) == (0.75, 10.0)
