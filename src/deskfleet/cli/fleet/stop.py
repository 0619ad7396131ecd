"""`deskfleet fleet stop`: the end of a fleet, and the truth about nodes that cannot be reached."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Json, Overrides, open_fleet
from deskfleet.cli.terminal import print_json, say

if TYPE_CHECKING:
    from deskfleet.fleet.spec import FleetSpec
    from deskfleet.fleet.state import FleetState
    from deskfleet.fleet.status import Stopped

PATIENCE_S = 10.0  # a serve that follows the launch which was just ended still has the lock


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("stop")(run)


def run(file: FleetFile = FLEET_FILE, overrides: Overrides = None, as_json: Json = False) -> int:
    """Stop the fleet, and say what could not be reached.

    The supervisor lets running answers finish, stops the ranks, removes their containers, and starts nothing again;
    what is left of this fleet on any node is removed then, and nothing else. Exit code 0 when nothing of it is left,
    also when there was nothing; 3 when a node cannot be reached: then with what may still run there.
    """
    from deskfleet.fleet.state import FleetState

    spec = open_fleet(file, overrides).spec
    stopped = asyncio.run(_stop(spec, FleetState(spec.name, os.environ)))
    if as_json:
        print_json(
            {
                "fleet": spec.name,
                "supervisor": stopped.supervisor,
                "removed": [{"node": node, "container": each.name} for node, each in stopped.cleared.removed],
                "may_still_run": {
                    name: {"ranks": list(ranks), "reason": stopped.cleared.failures[name].message}
                    for name, ranks in stopped.still.items()
                },
            }
        )
    stopped.check()
    say(f"{spec.name} is stopped")
    return 0


async def _stop(spec: FleetSpec, state: FleetState) -> Stopped:
    from deskfleet.fleet.remote import Remotes
    from deskfleet.fleet.status import bring_down, end_supervisor

    async with Remotes(spec.nodes) as remotes:
        said = await end_supervisor(state, say)  # first: a launch under way has the lock
        with state.acting("deskfleet fleet stop", patience_s=PATIENCE_S):
            stopped = await bring_down(spec, state, remotes, say)
    return replace(stopped, supervisor=said)


__all__ = ["register", "run"]
