"""The fleet's containers: which there are, and their end. Owns the order of an end, and what is said of nodes that
cannot be reached.

Only containers with the label of this fleet are ever touched. The head is stopped first, then all workers: a worker
that loses its head ends, a head that loses a worker complains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deskfleet.errors import DeskfleetError
from deskfleet.fleet.commands import (
    STOP_GRACE_S,
    Listed,
    list_command,
    logs_command,
    parse_listed,
    remove_command,
    stop_command,
)
from deskfleet.fleet.launch import HEAD_RANK
from deskfleet.fleet.remote import Remote, RemoteFailed, Remotes

_DOCKER_S = 30.0
_STOP_S = 60.0 + STOP_GRACE_S


@dataclass(frozen=True, slots=True)
class Found:
    """The fleet's containers by node, and the nodes of which nothing can be said."""

    containers: Mapping[str, tuple[Listed, ...]]
    unreachable: Mapping[str, DeskfleetError]

    def of_launch(self, launch_id: str) -> dict[int, tuple[str, Listed]]:
        """Node and container of each rank of one launch."""
        return {
            each.rank: (node, each)
            for node, listed in self.containers.items()
            for each in listed
            if each.launch_id == launch_id
        }

    @property
    def all(self) -> tuple[tuple[str, Listed], ...]:
        """Every container with its node."""
        return tuple((node, each) for node, listed in self.containers.items() for each in listed)


@dataclass(slots=True)
class Cleared:
    """What an end came to: `removed` are containers with their nodes; `failures` the nodes where it did not work."""

    removed: list[tuple[str, Listed]] = field(default_factory=list)
    failures: dict[str, DeskfleetError] = field(default_factory=dict)


async def find_containers(remotes: Remotes, fleet: str) -> Found:
    """Ask every node for the fleet's containers, running or not, of whatever launch."""
    command = list_command(fleet)

    async def ask(remote: Remote) -> tuple[Listed, ...]:
        ran = await remote.run(f"exec {command.text}", timeout_s=_DOCKER_S)
        if ran.returncode != 0:
            raise RemoteFailed(remote.node.name, "docker does not list its containers", ran.last_line)
        return parse_listed(ran.stdout)

    gathered = await remotes.gather(ask)
    return Found(gathered.results, gathered.failures)


async def clear(
    remotes: Remotes,
    fleet: str,
    *,
    which: Callable[[Listed], bool] = lambda container: True,
    before_removal: Callable[[str, Listed, str], None] = lambda node, container, log: None,
    log_lines: int = 0,
) -> Cleared:
    """Stop and remove the fleet's containers that `which` chooses. Nothing is raised: failures are in the result.

    With `log_lines` the end of each container's log is handed to `before_removal`.
    """
    found = await find_containers(remotes, fleet)
    cleared = Cleared(failures=dict(found.unreachable))
    chosen = [(node, each) for node, each in found.all if which(each)]
    heads = [(node, each) for node, each in chosen if each.rank == HEAD_RANK]
    workers = [(node, each) for node, each in chosen if each.rank != HEAD_RANK]
    for group in (heads, workers):
        by_node: dict[str, list[Listed]] = {}
        for node, each in group:
            by_node.setdefault(node, []).append(each)

        async def end(remote: Remote, by_node: Mapping[str, list[Listed]] = by_node) -> list[Listed]:
            containers = by_node.get(remote.node.name, [])
            if not containers:
                return []
            await _end(remote, containers)
            for each in containers if log_lines else ():
                before_removal(remote.node.name, each, await last_lines(remote, each.id, log_lines))
            await _remove(remote, containers)
            return containers

        gathered = await remotes.gather(end)
        cleared.removed += [(node, each) for node, ended in gathered.results.items() for each in ended]
        cleared.failures.update(
            {name: e for name, e in gathered.failures.items() if name not in cleared.failures}
        )
    return cleared


async def kill(remotes: Remotes, containers: Mapping[str, Sequence[str]]) -> None:
    """End these containers, ids by node, everywhere at once and without asking. Nothing is raised: `clear` follows."""

    async def kill_here(remote: Remote) -> None:
        ids = containers.get(remote.node.name)
        if ids:
            await remote.run('exec docker kill -- "$@" >/dev/null', *ids, timeout_s=_DOCKER_S)

    await remotes.gather(kill_here)


async def last_lines(remote: Remote, container: str, num_lines: int) -> str:
    """The end of a container's log, both of its streams; empty when docker has none."""
    ran = await remote.run(f"exec {logs_command(container, tail=num_lines).text} 2>&1", timeout_s=_DOCKER_S)
    return ran.stdout if ran.returncode == 0 else ""


async def _end(remote: Remote, containers: Iterable[Listed]) -> None:
    running = [each.id for each in containers if each.state in ("running", "paused", "restarting")]
    if running:
        await _docker(remote, f"exec {stop_command(running).text}", "a container cannot be stopped")


async def _remove(remote: Remote, containers: Iterable[Listed]) -> None:
    ids = [each.id for each in containers]
    await _docker(remote, f"exec {remove_command(ids).text}", "a container cannot be removed")


async def _docker(remote: Remote, script: str, what: str) -> None:
    ran = await remote.run(script, timeout_s=_STOP_S)
    if ran.returncode != 0 and "No such container" not in ran.stderr:
        raise RemoteFailed(remote.node.name, what, ran.last_line)


__all__ = ["Cleared", "Found", "clear", "find_containers", "kill", "last_lines"]
