"""What a fleet's events mean: what is restarted, when, and when that is given up; and what there is to see of a fleet.

Two things, both without a clock, a node or a process of their own. `decide` is the supervisor's policy as a table of
states: events in, decisions out, times are given. `Watcher` reads the state directory for whoever looks on.

Ranks live and die together: a collective without one of them never ends, and a rank that comes back alone would wait
for a meeting that is over. So the only cures are all ranks or none, and docker restarts nothing by itself. Whatever is
started again passes the doctor and the gates again, so memory that has not come back stops a restart and not a machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from deskfleet.fleet.state import FleetState, Record, now

Standing = Literal["up", "waiting", "ended"]
"""Ranks run or are being started; all are stopped and will be started again; nothing is done any more."""

Kind = Literal["nothing", "note", "stop_all", "start_all", "give_up"]
"""`note` is only worth telling. `stop_all` is followed by `start_all` when it is time; `give_up` stops all too."""


@dataclass(frozen=True, slots=True)
class Policy:
    """`backoff_s` is waited before the first, second, ... restart; one more failure is the last.

    The count begins anew when the fleet has served for `steady_s` without a break. Time since the first failure would
    not do: weights load for a quarter of an hour, and a fleet that fails after that would be restarted for ever.
    A node may be away for `absent_s`. With `final_codes` a rank says itself that another start would end as this one.
    """

    backoff_s: tuple[float, ...] = (10.0, 30.0, 90.0)
    steady_s: float = 1800.0
    absent_s: float = 1800.0
    final_codes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Supervised:
    """What the policy remembers. `boot_ids` by node, as first seen; `absent` are nodes and since when."""

    standing: Standing = "up"
    boot_ids: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, float] = field(default_factory=dict)
    serving_since_s: float | None = None
    failures: int = 0
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank's process is over. `code` None: nobody can say how. `said` is a better sentence than this makes."""

    rank: int
    node: str
    code: int | None
    is_out_of_memory: bool = False
    said: str = ""


@dataclass(frozen=True, slots=True)
class HeartbeatLost:
    """A rank says nothing any more, and its process may still be there. `said` is as RankEnded's."""

    rank: int
    node: str
    said: str = ""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A start did not come to its end. `is_final` when the file or the plan is wrong, not a machine."""

    said: str
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class GateFailed:
    """An answer was wrong."""

    gate: str
    said: str


@dataclass(frozen=True, slots=True)
class MemoryStop:
    """The watchdog asks for the end of all ranks."""

    node: str
    said: str


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node cannot be reached by ssh; its ranks have connections of their own."""

    node: str
    said: str


@dataclass(frozen=True, slots=True)
class NodeBack:
    """A node can be reached; `boot_id` is its kernel's."""

    node: str
    boot_id: str


@dataclass(frozen=True, slots=True)
class Serving:
    """The endpoint has opened."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The user wants it to end."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. To be told about once a second."""


Event = (
    RankEnded
    | HeartbeatLost
    | StartFailed
    | GateFailed
    | MemoryStop
    | NodeLost
    | NodeBack
    | Serving
    | StopAsked
    | Tick
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done now, and the sentence that says why."""

    kind: Kind
    reason: str = ""


_NOTHING = Decision("nothing")


def decide(
    state: Supervised, event: Event, time_s: float, policy: Policy | None = None
) -> tuple[Supervised, Decision]:
    """Return the state after an event at `time_s`, on any clock that only goes forward, and what is to be done.

    Of ranks that die together the first counts. After `give_up` and after StopAsked nothing is done any more.
    """
    policy = policy or Policy()
    if state.standing == "ended":
        return state, _NOTHING
    match event:
        case StopAsked():
            return replace(state, standing="ended"), Decision("stop_all", "it was asked to stop")
        case Tick():
            return _time_passed(state, time_s, policy)
        case NodeLost(node, said):
            if node in state.absent:
                return state, _NOTHING
            left = "its ranks may live on; its log and memory are not seen" if state.standing == "up" else ""
            reason = "; ".join(filter(None, (f"{node} cannot be reached: {said}", left)))
            return replace(state, absent={**state.absent, node: time_s}), Decision("note", reason)
        case NodeBack():
            return _node_back(state, event, time_s, policy)
    if state.standing == "waiting":
        return state, _NOTHING  # the same death, told by another
    match event:
        case Serving():
            return replace(state, serving_since_s=time_s), _NOTHING
        case GateFailed(gate, said):
            # The same weights on the same machines give the same answers.
            return _given_up(state, f"gate {gate} failed, and a restart would not change answers: {said}")
        case StartFailed(said, True):
            return _given_up(state, said)
        case RankEnded(rank, node, code) if code in policy.final_codes:
            return _given_up(
                state, f"rank {rank} on {node} ended with {code}: it would again. Its log says why"
            )
        case _:
            return _failed(state, _sentence(event), time_s, policy)


def _sentence(event: Event) -> str:
    match event:
        case RankEnded(said=said) | HeartbeatLost(said=said) if said:
            return said
        case RankEnded(rank, node, code, is_out_of_memory):
            how = "ended, nobody knows how" if code is None else f"ended with {code}"
            return f"rank {rank} on {node} {how}{', out of memory' if is_out_of_memory else ''}"
        case HeartbeatLost(rank, node):
            return f"rank {rank} on {node} does not answer any more"
        case MemoryStop(_, said) | StartFailed(said):
            return said
    raise TypeError(f"{event} is no failure")


def _failed(state: Supervised, sentence: str, time_s: float, policy: Policy) -> tuple[Supervised, Decision]:
    since_s = state.serving_since_s
    was_steady = since_s is not None and time_s - since_s >= policy.steady_s
    failures = 1 if was_steady else state.failures + 1
    if failures > len(policy.backoff_s):
        return _given_up(
            replace(state, failures=failures),
            f"{sentence}; that was failure {failures} without {_span(policy.steady_s)} of service between them",
        )
    wait_s = policy.backoff_s[failures - 1]
    state = replace(state, standing="waiting", failures=failures, due_s=time_s + wait_s, serving_since_s=None)
    return state, Decision(
        "stop_all", f"{sentence}; restart {failures} of {len(policy.backoff_s)} in {wait_s:g} s"
    )


def _span(seconds: float) -> str:
    return f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} s"


def _given_up(state: Supervised, reason: str) -> tuple[Supervised, Decision]:
    return replace(state, standing="ended", serving_since_s=None), Decision("give_up", reason)


def _time_passed(state: Supervised, time_s: float, policy: Policy) -> tuple[Supervised, Decision]:
    if state.standing != "waiting" or state.due_s is None or time_s < state.due_s:
        return state, _NOTHING
    # While the others served, nobody needed it.
    due_s = state.due_s
    gone = [node for node, since_s in state.absent.items() if time_s - max(since_s, due_s) >= policy.absent_s]
    if gone:
        return _given_up(
            state,
            f"{', '.join(gone)} cannot be reached for {_span(policy.absent_s)}: nothing can start",
        )
    if state.absent:
        return state, _NOTHING
    return replace(state, standing="up", due_s=None), Decision(
        "start_all", f"restart {state.failures} of {len(policy.backoff_s)}"
    )


def _node_back(
    state: Supervised, event: NodeBack, time_s: float, policy: Policy
) -> tuple[Supervised, Decision]:
    node, before = event.node, state.boot_ids.get(event.node)
    was_absent = node in state.absent
    state = replace(
        state,
        boot_ids={**state.boot_ids, node: event.boot_id},
        absent={name: since_s for name, since_s in state.absent.items() if name != node},
    )
    if before is None or before == event.boot_id:
        return state, Decision("note", f"{node} can be reached again") if was_absent else _NOTHING
    if state.standing == "waiting":
        return state, Decision("note", f"{node} has been rebooted")
    # Its ranks are gone, whether or not anybody has noticed yet: nothing starts containers at boot.
    return _failed(state, f"{node} has been rebooted", time_s, policy)


# --- for whoever looks on -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class News:
    """What is new. `record` is the launch as its supervisor wrote it last, `supervisor` its process id while it lives.

    `is_changed`: the launch, its phase, its supervisor or whether anybody is let in is another than the last time.
    """

    record: Record | None
    supervisor: int | None
    is_changed: bool
    events: tuple[dict[str, Any], ...]


def spell_due(record: Record) -> str:
    """When a waiting fleet is started again, as a sentence."""
    due_in_s = (datetime.fromisoformat(record.restart_at or now()) - datetime.now(UTC)).total_seconds()
    if due_in_s > 0:
        return f"the next start is due in {due_in_s:.0f} s"
    return (
        f"the next start was due {-due_in_s:.0f} s ago: it waits for a node, or for whoever changes the fleet"
    )


class Watcher:
    """Reads a fleet's state directory again and again, and goes over to a new launch when there is one."""

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._launch_id: str | None = None
        self._offset = 0
        self._seen: tuple[object, ...] | None = None

    def look(self) -> News:
        """Return what has happened since the last look; the first time, all of the latest launch.

        Raises DeskfleetError for a record that cannot be read.
        """
        record = self._state.record()
        supervisor = self._state.supervisor()
        events: list[dict[str, Any]] = []
        if record is not None:
            if record.launch_id != self._launch_id:
                events += self._rest()  # how the launch before came to its end
                self._launch_id, self._offset = record.launch_id, 0
            events += self._rest()
        seen = (record and (record.launch_id, record.phase, record.closed), supervisor)
        is_changed, self._seen = seen != self._seen, seen
        return News(record, supervisor, is_changed, tuple(events))

    def _rest(self) -> list[dict[str, Any]]:
        if self._launch_id is None:
            return []
        found, self._offset = self._state.launch(self._launch_id).events(self._offset)
        return [{"launch_id": self._launch_id, **each} for each in found]


__all__ = [
    "Decision",
    "Event",
    "GateFailed",
    "HeartbeatLost",
    "MemoryStop",
    "News",
    "NodeBack",
    "NodeLost",
    "Policy",
    "RankEnded",
    "Serving",
    "StartFailed",
    "StopAsked",
    "Supervised",
    "Tick",
    "Watcher",
    "decide",
    "spell_due",
]
