"""`deskfleet rank`: one rank of the native engine on this machine, for a supervisor on another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from deskfleet import env
from deskfleet.cli.flags import CheckpointArgument, Json
from deskfleet.engine.guest import DIAL_S, Guest, run_guest
from deskfleet.engine.spec import RankPaths
from deskfleet.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("rank")(run)


def run(
    checkpoint: CheckpointArgument,
    connect: Annotated[
        str, typer.Option("--connect", metavar="HOST:PORT", help="Where the supervisor listens for ranks.")
    ],
    rank: Annotated[int, typer.Option("--rank", metavar="R", min=0, help="Which rank this is.")],
    launch: Annotated[str, typer.Option("--launch", metavar="ID", help="The launch that it belongs to.")],
    engram_pack: Annotated[
        Path | None,
        typer.Option(
            "--engram-pack",
            metavar="DIR",
            help="Pack on this machine to read Engram rows from. [default: the published shards]",
        ),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            "--interface",
            metavar="NAME",
            help="Network interface to meet the other ranks on. [default: the one that leads to rank 0]",
        ),
    ] = None,
    dial_s: Annotated[
        float, typer.Option("--dial", metavar="SECONDS", min=0, help="How long to go on dialling.")
    ] = DIAL_S,
    as_json: Json = False,
) -> None:
    """Be one rank of the engine, for a supervisor elsewhere.

    Dials the supervisor until it answers, then loads and serves for as long as it does. DESKFLEET_RANK_TOKEN holds the
    launch's token. Exit code 0 when the supervisor stops it, otherwise the last line on stderr says why.
    """
    token = env.read_environment(os.environ)[env.RANK_TOKEN.name]
    os.environ.pop(env.RANK_TOKEN.name, None)  # nothing that starts here needs it
    pack = None if engram_pack is None else str(engram_pack)
    run_guest(
        Guest(
            supervisor=_parse_place(connect),
            rank=rank,
            launch_id=launch,
            paths=RankPaths(str(checkpoint), pack),
            interface=interface,
            dial_s=dial_s,
        ),
        token,
        as_json=as_json,
    )


def _parse_place(text: str) -> tuple[str, int]:
    """Return host and port of e.g. `10.0.0.1:7100` or `[fd00::1]:7100`. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"--connect {text!r} is no HOST:PORT", hint="e.g. --connect 10.0.0.1:7100")
    return host, int(port)


__all__ = ["register"]
