"""The memory watchdog: traces of meminfo played to the policy, which must act exactly at the stated samples."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from bed import Bed

from deskfleet.errors import DeskfleetError
from deskfleet.fleet.memory import (
    SAMPLE_EVERY_S,
    Action,
    Floors,
    MemoryLow,
    Patience,
    Phase,
    Watchdog,
    attend_memory,
    drop_cache,
    floors_of,
    floors_of_nodes,
    parse_sample,
    watch_memory,
)
from deskfleet.fleet.probe import read_script
from deskfleet.fleet.remote import Remote, RemoteFailed, Remotes
from deskfleet.fleet.spec import NodePaths, NodeSpec
from deskfleet.planner.budget import Floor
from deskfleet.planner.cluster import H200, SPARK, Node
from deskfleet.planner.plan import UNIFIED_FLOOR

GIB = 1 << 30
SPARK_GIB = 121.7
FLOORS = Floors(
    free_bytes=8 * GIB,
    resume_bytes=6 * GIB,
    admission_bytes=5 * GIB,
    abort_bytes=3 * GIB,
    stop_bytes=1 * GIB,
)

# As a Spark has it in the middle of a load; the amounts that matter are put in.
MEMINFO = """\
MemTotal: {total} kB
MemFree: {free} kB
MemAvailable: {available} kB
Buffers:          153600 kB
Cached: {cached} kB
SwapCached:            0 kB
Active:          2621440 kB
SwapTotal:             0 kB
Shmem:            262144 kB
AnonPages: {anonymous} kB
Mapped:          1048576 kB
Slab:            1572864 kB
SReclaimable:     524288 kB
SUnreclaim:      1048576 kB
KernelStack:       32768 kB
PageTables:       131072 kB
Percpu:            16384 kB
HugePages_Total:       0"""


def line(time_s: float, available: float, free: float, *, anonymous: float = 2.0) -> str:
    """A line of scripts/meminfo.sh; sizes in GiB. What is available and not free is cached."""
    kib = 1 << 20
    text = MEMINFO.format(
        total=int(SPARK_GIB * kib),
        free=int(free * kib),
        available=int(available * kib),
        cached=int(max(available - free, 0) * kib) + 262144,
        anonymous=int(anonymous * kib),
    )
    return ";".join([f"{time_s:.2f}", *text.splitlines()])


def played(
    watchdog: Watchdog,
    trace: Sequence[tuple[float, float]],
    phase: Phase,
    *,
    node: str = "node1",
    start_s: float = 1000.0,
    anonymous: Sequence[float] = (),
) -> list[tuple[int, str]]:
    """Play (available, free) in GiB, one every 100 ms; return what was done at which sample, counted from 1."""
    done: list[tuple[int, str]] = []
    for number, (available, free) in enumerate(trace):
        own = anonymous[number] if anonymous else 2.0
        sample = parse_sample(line(start_s + number / 10, available, free, anonymous=own), node, phase)
        done += [(number + 1, action.kind) for action in watchdog.see(sample)]
    return done


def watchdog(*nodes: str, floors: Floors = FLOORS, patience: Patience | None = None) -> Watchdog:
    return Watchdog(dict.fromkeys(nodes or ("node1",), floors), patience or Patience())


def test_much_used_and_much_available_is_well() -> None:
    """112 GiB used is what serving looks like: nothing is done for it, in either phase."""
    assert played(watchdog(), [(9.0, 9.0)] * 600, "serving") == []
    # Loading with 9 GiB available and 9 free: above both floors.
    assert played(watchdog(), [(9.0, 9.0)] * 600, "loading") == []
    # Nor does MemFree count while serving: caches give way.
    assert played(watchdog(), [(9.0, 0.3)] * 600, "serving") == []


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        ([5.1, 5.1, 4.9, 5.1, 5.1, 5.1], []),
        ([5.1, 4.9, 5.1, 4.9, 5.1, 5.1], []),
        ([5.1, 4.9, 4.9, 4.9, 4.9, 4.9], [(4, "stop_admission")]),
        # Three of the last five, not three in a row.
        ([5.1, 4.9, 5.1, 4.9, 5.1, 4.9], [(6, "stop_admission")]),
        ([4.9, 4.9, 5.1, 5.1, 5.1, 4.9, 5.1, 4.9], []),
        # One sample that says nothing is left.
        ([9.0, 9.0, 0.1, 9.0, 9.0, 9.0, 9.0], []),
    ],
)
def test_a_noisy_sample_does_nothing(trace: list[float], expected: list[tuple[int, str]]) -> None:
    assert played(watchdog(), [(each, 1.0) for each in trace], "serving") == expected


def test_the_published_fall_while_loading() -> None:
    """MemFree below its floor: caches are dropped at once, then no more often than every five seconds."""
    fall = [(34.0, 9.0), (20.1, 7.0), (12.7, 3.0), (6.0, 1.0), (4.8, 1.0), (4.7, 1.0)]
    assert played(watchdog(), fall, "loading") == [(2, "drop_cache")]
    assert played(watchdog(), [(34.0, 9.0)] * 10 + [(20.0, 7.0)] * 105, "loading") == [
        (11, "drop_cache"),
        (61, "drop_cache"),
        (111, "drop_cache"),
    ]


def test_the_same_fall_while_serving() -> None:
    """Each value for half a second. First nobody is let in, then a prefill goes and another, then the ranks."""
    values = [34.0, 20.1, 12.7, 6.0, 4.8, 2.9, 2.9, 2.9, 2.9, 2.9, 0.9, 0.5]
    trace = [(value, 1.0) for value in values for _ in range(5)]
    assert played(watchdog(), trace, "serving") == [
        (23, "stop_admission"),
        (28, "abort_largest_prefill"),
        (48, "abort_largest_prefill"),
        (53, "stop_ranks"),
    ]
    # All at once: there is no time for a prefill to end.
    assert played(watchdog(), [(9.0, 1.0)] * 5 + [(0.9, 0.9)] * 9, "serving") == [
        (8, "stop_admission"),
        (8, "stop_ranks"),
    ]
    assert played(watchdog(), [(9.0, 9.0)] * 5 + [(0.9, 9.0)] * 9, "loading") == [(8, "stop_ranks")]


def test_admission_opens_again_above_another_floor() -> None:
    """Between both floors it stays closed; above for five samples, and two seconds after it was closed, it opens."""
    trace = [4.9] * 3 + [5.5] * 100 + [6.1] * 4 + [5.9] + [6.1] * 5
    assert played(watchdog(), [(each, 1.0) for each in trace], "serving") == [
        (3, "stop_admission"),
        (113, "resume_admission"),
    ]
    quick = [4.9] * 3 + [7.0] * 30
    assert played(watchdog(), [(each, 1.0) for each in quick], "serving") == [
        (3, "stop_admission"),
        (23, "resume_admission"),
    ]


def test_admission_is_one_for_all_nodes() -> None:
    both = watchdog("node1", "node2")
    low, well = [(4.9, 1.0)] * 3, [(7.0, 1.0)] * 30
    assert played(both, low, "serving", node="node1") == [(3, "stop_admission")]
    assert played(both, low, "serving", node="node2") == []
    assert set(both.low_nodes) == {"node1", "node2"}
    assert played(both, well, "serving", node="node1", start_s=1001.0) == []
    # A node whose connection was lost while it was low is low until it says otherwise, after a reboot too.
    both.forget("node2")
    assert list(both.low_nodes) == ["node2"]
    assert played(both, well, "serving", node="node2", start_s=5.0) == [(5, "resume_admission")]


def test_it_names_who_took_the_memory() -> None:
    """What meminfo has no name for is the driver's; caches are nobody's fault."""
    trace = [(30.0, 1.0)] * 20 + [(4.5, 1.0)] * 3
    told: list[Action] = []
    for anonymous in (2.0, 22.0):
        guard = watchdog()
        for number, (available, free) in enumerate(trace):
            own = anonymous if number >= 20 else 2.0
            told += guard.see(
                parse_sample(line(number / 10, available, free, anonymous=own), "node1", "serving")
            )
    assert [action.kind for action in told] == ["stop_admission"] * 2
    assert told[0].reason == (
        "node1: 4.50 GiB available, 3 of 5 samples below 5.00 GiB; most was taken by the accelerator's driver: "
        "25.50 GiB in 2.2 s, now 113.13 GiB"
    )
    assert "most was taken by processes: 20.00 GiB in 2.2 s, now 22.00 GiB" in told[1].reason


def test_floors_of_a_plan() -> None:
    """A plan that rests exactly on its floor lets requests in."""
    floors = floors_of(UNIFIED_FLOOR, SPARK.total_bytes)
    assert floors_of_nodes([Node("a", SPARK, SPARK.available_bytes)]) == {"a": floors}
    assert floors_of_nodes([Node("a", H200, H200.available_bytes)])["a"].free_bytes == 0
    assert floors.resume_bytes == UNIFIED_FLOOR.rest_bytes
    assert floors.free_bytes == 8 * GIB
    assert floors.stop_bytes == GIB < floors.abort_bytes < floors.admission_bytes < floors.resume_bytes
    at_rest = UNIFIED_FLOOR.rest_bytes / GIB
    assert played(watchdog(floors=floors), [(at_rest, 1.0)] * 50, "serving") == []
    small = floors_of(Floor(100 << 20, 50 << 20, "a small machine"), 2 * GIB)
    assert small.free_bytes == 2 * GIB // 15


def test_what_is_no_sample() -> None:
    for text in ("", "12.3", "12.3;MemTotal: 5 kB", "no number;" + line(1, 9, 9).partition(";")[2]):
        with pytest.raises(RemoteFailed, match="node1: its memory cannot be read"):
            parse_sample(text, "node1", "serving")


async def watched(
    remote: Remote,
    guard: Watchdog,
    phase: Phase,
    wanted: int,
    *,
    actions: list[Action],
    errors: list[DeskfleetError],
    timeout_s: float = 20.0,
    every_s: float = SAMPLE_EVERY_S,
) -> None:
    """Watch until `wanted` things happened."""
    happened = asyncio.Semaphore(0)

    async def act(action: Action) -> None:
        actions.append(action)
        happened.release()

    async def lost(_: str, error: DeskfleetError) -> None:
        errors.append(error)
        happened.release()

    task = asyncio.create_task(watch_memory(remote, guard, lambda: phase, act, lost, every_s=every_s))
    try:
        async with asyncio.timeout(timeout_s):
            for _ in range(wanted):
                await happened.acquire()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def node_spec(name: str, address: str, base: str = "/srv") -> NodeSpec:
    paths = NodePaths(f"{base}/checkpoint", f"{base}/engram", f"{base}/cache")
    return NodeSpec(name, address, None, None, None, (address,), "local", None, paths)


def here(tmp_path: Path) -> NodeSpec:
    return node_spec("here", "local", str(tmp_path))


def test_this_machine_is_watched(tmp_path: Path) -> None:
    """Real meminfo through the real script, and floors above all memory; afterwards no script is left."""
    total = psutil.virtual_memory().total
    far = Floors(2 * total, 2 * total, 2 * total, 2 * total, 2 * total)
    actions: list[Action] = []
    errors: list[DeskfleetError] = []
    remote = Remote(here(tmp_path))
    asyncio.run(
        watched(
            remote,
            Watchdog({"here": far}),
            "serving",
            2,
            actions=actions,
            errors=errors,
            every_s=0.0987,  # others may watch this machine too
        )
    )
    assert [action.kind for action in actions] == ["stop_admission", "stop_ranks"]
    assert not errors
    mark = read_script("meminfo.sh")[:40]
    running = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    assert not [words for words in running if words[-1:] == ["0.0987"] and mark in " ".join(words)]


def test_all_that_is_done_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, caches are dropped and that is told; serving, the gateway is told; at the last floor it ends."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("id", "echo 1000"), ("sudo", "exit 1")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    total = psutil.virtual_memory().total
    told: list[tuple[str, str]] = []
    phases: list[Phase] = ["loading"]
    admitted: list[str] = []

    def tell(event: str, **values: str) -> None:
        told.append((event, values.get("action", "")))
        if values.get("action") == "dropped":
            phases[0] = "serving"

    async def admit(action: Action) -> None:
        admitted.append(action.kind)

    async def run(floors: Floors) -> MemoryLow:
        async with asyncio.timeout(20), Remotes([here(tmp_path)]) as remotes:
            return await attend_memory(remotes, {"here": floors}, lambda: phases[0], admit, tell)

    # In the first phase MemFree is too low; everything else is, in the second.
    floors = Floors(2 * total, 2 * total, 2 * total, 2 * total, 1)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(run(floors), 5.0))
    assert told[:2] == [("memory", "drop_cache"), ("memory", "dropped")]
    assert admitted[:2] == ["stop_admission", "abort_largest_prefill"]
    low = asyncio.run(run(replace(floors, stop_bytes=2 * total)))
    assert "ranks are stopped for want of memory: here: " in low.message
    assert told[-1] == ("memory", "stop_ranks")


def test_the_script_is_on_time_and_cheap(tmp_path: Path) -> None:
    """Samples come every 100 ms, with the numbers that the kernel tells, for a fraction of a processor."""

    async def read() -> tuple[list[str], float]:
        lines: list[str] = []
        script = read_script("meminfo.sh")
        stream = Remote(here(tmp_path)).stream(script, "0.1")
        try:
            async for each in stream:
                lines.append(each)
                if len(lines) == 20:
                    break
            busy_s = max(
                sum(process.cpu_times()[:2])
                for process in psutil.Process().children(recursive=True)
                if script[:40] in " ".join(process.cmdline())
            )
        finally:
            await stream.aclose()
        return lines, busy_s

    lines, busy_s = asyncio.run(read())
    samples = [parse_sample(each, "here", "serving") for each in lines]
    assert 1.8 <= samples[-1].time_s - samples[0].time_s < 6.0
    assert abs(samples[-1].available_bytes - psutil.virtual_memory().available) < 4 * GIB
    assert busy_s < 0.4  # of two seconds; mostly it is some hundredths


@pytest.mark.skipif(shutil.which("fincore") is None, reason="fincore shows what is cached")
def test_caches_of_the_checkpoint_are_dropped_without_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is neither root nor in sudoers gives back what was cached of the shards, and of nothing else."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("id", "echo 1000"), ("sudo", "exit 1")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    node = here(tmp_path)
    checkpoint = Path(node.paths.checkpoint)
    checkpoint.mkdir(parents=True, exist_ok=True)
    shard, other = checkpoint / "model-00001-of-00002.safetensors", checkpoint / "other.bin"
    for path in (shard, other):
        path.write_bytes(bytes(4 << 20))
        subprocess.run(["sync", str(path)], check=True)

    def cached(path: Path) -> int:
        return int(subprocess.check_output(["fincore", "-nbo", "RES", str(path)], text=True))

    if cached(shard) < 4 << 20:
        pytest.skip("this file system does not cache what is written")
    assert asyncio.run(drop_cache(Remote(node))) == "the checkpoint's 1 shards"
    assert cached(shard) == 0
    assert cached(other) == 4 << 20


@pytest.mark.fleet
def test_a_node_of_the_bed_runs_low_and_recovers(pair: Bed) -> None:
    """Memory that the node's own meminfo shows, over ssh; then its sshd ends, and that is told."""
    node = pair.nodes[1]
    actions: list[Action] = []
    errors: list[DeskfleetError] = []
    config = pair.head.hub.directory / "ssh_config"
    config.write_text(pair.ssh_config())

    async def run() -> None:
        spec = node_spec(node.name, node.name)
        async with Remotes([spec]) as remotes:
            guard = Watchdog({node.name: FLOORS}, Patience(closed_s=0.2))

            async def low() -> None:
                await asyncio.to_thread(node.show_memory, 9 * GIB)
                await asyncio.sleep(2.0)
                await asyncio.to_thread(node.show_memory, 4 * GIB)
                await asyncio.sleep(2.0)
                await asyncio.to_thread(node.show_memory, 9 * GIB)
                await asyncio.sleep(2.0)
                await asyncio.to_thread(node.stop_sshd)

            player = asyncio.create_task(low())
            await watched(
                remotes[node.name],
                guard,
                "serving",
                3,
                actions=actions,
                errors=errors,
                timeout_s=60.0,
            )
            await player

    try:
        with pair.desk.network(), pytest.MonkeyPatch.context() as patch:
            wrapper = pair.head.hub.directory / "bin"
            wrapper.mkdir(exist_ok=True)
            (wrapper / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F "{config}" "$@"\n')
            (wrapper / "ssh").chmod(0o755)
            patch.setenv("PATH", f"{wrapper}:/usr/bin:/bin")
            asyncio.run(run())
    finally:
        node.start_sshd()
        node.show_true_memory()
    assert [action.kind for action in actions] == ["stop_admission", "resume_admission"]
    assert len(errors) == 1
    assert node.name in errors[0].message
