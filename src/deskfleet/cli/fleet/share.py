"""`deskfleet fleet share`: the checkpoint on every node, and the proof of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from deskfleet.cli.flags import Json
from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Overrides, open_fleet
from deskfleet.cli.fleet.moving import Moving, print_shown
from deskfleet.cli.terminal import print_json, printable, say
from deskfleet.errors import ConfigError
from deskfleet.units import format_bytes

if TYPE_CHECKING:
    from deskfleet.fleet.share import NodeProof
    from deskfleet.fleet.spec import FleetSpec

_VERDICT_NO = 1
_MAX_SHOWN = 5


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("share")(run)


def run(
    file: FleetFile = FLEET_FILE,
    overrides: Overrides = None,
    only_prove: Annotated[
        bool, typer.Option("--only-prove", help="Change nothing: only see whether every node has it.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Copies: hash again what workers have, also what has not changed."),
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="NFS: unmount it, and take the export back. Files stay.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Reach nothing: print what would run.")] = False,
    as_json: Json = False,
) -> None:
    """Bring the checkpoint to every node, and prove that it is there.

    As `share` in fleet.toml says: the head exports it by NFS (root on each node, or sudo without a password), each node
    fetches a copy from the head over the fast network (resumable, every byte hashed), or it is there already. Then each
    node reads the beginning and the end of every file, which must be the head's. Exit code 1 when a node lacks
    something, 3 when the head has no complete checkpoint or a machine failed.
    """
    spec = open_fleet(file, overrides).spec
    if undo and (spec.share != "nfs" or only_prove):
        raise ConfigError(
            '--undo is for share = "nfs" and goes with nothing else', hint="copies are yours to remove"
        )
    if dry_run:
        asyncio.run(_show(spec, only_prove=only_prove, undo=undo, as_json=as_json))
        return
    if undo:
        asyncio.run(_undo(spec))
        return
    proofs = asyncio.run(_share(spec, only_prove=only_prove, verify=verify))
    for proof in proofs:
        _print(proof, as_json=as_json)
    if not all(proof.is_good for proof in proofs):
        if spec.share == "local":
            say(
                'hint: share is "local", so nothing was brought anywhere: "nfs" or "copy" in fleet.toml do that'
            )
        raise typer.Exit(_VERDICT_NO)


async def _share(spec: FleetSpec, *, only_prove: bool, verify: bool) -> tuple[NodeProof, ...]:
    from deskfleet.fleet.remote import Remotes
    from deskfleet.fleet.share import prove, share

    with Moving() as moving:
        async with Remotes(spec.nodes) as remotes:
            if only_prove:
                return await prove(spec, remotes)
            return await share(spec, remotes, moving.on_event, verify=verify)


async def _undo(spec: FleetSpec) -> None:
    from deskfleet.fleet.remote import Remotes
    from deskfleet.fleet.share import undo

    async with Remotes(spec.nodes) as remotes:
        await undo(spec, remotes)
    say(f"the workers of {spec.name} have unmounted the checkpoint, and {spec.head.name} exports it no more")


async def _show(spec: FleetSpec, *, only_prove: bool, undo: bool, as_json: bool) -> None:
    from deskfleet.fleet.remote import Remotes
    from deskfleet.fleet.share import shown_share

    async with Remotes(spec.nodes) as remotes:
        for shown in shown_share(spec, remotes, only_prove=only_prove, is_undo=undo):
            print_shown(shown, as_json=as_json)


def _print(proof: NodeProof, *, as_json: bool) -> None:
    if as_json:
        print_json(proof.to_dict())
    else:
        good = [seen for seen in proof.files if seen.problem is None]
        total = sum(seen.size_bytes or 0 for seen in good)
        place = "" if proof.place is None else f" on {proof.place.filesystem}"
        verdict = "has all" if proof.is_good else "LACKS something"
        print(
            f"{proof.node}: {verdict}: {len(good)} of {len(proof.files)} files, {format_bytes(total)}, "
            f"in {proof.directory}{place}"
        )
    bad = [f"{seen.file}: {seen.problem}" for seen in proof.files if seen.problem is not None]
    for line in [*proof.problems, *bad[:_MAX_SHOWN]]:
        say(printable(f"{proof.node}: {line}"))
    if len(bad) > _MAX_SHOWN:
        say(f"{proof.node}: and {len(bad) - _MAX_SHOWN} more files")
    for line in proof.warnings:
        say(printable(f"{proof.node}: warning: {line}"))


__all__ = ["register", "run"]
