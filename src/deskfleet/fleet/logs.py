"""What ranks have logged: from docker while there is a container, else as the supervisor captured it.

Owns which of the two answers, and for whom. Knows no terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from deskfleet.errors import ConfigError, DeskfleetError
from deskfleet.fleet.commands import logs_command
from deskfleet.fleet.down import find_containers
from deskfleet.fleet.follow import last_lines
from deskfleet.fleet.launch import RankLaunch
from deskfleet.fleet.remote import Remotes
from deskfleet.fleet.spec import FleetSpec
from deskfleet.fleet.state import FleetState, Launch


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line with docker's time before it. `is_captured`: the container is gone, or its node cannot be reached."""

    rank: int
    node: str
    text: str
    is_captured: bool


def choose_ranks(spec: FleetSpec, launch: Launch, who: str | None) -> tuple[RankLaunch, ...]:
    """The ranks of a launch that `who` means: a rank's number, a node's name, or everybody. Raises ConfigError."""
    started = launch.spec()
    if started is None:
        raise DeskfleetError(
            f"{spec.name} has not started a container in launch {launch.directory.name}",
            hint=f"see {launch.supervisor_log}",
        )
    if who is None:
        return started.ranks
    chosen = tuple(rank for rank in started.ranks if who in (str(rank.rank), rank.node))
    if not chosen:
        known = ", ".join(f"{rank.rank} ({rank.node})" for rank in started.ranks)
        raise ConfigError(f"{who!r} is neither a rank nor a node of this launch", hint=f"there are {known}")
    return chosen


def find_launch(spec: FleetSpec, state: FleetState, launch_id: str | None) -> Launch:
    """The launch of that id, by default the latest. Raises ConfigError when there is none."""
    known = state.launches()
    wanted = launch_id or (known[-1] if known else None)
    if wanted is None or wanted not in known:
        what = f"of launch {launch_id}" if launch_id else "of any launch"
        raise ConfigError(
            f"nothing is known here {what} of {spec.name}", hint=f"known: {', '.join(known) or 'none'}"
        )
    return state.launch(wanted)


async def read_logs(
    spec: FleetSpec,
    launch: Launch,
    remotes: Remotes,
    ranks: tuple[RankLaunch, ...],
    *,
    tail: int | None,
    follow: bool,
) -> AsyncIterator[LogLine]:
    """Yield the lines of `ranks`, of each its last `tail` ones; with `follow` also those to come, until all end."""
    there = (await find_containers(remotes, spec.name)).of_launch(launch.directory.name)
    queue: asyncio.Queue[LogLine | None] = asyncio.Queue(1000)

    async def read(rank: RankLaunch) -> None:
        try:
            if rank.rank not in there:
                for line in last_lines(launch.rank_log(rank.rank), tail):
                    await queue.put(LogLine(rank.rank, rank.node, line, True))
                return
            node, container = there[rank.rank]
            script = f"exec {logs_command(container.id, follow=follow, tail=tail).text} 2>&1"
            async with contextlib.aclosing(remotes[node].stream(script)) as lines:
                async for line in lines:
                    await queue.put(LogLine(rank.rank, node, line, False))
        finally:
            await queue.put(None)

    reading = [asyncio.ensure_future(read(rank)) for rank in ranks]
    try:
        left = len(reading)
        while left:
            line = await queue.get()
            if line is None:
                left -= 1
            else:
                yield line
        await asyncio.gather(*reading)
    finally:
        for task in reading:
            task.cancel()
        while not queue.empty():
            queue.get_nowait()
        await asyncio.gather(*reading, return_exceptions=True)


__all__ = ["LogLine", "choose_ranks", "find_launch", "read_logs"]
