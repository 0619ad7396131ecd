"""`deskfleet fleet serve`: the launch, shown in the terminal that asked for it. The supervisor does the work."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Json, Overrides, open_fleet
from deskfleet.cli.terminal import own_command, print_json, printable, say
from deskfleet.errors import ConfigError, DeskfleetError

if TYPE_CHECKING:
    from deskfleet.fleet.launch import LaunchSpec
    from deskfleet.fleet.spec import FleetSource, FleetSpec
    from deskfleet.fleet.state import FleetState, Launch
    from deskfleet.fleet.status import FleetStatus
    from deskfleet.fleet.up import GateChoice, SupervisorProcess

Gate = Annotated[
    list[str] | None,
    typer.Option("--gate", metavar="NAME", help="Of the launch gates ask this one; may be repeated."),
]
Skip = Annotated[
    list[str] | None,
    typer.Option("--skip", metavar="NAME", help="Leave this launch gate out; may be repeated."),
]
Gates = Annotated[
    bool, typer.Option("--gates/--no-gates", help="Ask the launch gates before the port opens.")
]

_PROGRESS_S = 2.0
_LOG_LINES = 15
_OTHERS_S = 10.0  # a serve that follows the launch which was just ended still has the lock


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("serve")(run)


def run(
    file: FleetFile = FLEET_FILE,
    gate: Gate = None,
    skip: Skip = None,
    gates: Gates = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Ask the nodes, start nothing: print each rank's command.")
    ] = False,
    overrides: Overrides = None,
    as_json: Json = False,
) -> int:
    """Start the fleet, and open its endpoint when answers are right.

    The work is done by a supervisor of its own, which goes on when this command has ended: Ctrl-C detaches, with exit
    code 0. A fleet that is up already is left alone (0; 1 while it lets nobody in for want of memory); one that is
    half-alive is stopped first, and one that waits to be started again is started now. The port opens when the launch
    gates have passed. What fails before that is undone: exit code 1 when a check or a gate says no, 2 for a wrong
    fleet.toml, 3 when a machine failed or somebody else is changing the fleet. What fails later is started again, as
    [restart] of the file says. With --json, each event is an object.
    """
    source = open_fleet(file, overrides)
    if dry_run:
        show_commands(source, as_json=as_json)
        return 0
    return bring_up(source, overrides or (), choose(gate, skip, gates=gates), as_json=as_json)


def choose(gate: list[str] | None, skip: list[str] | None, *, gates: bool) -> GateChoice:
    """Return which gates are asked. Raises ConfigError for names that do not exist."""
    from deskfleet.fleet.up import GateChoice
    from deskfleet.gates.registry import LAUNCH_GATES
    from deskfleet.gates.run import select

    if not gates and (gate or skip):
        raise ConfigError("--no-gates asks none, and --gate or --skip names some")
    select(LAUNCH_GATES, gate or (), skip or ())
    return GateChoice(tuple(gate or ()), tuple(skip or ()), not gates)


def bring_up(
    source: FleetSource,
    overrides: Sequence[str],
    gates: GateChoice,
    *,
    as_json: bool,
    what: str = "serve",
    is_fresh: bool = False,
) -> int:
    """Make the fleet serve, whatever it does now, and return the exit code. `is_fresh`: start it in any case."""
    from deskfleet.fleet.state import FleetState
    from deskfleet.fleet.up import digest_of

    spec = source.spec
    state = FleetState(spec.name, os.environ)
    if is_fresh:
        asyncio.run(_end_supervisor(state))  # a launch under way has the lock
    with state.acting(f"deskfleet fleet {what}", patience_s=_OTHERS_S if is_fresh else 0.0) as lock:
        found = asyncio.run(_see(spec, state))
        if found.verdict in ("up", "closed") and not is_fresh:
            return _leave_alone(found, digest_of(spec, overrides), as_json=as_json)
        if found.verdict != "down":
            say(f"{spec.name} is {found.verdict}: {'; '.join(found.reasons)}")
            asyncio.run(_bring_down(spec, state))
        return _launch(spec, state, overrides, gates, lock, as_json=as_json)


def _leave_alone(found: FleetStatus, digest: str, *, as_json: bool) -> int:
    record = found.record
    assert record is not None
    if as_json:
        print_json({"event": "up already", **found.to_dict()})
    else:
        does = f"{record.model_id} answers at {record.url}/v1"
        said = "; ".join(found.reasons) if found.verdict == "closed" else does
        say(f"{found.fleet} is up already, nothing was changed: {said}")
    if record.digest != digest:
        say(
            "note: it was started from another fleet.toml than this one is now; deskfleet fleet restart takes it"
        )
    return found.exit_code


def _launch(
    spec: FleetSpec,
    state: FleetState,
    overrides: Sequence[str],
    gates: GateChoice,
    lock: int,
    *,
    as_json: bool,
) -> int:
    from deskfleet.fleet.up import follow_events, new_launch_id, start_supervisor

    launch_id = new_launch_id()
    launch = state.launch(launch_id)
    process = start_supervisor(spec, overrides, launch, launch_id, gates, lock)
    state.forget_old_launches()
    say(f"{spec.name}: launch {launch_id}; Ctrl-C leaves it going on")
    shown = _Shown(as_json=as_json)
    last: dict[str, Any] = {}
    try:
        for event in follow_events(launch, process.is_alive):
            shown.show(event)
            last = event
        return _end(spec, launch, process, last)
    except KeyboardInterrupt:
        process.leave()
        phase = last.get("phase", "starting") if last.get("event") == "phase" else shown.phase
        say(
            f"\ndetached while {phase}: the launch goes on; {own_command()} fleet status shows it, fleet stop ends it"
        )
        if as_json:
            print_json({"event": "detached", "phase": phase, "launch": launch_id})
        return 0


def _end(spec: FleetSpec, launch: Launch, process: SupervisorProcess, last: dict[str, Any]) -> int:
    phase = last.get("phase") if last.get("event") == "phase" else None
    if phase == "serving":
        process.leave()
        say(f"{last['model_id']} answers at {last['url']}/v1 ({last['max_model_len']:,} tokens)")
        say(f"  {own_command()} fleet status|smoke|logs|stop --file {spec.path}")
        return 0
    if phase == "stopped":
        raise DeskfleetError("the launch was stopped before it served", hint="see deskfleet fleet status")
    if phase == "failed":
        raise _Failed(launch, str(last["reason"]), int(last["exit_code"]))
    code = process.wait()
    log = _tail(launch.supervisor_log)
    raise DeskfleetError(
        f"the supervisor ended with {code} and said nothing of it" + (f": {log[-1]}" if log else ""),
        hint=f"see {launch.supervisor_log}, then deskfleet fleet stop",
    )


class _Failed(DeskfleetError):
    """A launch that failed, with its own exit code."""

    def __init__(self, launch: Launch, reason: str, exit_code: int) -> None:
        super().__init__(reason, hint=f"all of it is in {launch.directory}")
        self.exit_code = exit_code


def _tail(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    except FileNotFoundError:
        return []


class _Shown:
    """Events as lines of talk, or as JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._said_s = 0.0
        self.phase = "starting"

    def show(self, event: dict[str, Any]) -> None:
        """Show one event."""
        if event["event"] == "phase":
            self.phase = event["phase"]
        if self._as_json:
            print_json(event)
            return
        line = self._line(event)
        if line is not None:
            say(printable(line))

    def _line(self, event: dict[str, Any]) -> str | None:
        kind = event["event"]
        if kind == "progress":
            return self._progress(event)
        if kind == "phase":
            return _PHASES.get(event["phase"])
        if kind == "failure":
            return _failure(event)
        return _LINES[kind].format_map(event) if kind in _LINES else None

    def _progress(self, event: dict[str, Any]) -> str | None:
        if event["share"] < 1 and time.monotonic() - self._said_s < _PROGRESS_S:
            return None
        self._said_s = time.monotonic()
        left = "" if event["eta_s"] is None else f", about {event['eta_s']:.0f} s left"
        return f"  {event['share']:4.0%} {event['what']}{left}"


_PHASES = {
    "checking": "asking the nodes",
    "starting": "starting containers, workers first",
    "loading": "loading",
    "asking": "asking the launch gates; the port opens when they pass",
    "stopping": "stopping, and removing containers",
}
_LINES = {
    "finding": "  {verdict}: {node}: {check}: {measured}",
    "warning": "  warning: {text}",
    "removed": "  removed {container} of launch {launch} on {node}",
    "container": "  rank {rank} on {node}: {container}",
    "gate": "  {verdict:4}  {gate}: {text}",
    "waiting": "  {text}",
    "watch": "  {text}",
    "memory": "  memory: {text}",
    "memory-unseen": "  memory: {text}",
}


def _failure(event: dict[str, Any]) -> str:
    lines = [*event["containers"]]
    if event["last_lines"]:
        lines += [f"last lines of rank {event['rank']}:", *(f"  {line}" for line in event["last_lines"])]
    if event["hint"]:
        lines.append(f"hint: {event['hint']}")
    return "\n".join(lines)


async def _see(spec: FleetSpec, state: FleetState) -> FleetStatus:
    from deskfleet.fleet.remote import Remotes
    from deskfleet.fleet.status import see_status

    async with Remotes(spec.nodes) as remotes:
        return await see_status(spec, state, remotes)


async def _bring_down(spec: FleetSpec, state: FleetState) -> None:
    from deskfleet.fleet.remote import Remotes
    from deskfleet.fleet.status import bring_down

    async with Remotes(spec.nodes) as remotes:
        (await bring_down(spec, state, remotes, say)).check()


async def _end_supervisor(state: FleetState) -> None:
    from deskfleet.fleet.status import end_supervisor

    await end_supervisor(state, say)


def show_commands(source: FleetSource, *, as_json: bool) -> None:
    """Print exactly what would be started. Nodes are asked, as their network decides what is said to ranks."""
    from deskfleet.fleet.commands import dry_run_text, start_command
    from deskfleet.fleet.launch import launch_to_json

    launch = asyncio.run(_render(source))
    if not as_json:
        print(dry_run_text(launch), end="")
        return
    import json

    print_json(
        {
            "launch": json.loads(launch_to_json(launch)),
            "commands": [
                {"rank": rank.rank, "node": rank.node, "argv": list(command.argv), "stdin": command.stdin}
                for rank in launch.start_order
                for command in (start_command(rank),)
            ],
        }
    )


async def _render(source: FleetSource) -> LaunchSpec:
    from deskfleet.fleet import up
    from deskfleet.fleet.doctor import see_doctor
    from deskfleet.fleet.remote import Remotes

    plan = up.plan_launch(source)
    async with Remotes(source.spec.nodes) as remotes:
        found = await see_doctor(source.spec, remotes, plan, with_traffic=False)
        for each in found.obstacles:
            say(f"would not start: {each.node}: {each.check}: {each.measured}")
        for error in found.unreachable.values():
            raise error
        is_native = plan.layout.engine == up.NATIVE
        place = await up.meeting_place(source.spec, remotes, found.fabric) if is_native else None
        return up.render(source, plan, found.fabric, found.facts, launch_id=up.new_launch_id(), place=place)


__all__ = ["Gate", "Gates", "Skip", "bring_up", "choose", "register", "run", "show_commands"]
