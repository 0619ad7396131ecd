"""`deskfleet fleet build`: the engine's image on every node, pulled, copied or built, and the same everywhere."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Json, Overrides, open_fleet
from deskfleet.cli.fleet.moving import Moving
from deskfleet.cli.terminal import print_json

if TYPE_CHECKING:
    from deskfleet.fleet.build import Build, OnNode
    from deskfleet.fleet.spec import FleetSpec


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("build")(run)


def run(
    file: FleetFile = FLEET_FILE,
    overrides: Overrides = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="IMAGE",
            help="With build = true: the engine's own image, by digest. [default: that of the last build]",
        ),
    ] = None,
    wheels: Annotated[
        Path | None,
        typer.Option(
            "--wheels",
            metavar="DIR",
            help="With build = true: a directory with the wheels of the adapter and of deskfleet-engram.",
        ),
    ] = None,
    from_head: Annotated[
        bool,
        typer.Option("--from-head", help="Copy from the head also what nodes could pull from a registry."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Reach nothing: print what would run.")] = False,
    as_json: Json = False,
) -> None:
    """Put the engine's image on every node.

    What is there and the same is left alone; images are compared by their layers. An image by digest is pulled, one by
    id or tag is copied from the head; with build = true it is made on the head first, from --base and --wheels, and how
    is recorded in the fleet's state directory. Interrupted, nothing stays half loaded. Exit code 1 when a disk is too
    small or images still differ, 2 for a wrong fleet.toml, 3 when docker or a machine failed.
    """
    from deskfleet.fleet.build import Build, check_buildable, read_wheels

    spec = open_fleet(file, overrides).spec
    check_buildable(spec)
    asked = Build(base, () if wheels is None else read_wheels(wheels), from_head)
    if dry_run:
        asyncio.run(_show(spec, asked, as_json=as_json))
        return
    for each in asyncio.run(_build(spec, asked)):
        if as_json:
            print_json(each.to_dict())
        else:
            print(_sentence(each))


async def _build(spec: FleetSpec, asked: Build) -> tuple[OnNode, ...]:
    from deskfleet.fleet.build import build
    from deskfleet.fleet.remote import Remotes
    from deskfleet.fleet.state import FleetState

    began_s = time.monotonic()
    with Moving() as moving:

        def on_progress(node: str, doing: str, done_bytes: int, total_bytes: int) -> None:
            if not done_bytes:
                moving.note(node, doing)
                return
            rate = done_bytes / max(time.monotonic() - began_s, 1e-3)
            left_s = (total_bytes - done_bytes) / rate if total_bytes > done_bytes else None
            moving.show(node, doing, done_bytes, max(total_bytes, done_bytes), rate, left_s)

        async with Remotes(spec.nodes) as remotes:
            return await build(spec, remotes, asked, FleetState(spec.name, os.environ), on_progress)


async def _show(spec: FleetSpec, asked: Build, *, as_json: bool) -> None:
    from deskfleet.fleet.build import shown_commands
    from deskfleet.fleet.remote import Remotes

    async with Remotes(spec.nodes) as remotes:
        for node, shown in shown_commands(spec, remotes, asked).items():
            if as_json:
                print_json({"node": node, **shown})
                continue
            arguments = shlex.join(shown["arguments"])
            print(f"# {node}: first\nbash -s -- {arguments} <<'EOF'\n{shown['ask']}EOF")
            for name in ("pull", "build"):
                if name in shown:
                    print(f"# {node}: when it has to {name}\nbash -s -- ... <<'EOF'\n{shown[name]}EOF")
            if "copy" in shown:
                writes, reads = shown["copy"]
                print(f"# {node}: when it is missing or another\n{shlex.join(writes)} | {shlex.join(reads)}")


def _sentence(each: OnNode) -> str:
    adapter = "" if each.adapter is None else f", adapter {each.adapter}"
    named = each.digests[0] if each.digests else each.id
    return f"{each.node}: {each.doing}: {named}, {each.num_layers} layers{adapter}"


__all__ = ["register", "run"]
