"""`deskfleet fleet init`: writes a first fleet.toml from addresses, from what nodes say, or from a .env."""

from __future__ import annotations

import asyncio
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, get_args

import typer

from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Json
from deskfleet.cli.terminal import own_command, print_json, say
from deskfleet.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("init")(run)


def run(
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node",
            metavar="[USER@]HOST[:PORT]",
            help="A machine as ssh reaches it, or local; the first is the head. Once for each.",
        ),
    ] = None,
    from_env: Annotated[
        Path | None,
        typer.Option(
            "--from-env", metavar="FILE", help="Take what a recipe's .env says of nodes and wishes."
        ),
    ] = None,
    file: FleetFile = FLEET_FILE,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The fleet's name.")] = "desk",
    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME", help="native, vllm, sglang or exl3.")
    ] = "vllm",
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="A published checkpoint, or a directory here.")
    ] = "v4.1-flash",
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe", help="Ask each machine what it is; without it from addresses alone."
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Write a fleet.toml with comments, from the addresses of nodes.

    A file that is there is never changed: exit code 2. A machine that cannot be reached: exit code 3.
    """
    from deskfleet.fleet.initial import Draft, fleet_text, parse_node, with_names, write_fleet
    from deskfleet.planner.wishes import EngineName

    if engine not in get_args(EngineName):
        raise ConfigError(f"--engine is {engine!r}", hint=f"choose one of {', '.join(get_args(EngineName))}")
    if os.path.lexists(file):
        raise ConfigError(
            f"{file} is there already, and was left as it is", hint="give another name with --file"
        )
    draft = Draft(name, tuple(map(parse_node, node or ())), model=model, engine=engine)
    ignored: tuple[tuple[str, str], ...] = ()
    if from_env is not None:
        from deskfleet.fleet.recipe_env import import_env

        imported = import_env(from_env, draft)
        draft, ignored = imported.draft, imported.ignored
    if not draft.nodes:
        raise ConfigError(
            "no machine is named", hint="--node ADDRESS for each, the head first, or --from-env FILE"
        )
    draft = replace(draft, nodes=with_names(draft.nodes))
    if probe:
        from deskfleet.fleet.acquaintance import get_acquainted

        draft = asyncio.run(get_acquainted(draft))
    write_fleet(file, fleet_text(draft))
    for variable, reason in ignored:
        say(f"not taken: {variable}: {reason}")
    count = len(draft.nodes)
    say(f"wrote {file}: {count} node{'s' if count > 1 else ''}")
    say(f"next: {own_command()} fleet config show --effective --file {shlex.quote(str(file))}")
    if as_json:
        print_json(
            {
                "file": str(file),
                "nodes": [each.name for each in draft.nodes],
                "ignored": [{"variable": variable, "reason": reason} for variable, reason in ignored],
            }
        )


__all__ = ["register", "run"]
