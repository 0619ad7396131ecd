"""The memory watchdog: what each node has free ten times a second, and what is done before the kernel does it.

Owns the floors, how many samples make a fact, and the order of what is done: drop caches while weights are loaded, let
nobody in, abort the largest prefill, stop the ranks. The policy is pure: samples in, actions out. Who carries them out
is the caller's. Decides on MemAvailable and MemFree alone: on unified memory weights belong to no process, so whatever
counts what is used would kill a healthy load. MemFree counts while loading because the driver allocates from it, and
fails beside many GiB of page cache.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from deskfleet.errors import DeskfleetError
from deskfleet.fleet.probe import read_script
from deskfleet.fleet.remote import NodeUnreachable, Remote, RemoteFailed, Remotes
from deskfleet.planner.budget import Floor
from deskfleet.planner.cluster import Node
from deskfleet.planner.plan import floor_of
from deskfleet.units import format_bytes

Phase = Literal["loading", "serving"]
"""Whether weights are still being read, or the endpoint is open."""

Kind = Literal["drop_cache", "stop_admission", "resume_admission", "abort_largest_prefill", "stop_ranks"]

_DONE: Mapping[Kind, str] = {
    "drop_cache": "what is cached is dropped",
    "stop_admission": "nobody is let in",
    "resume_admission": "everybody is let in again",
    "abort_largest_prefill": "the request with the longest prompt is ended",
    "stop_ranks": "the ranks are stopped",
}

SAMPLE_EVERY_S = 0.1
LOADING_FREE_BYTES = 8 << 30
"""MemFree below which caches are dropped while loading: with 8 GiB two nodes lived, at 2.6 one still did (R-18)."""

_SILENT_S = 5.0
_AGAIN_S = 5.0
_DROP_S = 60.0
_CACHE = "page cache"


@dataclass(frozen=True, slots=True)
class Floors:
    """Bytes of one node. Below `admission_bytes` nobody is let in, until `resume_bytes` are back; below `abort_bytes`
    the largest prefill is aborted, below `stop_bytes` ranks are stopped. `free_bytes` is for MemFree while loading.
    """

    free_bytes: int
    resume_bytes: int
    admission_bytes: int
    abort_bytes: int
    stop_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.stop_bytes <= self.abort_bytes <= self.admission_bytes <= self.resume_bytes:
            raise ValueError(f"floors are not in order: {self}")


def floors_of(planned: Floor, total_bytes: int) -> Floors:
    """Return the floors of a node of `total_bytes` from those that its plan keeps.

    A plan that fits may rest on its floor: at the floor everybody is let in again, and an eighth of the way down to the
    floor of the worst moment nobody is. Half way a prefill goes, and at that floor the ranks.
    """
    between = planned.rest_bytes - planned.peak_bytes
    return Floors(
        # Of a small machine never more than a fifteenth, which is what 8 GiB are of a Spark.
        free_bytes=min(LOADING_FREE_BYTES, total_bytes // 15),
        resume_bytes=planned.rest_bytes,
        admission_bytes=planned.rest_bytes - between // 8,
        abort_bytes=planned.peak_bytes + between // 2,
        stop_bytes=planned.peak_bytes,
    )


def floors_of_nodes(nodes: Iterable[Node]) -> dict[str, Floors]:
    """Return the floors of a plan's nodes, `plan.cluster.nodes`, by name.

    A driver with memory of its own does not need the host's, where what is cached makes loading faster.
    """
    found = {}
    for node in nodes:
        floors = floors_of(floor_of(node), node.total_bytes)
        found[node.name] = floors if node.kind.is_unified else replace(floors, free_bytes=0)
    return found


@dataclass(frozen=True, slots=True)
class Patience:
    """How sure to be. A floor counts as passed when `needed` of the last `window` samples lie below it.

    Caches are dropped at the first sample, which costs nothing, and not again for `drop_every_s`; another prefill is
    aborted `abort_every_s` after one. Admission stays closed for `closed_s` at least.
    """

    window: int = 5
    needed: int = 3
    drop_every_s: float = 5.0
    abort_every_s: float = 2.0
    closed_s: float = 2.0


_PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class Sample:
    """One node at one moment. `time_s` is since its boot. `used` is who has the rest, by a name for people."""

    node: str
    time_s: float
    available_bytes: int
    free_bytes: int
    phase: Phase
    used: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Action:
    """Something to do. `reason` is a sentence with the numbers, and who took the memory."""

    kind: Kind
    node: str
    time_s: float
    reason: str


_GROUPS: Mapping[str, tuple[str, ...]] = {
    "processes": ("AnonPages",),
    "shared memory": ("Shmem",),
    "the kernel": ("Slab", "KernelStack", "PageTables", "SecPageTables", "Percpu"),
}
_DRIVER = "the accelerator's driver"


def parse_sample(line: str, node: str, phase: Phase) -> Sample:
    """Read a line of scripts/meminfo.sh. Raises RemoteFailed for anything else.

    What meminfo has no name for is the driver's: on unified memory that is where weights and caches are.
    """
    time, *lines = line.split(";")
    try:
        sizes = {
            name: int(words[0]) * 1024
            for name, _, rest in (each.partition(":") for each in lines)
            if (words := rest.split())
        }
        groups = {name: sum(sizes.get(each, 0) for each in parts) for name, parts in _GROUPS.items()}
        groups[_CACHE] = sizes["Cached"] + sizes.get("Buffers", 0) - sizes["Shmem"]
        groups[_DRIVER] = max(sizes["MemTotal"] - sizes["MemFree"] - sum(groups.values()), 0)
        return Sample(node, float(time), sizes["MemAvailable"], sizes["MemFree"], phase, groups)
    except (ValueError, KeyError) as error:
        raise RemoteFailed(node, "its memory cannot be read", line[:80] or "an empty line") from error


class MemoryLow(DeskfleetError):
    """A node has so little memory left that its ranks must end before the kernel chooses what does."""

    def __init__(self, action: Action) -> None:
        super().__init__(
            f"ranks are stopped for want of memory: {action.reason}",
            hint="plan with a larger margin: deskfleet fleet plan --explain",
        )
        self.node = action.node


class Watchdog:
    """The policy for all nodes of a fleet: `for action in watchdog.see(sample): ...`."""

    def __init__(self, floors: Mapping[str, Floors], patience: Patience = _PATIENCE) -> None:
        self._nodes = {name: _Node(each, patience) for name, each in floors.items()}
        self._is_stopped = False

    @property
    def low_nodes(self) -> tuple[str, ...]:
        """The nodes because of which nobody is let in."""
        return tuple(name for name, node in self._nodes.items() if node.closed_s is not None)

    def see(self, sample: Sample) -> tuple[Action, ...]:
        """Return what is to be done now, in this order. After `stop_ranks` nothing more is.

        Admission is one for the fleet: closed by the first node that is low, opened when the last is not. Raises
        KeyError for a node without floors.
        """
        if self._is_stopped:
            return ()
        before = bool(self.low_nodes)
        found = tuple(self._nodes[sample.node].see(sample))
        after = bool(self.low_nodes)
        self._is_stopped = any(kind == "stop_ranks" for kind, _ in found)
        return tuple(
            Action(kind, sample.node, sample.time_s, f"{sample.node}: {reason}")
            for kind, reason in found
            if not (kind == "stop_admission" and before) and not (kind == "resume_admission" and after)
        )

    def forget(self, node: str) -> None:
        """Begin anew with a node whose samples were interrupted. What was closed because of it stays closed."""
        self._nodes[node].forget()


class _Node:
    """One node's last samples, and what was done because of them."""

    def __init__(self, floors: Floors, patience: Patience) -> None:
        self.floors = floors
        self.patience = patience
        self.closed_s: float | None = None
        self.recent: deque[Sample] = deque(maxlen=patience.window)
        self.minute: deque[Sample] = deque(maxlen=60)
        self.dropped_s: float | None = None
        self.aborted_s: float | None = None

    def forget(self) -> None:
        self.recent.clear()
        self.minute.clear()
        # The time since boot may begin again.
        self.dropped_s = self.aborted_s = None
        if self.closed_s is not None:
            self.closed_s = 0.0

    def see(self, sample: Sample) -> Iterator[tuple[Kind, str]]:
        self.recent.append(sample)
        if not self.minute or sample.time_s - self.minute[-1].time_s >= 1.0:
            self.minute.append(sample)
        if sample.phase == "loading":
            yield from self._loading(sample)
        else:
            yield from self._serving(sample)
        if self._is_below(self.floors.stop_bytes):
            yield "stop_ranks", self._told(self.floors.stop_bytes)

    def _loading(self, sample: Sample) -> Iterator[tuple[Kind, str]]:
        floor = self.floors.free_bytes
        if sample.free_bytes < floor and _is_over(self.dropped_s, sample, self.patience.drop_every_s):
            self.dropped_s = sample.time_s
            held = sample.used.get(_CACHE)
            cache = "" if held is None else f", beside {format_bytes(held)} of {_CACHE}"
            yield (
                "drop_cache",
                f"{format_bytes(sample.free_bytes)} free while loading, the floor is {format_bytes(floor)}{cache}",
            )

    def _serving(self, sample: Sample) -> Iterator[tuple[Kind, str]]:
        floors = self.floors
        if self.closed_s is None and self._is_below(floors.admission_bytes):
            self.closed_s = sample.time_s
            yield "stop_admission", self._told(floors.admission_bytes)
        elif self._is_back(sample):
            self.closed_s = self.aborted_s = None
            yield (
                "resume_admission",
                f"{format_bytes(sample.available_bytes)} available again, {format_bytes(floors.resume_bytes)} suffice",
            )
        if self._is_below(floors.stop_bytes):
            return
        if self._is_below(floors.abort_bytes) and _is_over(
            self.aborted_s, sample, self.patience.abort_every_s
        ):
            self.aborted_s = sample.time_s
            yield "abort_largest_prefill", self._told(floors.abort_bytes)

    def _is_below(self, floor_bytes: int) -> bool:
        # This sample too: what has recovered already needs nothing.
        if self.recent[-1].available_bytes >= floor_bytes:
            return False
        return sum(each.available_bytes < floor_bytes for each in self.recent) >= self.patience.needed

    def _is_back(self, sample: Sample) -> bool:
        return (
            self.closed_s is not None
            and sample.time_s - self.closed_s >= self.patience.closed_s
            and len(self.recent) == self.patience.window
            and all(each.available_bytes >= self.floors.resume_bytes for each in self.recent)
        )

    def _told(self, floor_bytes: int) -> str:
        sample = self.recent[-1]
        low = sum(each.available_bytes < floor_bytes for each in self.recent)
        return (
            f"{format_bytes(sample.available_bytes)} available, {low} of {len(self.recent)} samples below "
            f"{format_bytes(floor_bytes)}{self._blame()}"
        )

    def _blame(self) -> str:
        """Who has taken most since memory was most plentiful in the last minute. Caches are nobody's: they give way."""
        now = self.recent[-1]
        then = max(self.minute, key=lambda each: each.available_bytes)
        grown = {
            name: num_bytes - then.used.get(name, 0) for name, num_bytes in now.used.items() if name != _CACHE
        }
        most = max(grown, key=lambda name: grown[name], default=None)
        if most is None or grown[most] <= 0:
            return ""
        return (
            f"; most was taken by {most}: {format_bytes(grown[most])} in {max(now.time_s - then.time_s, 0.1):.1f} s, "
            f"now {format_bytes(now.used[most])}"
        )


def _is_over(since_s: float | None, sample: Sample, wait_s: float) -> bool:
    return since_s is None or sample.time_s - since_s >= wait_s


async def watch_memory(
    remote: Remote,
    watchdog: Watchdog,
    phase: Callable[[], Phase],
    act: Callable[[Action], Awaitable[None]],
    lost: Callable[[str, DeskfleetError], Awaitable[None]],
    *,
    seen: Callable[[str], None] = lambda node: None,
    every_s: float = SAMPLE_EVERY_S,
) -> None:
    """Read one node's memory until cancelled, and have done what the policy says.

    `act` is awaited before the next sample is looked at; what takes long belongs into a task. When the node cannot be
    read any more `lost` is told why, and it is tried again every five seconds, `seen` is told when it can be: a node
    without a watchdog is the caller's to judge.
    """
    node = remote.node.name
    while True:
        try:
            await _read(remote, watchdog, phase, act, seen, every_s)
        except (NodeUnreachable, RemoteFailed) as error:
            watchdog.forget(node)
            await lost(node, error)
        await asyncio.sleep(_AGAIN_S)


async def _read(
    remote: Remote,
    watchdog: Watchdog,
    phase: Callable[[], Phase],
    act: Callable[[Action], Awaitable[None]],
    seen: Callable[[str], None],
    every_s: float,
) -> None:
    node = remote.node.name
    is_first = True
    async with aclosing(remote.stream(read_script("meminfo.sh"), f"{every_s:g}")) as lines:
        while True:
            try:
                async with asyncio.timeout(_SILENT_S):
                    line = await anext(lines)
            except TimeoutError:
                said = f"no word of its memory for {_SILENT_S:g} s"
                raise NodeUnreachable(node, said, hint="is it overloaded, or its cable out?") from None
            except StopAsyncIteration:
                raise RemoteFailed(node, "its memory is not told any more", "the script ended") from None
            sample = parse_sample(line, node, phase())
            if is_first:
                is_first = False
                seen(node)
            for action in watchdog.see(sample):
                await act(action)


async def attend_memory(
    remotes: Remotes,
    floors: Mapping[str, Floors],
    phase: Callable[[], Phase],
    admit: Callable[[Action], Awaitable[None]],
    tell: Callable[..., None],
) -> MemoryLow:
    """Watch every node that has floors, and return what must end the launch, if that ever comes.

    Caches are dropped from here. `admit` is given what the gateway has to do: admission closed and opened, a prefill
    aborted. `tell` gets an event of each action, with its node and sentence, and of a node whose memory is not seen.
    """
    watchdog = Watchdog(floors)
    low: asyncio.Future[MemoryLow] = asyncio.get_running_loop().create_future()
    drops: set[asyncio.Task[None]] = set()
    unseen: dict[str, str] = {}

    async def act(action: Action) -> None:
        tell("memory", action=action.kind, node=action.node, text=f"{action.reason}: {_DONE[action.kind]}")
        if action.kind == "drop_cache":
            # It may take seconds, in which samples must be looked at.
            task = asyncio.create_task(_dropped(remotes[action.node], tell))
            drops.add(task)
            task.add_done_callback(drops.discard)
        elif action.kind == "stop_ranks":
            if not low.done():
                low.set_result(MemoryLow(action))
        else:
            await admit(action)

    async def lost(node: str, error: DeskfleetError) -> None:
        if unseen.get(node) != error.message:  # it is tried again and again, and that is told once
            unseen[node] = error.message
            tell("memory-unseen", node=node, text=f"its memory is not seen: {error.message}")

    def seen(node: str) -> None:
        if unseen.pop(node, None) is not None:
            tell("memory-unseen", node=node, text=f"{node}: its memory is seen again")

    tasks = [
        asyncio.create_task(watch_memory(remote, watchdog, phase, act, lost, seen=seen))
        for remote in remotes
        if remote.node.name in floors
    ]
    try:
        waited: list[asyncio.Future[Any]] = [low, *tasks]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()  # it never ends by itself: what it raises is a fault of ours
        return low.result()
    finally:
        for task in (*tasks, *drops):
            task.cancel()
        await asyncio.gather(*tasks, *drops, return_exceptions=True)


async def _dropped(remote: Remote, tell: Callable[..., None]) -> None:
    try:
        what = await drop_cache(remote)
    except (NodeUnreachable, RemoteFailed) as error:
        tell("memory", action="drop_cache-failed", node=remote.node.name, text=error.message)
    else:
        node = remote.node.name
        tell("memory", action="dropped", node=node, text=f"{node}: {what} dropped")


async def drop_cache(remote: Remote) -> str:
    """Drop what a node caches, and return what was dropped. Raises NodeUnreachable, RemoteFailed.

    Without root or sudo only the checkpoint's own files are dropped, and nothing is compacted.
    """
    ran = await remote.run(read_script("drop_cache.sh"), remote.node.paths.checkpoint, timeout_s=_DROP_S)
    if ran.returncode != 0:
        raise RemoteFailed(remote.node.name, "its caches cannot be dropped", ran.last_line)
    return ran.stdout.strip()


__all__ = [
    "LOADING_FREE_BYTES",
    "SAMPLE_EVERY_S",
    "Action",
    "Floors",
    "MemoryLow",
    "Patience",
    "Phase",
    "Sample",
    "Watchdog",
    "attend_memory",
    "drop_cache",
    "floors_of",
    "floors_of_nodes",
    "parse_sample",
    "watch_memory",
]
