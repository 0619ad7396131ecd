"""`deskfleet fleet restart`: stop, then serve, with the file as it is now."""

from __future__ import annotations

import typer

from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Json, Overrides, open_fleet
from deskfleet.cli.fleet.serve import Gate, Gates, Skip, bring_up, choose


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("restart")(run)


def run(
    file: FleetFile = FLEET_FILE,
    gate: Gate = None,
    skip: Skip = None,
    gates: Gates = True,
    overrides: Overrides = None,
    as_json: Json = False,
) -> int:
    """Stop the fleet, and start it again.

    As stop and then serve do it, with their exit codes; the file is read before anything is stopped.
    """
    source = open_fleet(file, overrides)
    choice = choose(gate, skip, gates=gates)
    return bring_up(source, overrides or (), choice, as_json=as_json, what="restart", is_fresh=True)


__all__ = ["register", "run"]
