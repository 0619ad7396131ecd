"""`deskfleet fleet export`: the launch of a fleet as files of other launchers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Json, Overrides, open_fleet
from deskfleet.cli.terminal import print_json, say
from deskfleet.errors import ConfigError, DeskfleetError, DoesNotFit

if TYPE_CHECKING:
    from deskfleet.fleet.export import Exported
    from deskfleet.fleet.launch import LaunchSpec
    from deskfleet.fleet.spec import FleetSource

Format = Literal["compose", "systemd", "k8s", "sparkrun"]

LAUNCH_ID = "exported"
"""What containers carry in place of a launch's id: who starts them so has no launch."""


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("export")(run)


def run(
    name: Annotated[Format, typer.Argument(metavar="FORMAT", help="compose, systemd, k8s or sparkrun.")],
    file: FleetFile = FLEET_FILE,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Write files below this directory. [default: print]"
        ),
    ] = None,
    launch: Annotated[
        Path | None,
        typer.Option("--launch", metavar="FILE", help="Of this launch, as JSON; no node is then asked."),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Write the launch for compose, systemd, Kubernetes or sparkrun.

    Nodes are asked for their network, and nothing is changed on them. Values of secrets are in no file. A file that is
    there is left as it is: exit code 2. The plan does not fit: 1. A node cannot be reached: 3.
    """
    from deskfleet.fleet.export import export
    from deskfleet.fleet.launch import launch_from_json

    source = open_fleet(file, overrides)
    if launch is None:
        made = _made(source)
    else:
        try:
            made = launch_from_json(launch.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read {launch}: {error.strerror or error}") from error
    for warning in made.warnings:
        say(f"warning: {warning}")
    files = export(name, made, source.spec)
    if output is not None:
        _write(output, files)
    if as_json:
        print_json({"format": name, "files": {each.path: each.text for each in files}})
    elif output is None:
        for each in files:
            if len(files) > 1:
                print(f"# ==> {each.path} <==")
            print(each.text, end="")


def _made(source: FleetSource) -> LaunchSpec:
    """The launch as it would be started now, from what nodes say of their network."""
    from deskfleet.fleet.fabric import resolve_fabric
    from deskfleet.fleet.planning import plan_fleet
    from deskfleet.fleet.probe import probe
    from deskfleet.fleet.remote import Remotes
    from deskfleet.fleet.render import render_launch

    spec = source.spec
    if spec.engine.name == "native":
        raise ConfigError(
            "ranks of the native engine are started by deskfleet's supervisor and answer to it",
            hint="start them with deskfleet fleet serve; vllm, sglang and exl3 can be exported",
        )

    best = plan_fleet(source).best
    if not best.fits:
        raise DoesNotFit(f"{spec.path}: the plan does not fit", hint="deskfleet fleet plan says what would")

    async def ask() -> LaunchSpec:
        async with Remotes(spec.nodes) as remotes:
            found = await remotes.gather(lambda remote: probe(remote, image=spec.engine.image))
        facts = found.all()
        fabric = resolve_fabric(spec.nodes, facts, hca=spec.engine.env.get("NCCL_IB_HCA", ""))
        return render_launch(best, spec, fabric.nodes, facts, launch_id=LAUNCH_ID)

    return asyncio.run(ask())


def _write(directory: Path, files: tuple[Exported, ...]) -> None:
    """Write all files or, when one is there already, none. Raises ConfigError, DeskfleetError."""
    there = [each.path for each in files if os.path.lexists(directory / each.path)]
    if there:
        raise ConfigError(
            f"{directory / there[0]} is there already, and nothing was written", hint="give another directory"
        )
    try:
        for each in files:
            path = directory / each.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as opened:
                opened.write(each.text)
            say(f"wrote {path}")
    except OSError as error:
        raise DeskfleetError(f"cannot write {error.filename}: {error.strerror or error}") from error


__all__ = ["register", "run"]
