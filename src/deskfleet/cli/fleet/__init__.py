"""`deskfleet fleet`: the verbs that act on machines listed in a fleet.toml. One module per verb.

As for `deskfleet` itself, a verb's module is imported when it is used; help needs only the line of each.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deskfleet.cli.terminal import say

if TYPE_CHECKING:  # help reads no file
    from deskfleet.fleet.spec import FleetSource

VERBS = {
    "init": "Write a fleet.toml with comments, from the addresses of nodes.",
    "config": "Show what a fleet.toml means, value by value.",
    "plan": "Say what fits on the fleet, before anything starts.",
    "doctor": "Check every node, one line a check, before anything starts.",
    "pull": "Download the checkpoint: pinned, resumable, checked.",
    "build": "Put the engine's image on every node.",
    "share": "Bring the checkpoint to every node, and prove that it is there.",
    "pack": "Pack each rank's Engram rows on its node.",
    "serve": "Start the fleet, and open its endpoint when answers are right.",
    "status": "Say how the fleet is, rank by rank.",
    "logs": "Show what ranks have logged.",
    "smoke": "Ask the launch gates of the fleet that runs.",
    "stop": "Stop the fleet, and say what could not be reached.",
    "restart": "Stop the fleet, and start it again.",
    "watch": "Follow the fleet's events.",
    "export": "Write the launch for compose, systemd, Kubernetes or sparkrun.",
}
"""Each verb and its line in `deskfleet fleet --help`, the first line of its own help."""

FLEET_FILE = Path("fleet.toml")

FleetFile = Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The fleet's file.")]
Json = Annotated[bool, typer.Option("--json", help="Print results as JSON on stdout, one object a line.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="In place of the file's value, e.g. nodes[1].address=10.0.0.3; may be repeated.",
    ),
]


def register(app: typer.Typer, words: Sequence[str]) -> None:
    """Add the verb, with its own verbs, to `app`. Of those the one that `words` names is loaded."""
    verbs = typer.Typer(rich_markup_mode=None)
    verbs.callback()(fleet)
    after = list(words[list(words).index("fleet") + 1 :])
    wanted = next((word for word in after if not word.startswith("-")), None)
    for verb in present_verbs():
        if verb == wanted:
            importlib.import_module(f"{__name__}.{verb}").register(verbs)
        else:
            verbs.command(verb, help=VERBS[verb])(_not_loaded)
    app.add_typer(verbs, name="fleet")


def present_verbs() -> tuple[str, ...]:
    """Those of `VERBS` that have a module, in their order."""
    return tuple(verb for verb in VERBS if (Path(__file__).parent / f"{verb}.py").is_file())


def fleet() -> None:
    """Run a model across machines, from addresses to one endpoint.

    Nodes need sshd, a POSIX shell, coreutils and docker; nothing is installed on them. Each verb has --help and --json.
    """


def _not_loaded() -> None:
    raise AssertionError("only the verb on the command line is called, and that one is loaded")


def open_fleet(file: Path, overrides: Sequence[str] | None) -> FleetSource:
    """Read a fleet's file, and say what is allowed in it and will be regretted. Raises ConfigError."""
    from deskfleet.fleet.spec import read_source

    source = read_source(file, tuple(overrides or ()))
    for warning in source.spec.warnings:
        say(f"warning: {warning}")
    return source


__all__ = ["FLEET_FILE", "VERBS", "FleetFile", "Json", "Overrides", "open_fleet", "present_verbs", "register"]
