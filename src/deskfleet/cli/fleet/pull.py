"""`deskfleet fleet pull`: the checkpoint, downloaded onto the head or other nodes."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Annotated

import typer

from deskfleet.cli.flags import Json
from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Overrides, open_fleet
from deskfleet.cli.fleet.moving import Moving, print_shown
from deskfleet.cli.terminal import print_json, say
from deskfleet.fleet.transfer import PARALLEL
from deskfleet.units import format_bytes

if TYPE_CHECKING:
    from deskfleet.fleet.pull import Pulled, PullOptions
    from deskfleet.fleet.spec import FleetSpec


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("pull")(run)


def run(
    file: FleetFile = FLEET_FILE,
    overrides: Overrides = None,
    on: Annotated[
        list[str] | None,
        typer.Option("--on", metavar="NODE", help="Onto this node; may be repeated. [default: the head]"),
    ] = None,
    engram_only: Annotated[
        bool, typer.Option("--engram-only", help="Only the shards with Engram tables, and the small files.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash everything that is there again, not only what changed.")
    ] = False,
    parallel: Annotated[
        int, typer.Option("--parallel", metavar="N", min=1, max=64, help="Connections of each node.")
    ] = PARALLEL,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Reach nothing: print what would run.")] = False,
    as_json: Json = False,
) -> None:
    """Download the checkpoint: pinned, resumable, checked.

    Files are those that the index names and the small ones; each is hashed before it gets its name, and all are counted
    at the end. A kill or Ctrl-C loses nothing: the same command goes on. A complete checkpoint is looked over without
    network. Exit code 1 when the disk is too small, 2 for a wrong fleet.toml, revision or token, 3 when files are
    missing, stay wrong, or a machine failed.
    """
    from deskfleet.fleet.pull import PullOptions

    spec = open_fleet(file, overrides).spec
    options = PullOptions(what="engram" if engram_only else "all", parallel=parallel, verify=verify)
    nodes = list(on or [spec.head.name])
    if dry_run:
        asyncio.run(_show(spec, nodes, options, as_json=as_json))
        return
    for pulled in asyncio.run(_pull(spec, nodes, options)):
        if as_json:
            print_json(pulled.to_dict())
        else:
            print(_sentence(pulled))
        if pulled.left_out:
            say(f"left at the origin, because no index names them: {', '.join(pulled.left_out)}")


async def _pull(spec: FleetSpec, nodes: list[str], options: PullOptions) -> tuple[Pulled, ...]:
    from deskfleet.fleet.pull import pull
    from deskfleet.fleet.remote import Remotes

    with Moving() as moving:
        async with Remotes(spec.nodes) as remotes:
            return await pull(spec, remotes, nodes, options, moving.on_event, os.environ)


async def _show(spec: FleetSpec, nodes: list[str], options: PullOptions, *, as_json: bool) -> None:
    from deskfleet.fleet.pull import shown_programs
    from deskfleet.fleet.remote import Remotes

    async with Remotes(spec.nodes) as remotes:
        for node, shown in shown_programs(spec, remotes, nodes, options).items():
            print_shown({"node": node, **shown}, as_json=as_json)


def _sentence(pulled: Pulled) -> str:
    what = "" if pulled.what == "all" else " (Engram tables and small files)"
    return (
        f"{pulled.node}: {pulled.directory} holds revision {pulled.revision}{what}: {pulled.num_files} files, "
        f"{format_bytes(pulled.total_bytes)}; {pulled.num_fetched} fetched, {pulled.num_kept} were there, "
        f"{pulled.num_hashed} hashed"
    )


__all__ = ["register", "run"]
