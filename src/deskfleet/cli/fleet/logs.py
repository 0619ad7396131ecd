"""`deskfleet fleet logs`: what ranks have logged, also when their containers are gone."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Annotated

import typer

from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Json, Overrides, open_fleet
from deskfleet.cli.terminal import print_json, printable

if TYPE_CHECKING:
    from deskfleet.fleet.launch import RankLaunch
    from deskfleet.fleet.spec import FleetSpec
    from deskfleet.fleet.state import Launch

SUPERVISOR = "supervisor"


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("logs")(run)


def run(
    who: Annotated[
        str | None,
        typer.Argument(metavar="RANK|NODE|supervisor", help="Whose. [default: all ranks']"),
    ] = None,
    file: FleetFile = FLEET_FILE,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", metavar="N", min=0, help="Of each rank the last N lines.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-F", help="Go on, until all have ended or Ctrl-C.")
    ] = False,
    launch: Annotated[
        str | None, typer.Option("--launch", metavar="ID", help="Of an older launch. [default: the latest]")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show what ranks have logged.

    From docker while a container is there, else as the supervisor has captured it. Each line has docker's time. Exit
    code 2 for a rank, node or launch that there is not.
    """
    from deskfleet.fleet.logs import choose_ranks, find_launch
    from deskfleet.fleet.state import FleetState

    spec = open_fleet(file, overrides).spec
    found = find_launch(spec, FleetState(spec.name, os.environ), launch)
    if who == SUPERVISOR:
        _print_supervisor(found, lines, as_json=as_json)
        return
    ranks = choose_ranks(spec, found, who)
    asyncio.run(_print(spec, found, ranks, lines, follow=follow, as_json=as_json))


async def _print(
    spec: FleetSpec,
    launch: Launch,
    ranks: tuple[RankLaunch, ...],
    tail: int | None,
    *,
    follow: bool,
    as_json: bool,
) -> None:
    from deskfleet.fleet.logs import read_logs
    from deskfleet.fleet.remote import Remotes

    async with Remotes(spec.nodes) as remotes:
        async for line in read_logs(spec, launch, remotes, ranks, tail=tail, follow=follow):
            if as_json:
                print_json(
                    {"rank": line.rank, "node": line.node, "captured": line.is_captured, "line": line.text}
                )
            else:
                print(f"{line.rank} {line.node} | {printable(line.text)}", flush=True)


def _print_supervisor(launch: Launch, tail: int | None, *, as_json: bool) -> None:
    from deskfleet.fleet.follow import last_lines

    for line in last_lines(launch.supervisor_log, tail):
        if as_json:
            print_json({"supervisor": True, "line": line})
        else:
            print(printable(line))


__all__ = ["register", "run"]
