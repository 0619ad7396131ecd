"""`deskfleet fleet status`: the verdict, the supervisor, each rank and the endpoint."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import typer

from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Json, Overrides, open_fleet
from deskfleet.cli.terminal import print_json, printable

if TYPE_CHECKING:
    from deskfleet.fleet.spec import FleetSpec
    from deskfleet.fleet.status import FleetStatus


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("status")(run)


def run(file: FleetFile = FLEET_FILE, overrides: Overrides = None, as_json: Json = False) -> int:
    """Say how the fleet is, rank by rank.

    Asks the supervisor's lock, docker on every node, and the endpoint. Exit code 0 when it is up; 1 when it is down,
    starting, stopping, waiting to be started again, or lets nobody in for want of memory; 3 when it is half-alive, or a
    node cannot be reached.
    """
    found = asyncio.run(_see(open_fleet(file, overrides).spec))
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)
    return found.exit_code


async def _see(spec: FleetSpec) -> FleetStatus:
    from deskfleet.fleet.remote import Remotes
    from deskfleet.fleet.state import FleetState
    from deskfleet.fleet.status import see_status

    async with Remotes(spec.nodes) as remotes:
        return await see_status(spec, FleetState(spec.name, os.environ), remotes)


def _print(found: FleetStatus) -> None:
    record = found.record
    print(f"{found.fleet}: {found.verdict}")
    for reason in found.reasons:
        print(f"  {printable(reason)}")
    if record is not None:
        print(
            f"launch {record.launch_id}: {record.phase} since {record.changed_at}, from {record.fleet_file}"
        )
        if record.restart:
            print(f"restart {record.restart} of this supervisor, after: {printable(record.after or '')}")
    print("supervisor: " + ("none" if found.supervisor is None else f"process {found.supervisor}"))
    for rank in found.ranks:
        print(f"rank {rank.rank} on {rank.node}: {rank.container} {rank.state}, launch {rank.launch_id}")
    if found.memory is not None and found.verdict != "closed":  # else that is the reason
        print(f"memory: {found.memory['at']}: {printable(found.memory['text'])}")
    if record is not None and record.url is not None and found.endpoint is not None:
        print(f"endpoint: {record.url}/v1, {record.model_id}: {printable(found.endpoint)}")


__all__ = ["register", "run"]
