"""`deskfleet fleet config show`: what a fleet.toml means, value by value, with where each comes from."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Json, Overrides, open_fleet
from deskfleet.cli.terminal import print_json, printable
from deskfleet.tomlfile import quoted


def register(app: typer.Typer) -> None:
    """Add the verb, with its own verb, to `app`."""
    verbs = typer.Typer(rich_markup_mode=None)
    verbs.callback()(config)
    verbs.command("show")(show)
    app.add_typer(verbs, name="config")


def config() -> None:
    """Show what a fleet.toml means, value by value.

    The file is read strictly: an unknown key is an error.
    """


def show(
    file: FleetFile = FLEET_FILE,
    effective: Annotated[
        bool,
        typer.Option("--effective", help="Also what the file does not say: defaults, what is left open."),
    ] = False,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show every value that a fleet.toml gives, with its place.

    Of secrets it is shown where they come from and whether they can be read, never what they are.
    """
    from deskfleet.fleet.effective import effective as values_of

    source = open_fleet(file, overrides)
    values = values_of(source, os.environ)
    if not effective:
        values = tuple(value for value in values if value.is_given)
    if as_json:
        print_json(
            {
                "fleet": source.spec.name,
                "file": str(source.spec.path),
                "values": [
                    {"key": value.key, "value": value.value, "origin": value.origin} for value in values
                ],
                "warnings": list(source.spec.warnings),
            }
        )
        return
    for value in values:
        print(f"{value.key} = {printable(_shown(value.value))}  # {value.origin}")


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, str):
        return value if value.startswith("(") else quoted(value)
    return "(none)" if value is None else str(value).lower()


__all__ = ["register"]
