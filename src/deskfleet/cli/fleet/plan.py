"""`deskfleet fleet plan`: the planner's plan for the machines, the checkpoint and the wishes of a fleet.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Json, Overrides, open_fleet
from deskfleet.cli.terminal import print_json, say
from deskfleet.errors import DoesNotFit


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("plan")(run)


def run(
    file: FleetFile = FLEET_FILE,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also every line, every choice and the losing layouts.")
    ] = False,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            "--calibration", metavar="FILE", help="Corrections from boots, as plan --calibrate wrote them."
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Say what fits on the fleet, before anything starts.

    No node is asked. Exit code 0 when it fits, 1 when it does not: then with the reason and the nearest changes that
    would.
    """
    from deskfleet.fleet.planning import asked_of, plan_fleet
    from deskfleet.fleet.up import with_all_nodes
    from deskfleet.planner.calibration import read_calibration

    source = with_all_nodes(open_fleet(file, overrides))
    found = plan_fleet(source, tuple(map(read_calibration, calibration or ())))
    if as_json:
        from deskfleet.planner.planfile import search_to_dict

        print_json(search_to_dict(found, asked_of(source.spec)))
    else:
        from deskfleet.cli.plan_screen import print_plan

        print_plan(found, explain=explain)
        if found.changes:
            # The screen is that of `deskfleet plan`, with its flags.
            say(
                "here flags are keys of [wishes]: e.g. --context N is --set wishes.max_model_len=N, or in the file"
            )
    if not found.best.fits:
        raise typer.Exit(DoesNotFit.exit_code)


__all__ = ["register", "run"]
