"""From a fleet's file to running containers: what is to run, and its start, all or nothing; and the supervisor's start.

Owns the order of a start on nodes. What a rank runs is `render`'s, how docker is asked is `commands`'.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deskfleet.errors import CheckpointError, ConfigError, DeskfleetError
from deskfleet.fleet.commands import fill_secrets, start_command
from deskfleet.fleet.doctor import Examination
from deskfleet.fleet.engines.contract import ports_of
from deskfleet.fleet.engines.native import TOKEN_SECRET
from deskfleet.fleet.fabric import Fabric
from deskfleet.fleet.facts import NodeFacts
from deskfleet.fleet.launch import HEAD_RANK, LaunchSpec, RankLaunch
from deskfleet.fleet.planning import plan_fleet
from deskfleet.fleet.remote import Ran, Remote, Remotes
from deskfleet.fleet.render import render_launch
from deskfleet.fleet.secrets import read_secret
from deskfleet.fleet.share import prove
from deskfleet.fleet.spec import LOCAL, FleetSource, FleetSpec
from deskfleet.fleet.state import ENDS, Launch
from deskfleet.model.embedded import POCKET, locate
from deskfleet.planner.plan import MemoryPlan

NATIVE = "native"

_START_S = 120.0
_LOOK_S = 0.1
_SETTLED = ("serving", *ENDS)
_SUPERVISOR = "deskfleet.cli.fleet.supervise"

# Docker refuses a mount whose source is missing; the cache is ours to make.
_START = """\
set -eu
mkdir -p -- "$1"
shift
exec "$@"
"""

_SMALL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
"""What the gateway needs of a checkpoint that lies on another machine; the first two must be there."""


class NotReady(DeskfleetError):
    """The doctor's verdict: nothing may be launched like this."""

    exit_code = 1


class StartFailed(DeskfleetError):
    """A container could not be started, or ended at once."""

    def __init__(self, rank: RankLaunch, said: str) -> None:
        super().__init__(
            f"rank {rank.rank} on {rank.node}: its container was not started: {said}",
            hint="see deskfleet fleet serve --dry-run for the command",
        )
        self.rank = rank.rank


@dataclass(frozen=True, slots=True)
class GateChoice:
    """Which launch gates are asked before the port opens: all, `only` these, or `none`."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    none: bool = False


def new_launch_id() -> str:
    """An id that sorts by time: of two within a second the microseconds tell."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"


def with_all_nodes(source: FleetSource) -> FleetSource:
    """With our own engine a fleet of n nodes has n ranks, unless the wishes say otherwise.

    The planner would rather have fewer where the model fits; whoever lists machines wants them used.
    """
    spec = source.spec
    if spec.engine.name != NATIVE or spec.wishes.tp_size is not None or spec.profile is not None:
        return source
    return replace(source, spec=replace(spec, wishes=replace(spec.wishes, tp_size=len(spec.nodes))))


def plan_launch(source: FleetSource) -> MemoryPlan:
    """The plan to launch by. Raises ConfigError; whether it fits is for `render_launch` to say."""
    return plan_fleet(with_all_nodes(source)).best


def digest_of(spec: FleetSpec, overrides: Sequence[str]) -> str:
    """What tells whether a fleet that runs was started from this file, with these overrides."""
    text = spec.path.read_bytes() + b"\0" + "\0".join(overrides).encode()
    return hashlib.sha256(text).hexdigest()


def check_obstacles(found: Examination) -> None:
    """Raises the first unreachable node's error, or NotReady with every check that must pass and does not."""
    if found.unreachable:
        raise next(iter(found.unreachable.values()))
    if not found.obstacles:
        return
    lines = [f"{each.node}: {each.check}: {each.measured}" for each in found.obstacles]
    if len(lines) == 1:
        raise NotReady(f"not started: {lines[0]}", hint=found.obstacles[0].hint)
    raise NotReady(
        f"not started, {len(lines)} checks fail: " + "; ".join(lines),
        hint="deskfleet fleet doctor shows all, each with what to do",
    )


async def check_checkpoint(spec: FleetSpec, remotes: Remotes) -> None:
    """Raises CheckpointError unless every node has the files. The embedded checkpoint is in the image."""
    if spec.checkpoint.model == POCKET:
        return
    for proof in await prove(spec, remotes):
        if not proof.is_good:
            bad = [f"{seen.file}: {seen.problem}" for seen in proof.files if seen.problem is not None]
            said = [*proof.problems, *bad]
            raise CheckpointError(
                f"{proof.node} has not the checkpoint: {said[0] if said else 'something is missing'}",
                hint="deskfleet fleet share brings it there",
            )


async def meeting_place(spec: FleetSpec, remotes: Remotes, fabric: Fabric) -> tuple[str, int]:
    """Where ranks of our own engine find the supervisor: the address of this machine that the head reaches, and a port.

    The port is the one that other engines use for HTTP: always the same for a fleet. Raises DeskfleetError when the
    address cannot be told.
    """
    port = ports_of(spec.name).engine
    head = spec.head
    if head.address == LOCAL:
        known = fabric.nodes.get(head.name)
        return (known.rendezvous if known is not None and known.rendezvous else head.fabric[0]), port
    ran = await remotes[head.name].run('set -- $SSH_CONNECTION; printf "%s" "${1:-}"')
    if ran.returncode != 0 or not ran.stdout:
        raise DeskfleetError(
            f"node {head.name} does not say from where we have come: {ran.last_line}",
            hint='type this on the head, with address = "local" for it',
        )
    return ran.stdout.partition("%")[0], port


def spell_place(place: tuple[str, int]) -> str:
    """HOST:PORT, with brackets where the host needs them."""
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def render(
    source: FleetSource,
    plan: MemoryPlan,
    fabric: Fabric,
    facts: Mapping[str, NodeFacts],
    *,
    launch_id: str,
    place: tuple[str, int] | None,
) -> LaunchSpec:
    """What will run. Raises DoesNotFit or ConfigError with every reason why not."""
    return render_launch(
        plan,
        source.spec,
        fabric.nodes,
        facts,
        launch_id=launch_id,
        connect=None if place is None else spell_place(place),
    )


def secret_values(
    launch: LaunchSpec, spec: FleetSpec, environ: Mapping[str, str], *, token: str
) -> dict[str, str]:
    """The values of the secrets that this launch needs. Raises ConfigError."""
    return {name: token if name == TOKEN_SECRET else _read(name, spec, environ) for name in launch.secrets}


def _read(name: str, spec: FleetSpec, environ: Mapping[str, str]) -> str:
    if name not in spec.secrets:
        raise ConfigError(
            f"the launch needs the secret {name}, and the file has none of that name",
            hint=f'[secrets] {name} = "env:NAME" or "file:/PATH"',
        )
    return read_secret(name, spec.secrets[name], environ)


async def start_ranks(
    remotes: Remotes,
    launch: LaunchSpec,
    spec: FleetSpec,
    values: Mapping[str, str],
    on_started: Callable[[RankLaunch, str], None],
) -> None:
    """Start every rank's container, workers first, the head last; `on_started` is told each container's id.

    Raises StartFailed or NodeUnreachable for the first that does not start: what has started is then the caller's to
    end.
    """
    caches = {node.name: node.paths.cache for node in spec.nodes}

    async def start(remote: Remote, ranks: Iterable[RankLaunch]) -> None:
        for rank in ranks:
            command = start_command(rank)
            stdin = fill_secrets(command.stdin, values).encode() or None
            ran = await remote.run(_START, caches[rank.node], *command.argv, stdin=stdin, timeout_s=_START_S)
            if ran.returncode != 0:
                raise StartFailed(rank, _docker_said(ran))
            on_started(rank, ran.stdout.strip())

    for ranks in (launch.ranks[HEAD_RANK + 1 :], launch.ranks[: HEAD_RANK + 1]):
        by_node: dict[str, list[RankLaunch]] = {}
        for rank in ranks:
            by_node.setdefault(rank.node, []).append(rank)

        async def start_here(remote: Remote, by_node: Mapping[str, list[RankLaunch]] = by_node) -> None:
            await start(remote, by_node.get(remote.node.name, ()))

        (await remotes.gather(start_here)).all()


def _docker_said(ran: Ran) -> str:
    """Docker's reason; after it, it says how to get help."""
    lines = [line.strip() for line in ran.stderr.splitlines() if line.strip()]
    reasons = [line for line in lines if not line.startswith(("Run 'docker", "See 'docker"))]
    return reasons[-1].removeprefix("docker: ") if reasons else ran.last_line


async def checkpoint_here(spec: FleetSpec, remotes: Remotes, launch: Launch) -> Path:
    """A directory of this machine with what is needed here of the checkpoint.

    That is all of it for our own engine, whose front reads the headers, and the tokenizer with its configuration for
    others. Raises ConfigError when it is not here, CheckpointError when the head has none.
    """
    model, head = spec.checkpoint.model, spec.head
    if model == POCKET or (Path(model).is_absolute() and (Path(model) / _SMALL_FILES[0]).is_file()):
        return locate(model)
    if head.address == LOCAL:
        return Path(head.paths.checkpoint)
    if spec.engine.name == NATIVE:
        raise ConfigError(
            f"our own engine's front reads {model} on the machine where it is started, and it is not here",
            hint="type this on the head, or give [checkpoint] model a directory of this machine",
        )
    place = launch.directory / "checkpoint"
    place.mkdir(exist_ok=True)
    for number, name in enumerate(_SMALL_FILES):
        ran = await remotes[head.name].run('exec cat -- "$1"', f"{head.paths.checkpoint}/{name}")
        if ran.returncode == 0:
            (place / name).write_text(ran.stdout, encoding="utf-8")
        elif number < 2:
            raise CheckpointError(
                f"{head.name}: {name} cannot be read: {ran.last_line}",
                hint="pull it first: deskfleet fleet pull",
            )
    return place


class SupervisorProcess:
    """The supervisor, for who has started it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def wait(self) -> int:
        """Return its exit code, once it has ended."""
        return self._process.wait()

    def leave(self) -> None:
        """It lives on without us: nobody here waits for it, and Python need not warn of that."""
        self._process.returncode = 0


def start_supervisor(
    spec: FleetSpec,
    overrides: Sequence[str],
    launch: Launch,
    launch_id: str,
    gates: GateChoice,
    lock: int,
) -> SupervisorProcess:
    """Start the supervisor in a session of its own, so that no terminal takes it along; it inherits `lock`.

    Its output is the launch's supervisor.log. Secrets reach it through its environment only.
    """
    launch.make()
    words = ["--file", str(spec.path), "--launch", launch_id, "--lock", str(lock)]
    words += [word for text in overrides for word in ("--set", text)]
    words += [word for name in gates.only for word in ("--gate", name)]
    words += [word for name in gates.skip for word in ("--skip", name)]
    words += ["--no-gates"] if gates.none else []
    with launch.supervisor_log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _SUPERVISOR, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
            cwd="/",
        )
    return SupervisorProcess(process)


def follow_events(launch: Launch, is_alive: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Yield a launch's events as they are written, until it serves or has ended, or nobody writes any more."""
    offset = 0
    while True:
        was_alive = is_alive()
        events, offset = launch.events(offset)
        for event in events:
            yield event
            if event["event"] == "phase" and event["phase"] in _SETTLED:
                return
        if not was_alive:
            return
        time.sleep(_LOOK_S)


__all__ = [
    "GateChoice",
    "NotReady",
    "StartFailed",
    "SupervisorProcess",
    "check_checkpoint",
    "check_obstacles",
    "checkpoint_here",
    "digest_of",
    "follow_events",
    "meeting_place",
    "new_launch_id",
    "plan_launch",
    "render",
    "secret_values",
    "spell_place",
    "start_ranks",
    "start_supervisor",
    "with_all_nodes",
]
