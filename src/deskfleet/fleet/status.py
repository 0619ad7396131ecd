"""How a fleet is, from all who can say: its supervisor, docker on every node, and its endpoint. Changes nothing.

Owns the verdict:

    up          the supervisor serves, every rank's container runs, the endpoint answers           exit code 0
    closed      the same, and nobody is let in until a node has memory again                       1
    starting    a launch is under way, or somebody is about to begin one; stopping: an end is      1
    waiting     it has failed, nothing of it runs, and its supervisor will start it again          1
    down        no supervisor and no container                                                     1
    half-alive  anything between, such as containers without a supervisor                          3
    unknown     nothing contradicts "down", but a node cannot be reached                           3
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from deskfleet.client import Client
from deskfleet.errors import DeskfleetError, RequestError
from deskfleet.fleet.down import Cleared, Found, clear, find_containers
from deskfleet.fleet.launch import LaunchSpec
from deskfleet.fleet.remote import Remotes
from deskfleet.fleet.spec import FleetSpec
from deskfleet.fleet.state import ENDS, FleetState, Record
from deskfleet.fleet.watch import spell_due

Verdict = Literal["up", "closed", "starting", "stopping", "waiting", "down", "half-alive", "unknown"]

EXIT_CODES: dict[Verdict, int] = {
    "up": 0,
    "closed": 1,
    "starting": 1,
    "stopping": 1,
    "waiting": 1,
    "down": 1,
    "half-alive": 3,
    "unknown": 3,
}

_STARTERS = ("launch ", "deskfleet fleet serve", "deskfleet fleet restart")
"""How those begin who have the fleet while their supervisor does not say anything yet."""

_HEALTH_S = 5.0
_STEP_S = 0.05
_END_S = 90.0  # a supervisor's own end: answers that run, then containers
_KILLED_S = 5.0
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank. `state` is docker's word, "absent", or "unknown" on a node that cannot be reached."""

    rank: int
    node: str
    container: str
    state: str
    launch_id: str


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """What there is. `supervisor` is a process id, `endpoint` what the gateway says of itself.

    `memory` is the watchdog's last event of the latest launch.
    """

    fleet: str
    verdict: Verdict
    reasons: tuple[str, ...]
    supervisor: int | None
    record: Record | None
    ranks: tuple[RankStatus, ...]
    unreachable: dict[str, str]
    endpoint: str | None
    memory: dict[str, Any] | None = None

    @property
    def exit_code(self) -> int:
        """0 up, 1 not up, 3 broken or not to be told."""
        return 3 if self.unreachable and self.verdict != "up" else EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return what --json prints."""
        return {
            "fleet": self.fleet,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "reasons": list(self.reasons),
            "supervisor": self.supervisor,
            "launch": None if self.record is None else msgspec.to_builtins(self.record),
            "ranks": [asdict(rank) for rank in self.ranks],
            "unreachable": self.unreachable,
            "endpoint": self.endpoint,
            "memory": self.memory,
        }


async def see_status(spec: FleetSpec, state: FleetState, remotes: Remotes) -> FleetStatus:
    """Look at everything. Raises DeskfleetError for a state directory that cannot be read."""
    record, supervisor = state.record(), state.supervisor()
    launch = None if record is None else state.launch(record.launch_id).spec()
    serves = supervisor is not None and record is not None and record.phase == "serving"
    found = await find_containers(remotes, spec.name)
    url = record.url if serves and record is not None else None
    endpoint, is_healthy = await _ask_endpoint(url)
    ranks = _ranks(record, launch, found)
    reasons: list[str] = []
    actor = state.actor() if supervisor is None else None
    verdict = _verdict(supervisor, actor, record, ranks, found, endpoint, reasons, is_healthy=is_healthy)
    return FleetStatus(
        fleet=spec.name,
        verdict=verdict,
        reasons=tuple(reasons),
        supervisor=supervisor,
        record=record,
        ranks=ranks,
        unreachable={name: error.message for name, error in found.unreachable.items()},
        endpoint=endpoint,
        memory=None if record is None else _last_memory(state, record.launch_id),
    )


def _last_memory(state: FleetState, launch_id: str) -> dict[str, Any] | None:
    events, _ = state.launch(launch_id).events()
    return next((each for each in reversed(events) if each["event"].startswith("memory")), None)


def _ranks(record: Record | None, launch: LaunchSpec | None, found: Found) -> tuple[RankStatus, ...]:
    """The latest launch's ranks, then containers of the fleet that are no part of it."""
    shown: list[RankStatus] = []
    ours: set[str] = set()
    if record is not None and launch is not None and (record.phase not in (*ENDS, "waiting") or found.all):
        there = found.of_launch(record.launch_id)
        for rank in launch.ranks:
            node, container = there.get(rank.rank, (rank.node, None))
            if container is not None:
                ours.add(container.id)
            state = container.state if container is not None else "absent"
            state = "unknown" if container is None and rank.node in found.unreachable else state
            shown.append(RankStatus(rank.rank, node, rank.container, state, record.launch_id))
    others = [(node, each) for node, each in found.all if each.id not in ours]
    shown += [RankStatus(each.rank, node, each.name, each.state, each.launch_id) for node, each in others]
    return tuple(shown)


def _verdict(
    supervisor: int | None,
    actor: str | None,
    record: Record | None,
    ranks: tuple[RankStatus, ...],
    found: Found,
    endpoint: str | None,
    reasons: list[str],
    *,
    is_healthy: bool,
) -> Verdict:
    reasons += [error.message for error in found.unreachable.values()]
    if supervisor is None:
        if actor is not None:
            reasons.append(f"being changed: {actor}")
            if actor.startswith(_STARTERS):
                return "starting"  # what the record says is of the launch before
        if record is not None and record.phase == "failed" and record.reason is not None:
            reasons.append(f"the last launch failed: {record.reason}")
        elif record is not None and record.phase != "stopped":
            reasons.append(f"the supervisor, process {record.pid}, ended without a word while {record.phase}")
        if found.all:
            names = ", ".join(f"{each.name} on {node} ({each.state})" for node, each in found.all)
            reasons.append(f"containers without a supervisor: {names}")
            return "half-alive"
        return "unknown" if found.unreachable else "down"
    if record is not None and record.phase == "waiting":
        reasons += [record.reason or "it has failed", spell_due(record)]
        return "waiting"
    if record is None or record.phase not in ("serving", "stopping"):
        return "starting"
    if record.phase == "stopping":
        return "stopping"
    wrong = [
        f"rank {rank.rank} on {rank.node} is {rank.state}"
        for rank in ranks
        if rank.state not in ("running", "unknown") or rank.launch_id != record.launch_id
    ]
    reasons += wrong
    if record.closed is not None and not wrong and not is_healthy:
        reasons.append(f"nobody is let in: {record.closed}")
        return "closed"
    if not is_healthy:
        reasons.append(f"the endpoint: {endpoint}")
    return "half-alive" if wrong or not is_healthy else "up"


async def _ask_endpoint(url: str | None) -> tuple[str | None, bool]:
    """What the gateway says, and whether it can answer."""
    if url is None:
        return None, False
    try:
        async with asyncio.timeout(_HEALTH_S), Client(reachable(url)) as client:
            await client.get("/health")
    except RequestError:
        return "asks for a key", True
    except TimeoutError:
        return f"no answer within {_HEALTH_S:g} s", False
    except DeskfleetError as error:
        return error.message, False
    return "healthy", True


def reachable(url: str) -> str:
    """The address of a server of this machine as this machine reaches it, when it listens on all addresses."""
    parts = urlsplit(url)
    host = _ANYWHERE.get(parts.hostname or "")
    return url if host is None else f"{parts.scheme}://{host}:{parts.port}"


# --- the end of a whole fleet ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stopped:
    """What an end came to. `supervisor` says what became of it; `still` names what may still run, by node."""

    supervisor: str
    cleared: Cleared
    still: dict[str, tuple[str, ...]]

    @property
    def is_complete(self) -> bool:
        """Whether nothing of the fleet is left for certain."""
        return not self.cleared.failures

    def check(self) -> None:
        """Raises DeskfleetError naming what may still run where."""
        if self.is_complete:
            return
        nodes = []
        for name, error in self.cleared.failures.items():
            what = ", ".join(self.still.get(name) or ("containers of this fleet",))
            nodes.append(f"{name}: {what} may still run ({error.message})")
        first = next(iter(self.cleared.failures.values()))
        raise DeskfleetError(f"not stopped everywhere: {'; '.join(nodes)}", hint=first.hint)


async def bring_down(
    spec: FleetSpec,
    state: FleetState,
    remotes: Remotes,
    on_step: Callable[[str], None] = lambda text: None,
) -> Stopped:
    """End the supervisor, which ends its launch in order, then remove whatever containers there still are.

    A supervisor that does not end is killed. Nothing is raised for nodes that cannot be reached; see `Stopped.check`.
    """
    said = await end_supervisor(state, on_step)
    cleared = await clear(remotes, spec.name)
    for node, container in cleared.removed:
        on_step(f"removed {container.name} on {node}")
    record = state.record()
    launch = None if record is None else state.launch(record.launch_id).spec()
    still = {
        name: tuple(f"rank {rank.rank} ({rank.container})" for rank in launch.on_node(name)) if launch else ()
        for name in cleared.failures
    }
    if record is not None and record.phase not in ENDS:
        # Its supervisor cannot write this any more.
        state.write_record(msgspec.structs.replace(record, phase="stopped", url=None, restart_at=None))
    return Stopped(said, cleared, still)


async def end_supervisor(state: FleetState, on_step: Callable[[str], None]) -> str:
    """Ask the supervisor to stop, and wait for it; kill one that does not. Returns what became of it."""
    pid = state.supervisor()
    if pid is None:
        return "there was none"
    on_step(f"stopping the supervisor, process {pid}")
    if await _signalled(state, pid, signal.SIGTERM, _END_S):
        return "stopped"
    on_step(f"the supervisor did not stop within {_END_S:g} s, and is killed")
    await _signalled(state, pid, signal.SIGKILL, _KILLED_S)
    return "killed"


async def _signalled(state: FleetState, pid: int, number: signal.Signals, within_s: float) -> bool:
    """Send the signal while that process is the supervisor; whether it has ended in time."""
    if state.supervisor() == pid:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return True
    until_s = time.monotonic() + within_s
    while state.supervisor() is not None:
        if time.monotonic() > until_s:
            return False
        await asyncio.sleep(_STEP_S)
    return True


__all__ = [
    "EXIT_CODES",
    "FleetStatus",
    "RankStatus",
    "Stopped",
    "Verdict",
    "bring_down",
    "end_supervisor",
    "reachable",
    "see_status",
]
