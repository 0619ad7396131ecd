"""`deskfleet fleet pack`: each rank's Engram rows, packed on its node's own disk."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deskfleet.cli.flags import Json
from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Overrides, open_fleet
from deskfleet.cli.fleet.moving import Moving, duration, print_shown
from deskfleet.cli.terminal import print_json, say
from deskfleet.errors import ConfigError
from deskfleet.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from deskfleet.fleet.rows import Packed, PackOptions
    from deskfleet.fleet.spec import FleetSpec


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("pack")(run)


def run(
    file: FleetFile = FLEET_FILE,
    overrides: Overrides = None,
    on: Annotated[
        list[str] | None,
        typer.Option("--on", metavar="NODE", help="Only on this node; may be repeated. [default: all]"),
    ] = None,
    all_columns: Annotated[
        bool, typer.Option("--all-columns", help="Every column on every node, whatever its ranks read.")
    ] = False,
    verify: Annotated[
        Literal["quick", "sample", "full"],
        typer.Option(
            "--verify",
            help="The check at the end: random blocks, these beside the checkpoint's rows, or all.",
        ),
    ] = "quick",
    max_rate: Annotated[
        str | None,
        typer.Option(
            "--max-rate", metavar="BYTES", help="Read no more than this a second on each node, e.g. 300MB."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Reach nothing: print what would run.")] = False,
    as_json: Json = False,
) -> None:
    """Pack each rank's Engram rows on its node.

    One file per layer and hash column, whatever the number of ranks: columns that another fleet needs are left alone.
    Space is compared first, what is packed is read back, and what was interrupted goes on. Exit code 1 when a disk is
    too small or a pack is of another checkpoint, 2 for a wrong fleet.toml, 3 when a machine, disk or file failed.
    """
    from deskfleet.fleet.rows import PackOptions

    spec = open_fleet(file, overrides).spec
    max_bytes_per_s = None if max_rate is None else parse_bytes(max_rate)
    if max_bytes_per_s is not None and max_bytes_per_s < 1:
        raise ConfigError(
            f"--max-rate is {max_rate!r}, and nothing would ever be packed", hint="write e.g. 300MB"
        )
    options = PackOptions(has_all=all_columns, level=verify, max_bytes_per_s=max_bytes_per_s)
    nodes = list(on or [node.name for node in spec.nodes])
    if dry_run:
        asyncio.run(_show(spec, nodes, options, as_json=as_json))
        return
    for packed in asyncio.run(_pack(spec, nodes, options)):
        if as_json:
            print_json(packed.to_dict())
        else:
            print(_sentence(packed))
        if packed.encoder != "native":
            say(f"{packed.node}: note: blocks went through numpy, which is ten times slower")


async def _pack(spec: FleetSpec, nodes: list[str], options: PackOptions) -> tuple[Packed, ...]:
    from deskfleet.fleet.remote import Remotes
    from deskfleet.fleet.rows import pack_rows

    with Moving() as moving:
        async with Remotes(spec.nodes) as remotes:
            return await pack_rows(spec, remotes, nodes, options, moving.on_event)


async def _show(spec: FleetSpec, nodes: list[str], options: PackOptions, *, as_json: bool) -> None:
    from deskfleet.fleet.remote import Remotes
    from deskfleet.fleet.rows import shown_programs

    async with Remotes(spec.nodes) as remotes:
        for node, shown in shown_programs(spec, remotes, nodes, options).items():
            print_shown({"node": node, **shown}, as_json=as_json)


def _sentence(packed: Packed) -> str:
    ranks = ", ".join(map(str, packed.ranks))
    whose = f"rank {ranks} of {packed.world_size}" if packed.ranks else "all ranks"
    others = ""
    if packed.other_bytes:
        columns = ", ".join(f"{columns} of layer {layer}" for layer, columns in packed.other_columns.items())
        others = f"; left alone, not read here: columns {columns}, {format_bytes(packed.other_bytes)}"
    return (
        f"{packed.node}: {whose}: {packed.num_columns} columns, {format_bytes(packed.num_bytes)} in {packed.pack_dir}; "
        f"{packed.num_packed} packed, {packed.num_kept} kept, {packed.num_adopted} adopted in "
        f"{duration(packed.elapsed_s)}{others}"
    )


__all__ = ["register", "run"]
