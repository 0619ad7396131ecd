"""`deskfleet fleet smoke`: the launch gates, of the endpoint of a fleet that is up."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import typer

from deskfleet.cli.flags import ENGINE
from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Json, Overrides, open_fleet
from deskfleet.cli.smoke import (
    CHUNK_TOKENS,
    CONCURRENCY,
    PATIENCE_S,
    Asking,
    Chunk,
    Concurrency,
    Evidence,
    Html,
    JUnit,
    KeyFile,
    Only,
    Patience,
    Questions,
    Repeat,
    Seed,
    Skip,
    ask_gates,
    given_flags,
)
from deskfleet.errors import DeskfleetError
from deskfleet.gates.contract import Limits

if TYPE_CHECKING:
    from deskfleet.fleet.spec import FleetSpec


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("smoke")(run)


def run(
    file: FleetFile = FLEET_FILE,
    only: Only = None,
    skip: Skip = None,
    questions: Questions = None,
    concurrency: Concurrency = CONCURRENCY,
    patience: Patience = PATIENCE_S,
    chunk: Chunk = CHUNK_TOKENS,
    seed: Seed = None,
    repeat: Repeat = 1,
    evidence: Evidence = None,
    junit: JUnit = None,
    html: Html = None,
    key_file: KeyFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> int:
    """Ask the launch gates of the fleet that runs.

    Through the endpoint that clients use, as deskfleet smoke does. Exit code 1 when a gate fails, 3 when the fleet does
    not serve or nothing could be shown.
    """
    from deskfleet.gates.registry import LAUNCH_GATES

    url, model = asyncio.run(_endpoint(open_fleet(file, overrides).spec))
    limits = Limits(
        expected_model=model, concurrency=concurrency, patience_s=patience, chunk_tokens=chunk, seed=seed
    )
    asking = Asking(
        verb="smoke",
        target=url,
        only=only or (),
        skip=skip or (),
        family=questions,
        rounds=repeat,
        key_file=key_file,
        engine=ENGINE,
        evidence=evidence,
        junit=junit,
        html=html,
        as_json=as_json,
        flags=given_flags(
            questions=questions, model=model, tp=None, speculate=ENGINE.speculation, concurrency=concurrency
        ),
    )
    return ask_gates(LAUNCH_GATES, limits, asking)


async def _endpoint(spec: FleetSpec) -> tuple[str, str | None]:
    """Where the fleet answers, and the model's name. Raises DeskfleetError when it does not serve."""
    from deskfleet.fleet.state import FleetState
    from deskfleet.fleet.status import reachable

    state = FleetState(spec.name, os.environ)
    record = state.record()
    if state.supervisor() is None or record is None or record.url is None:
        raise DeskfleetError(f"{spec.name} does not serve", hint="deskfleet fleet status says how it is")
    return reachable(record.url), record.model_id


__all__ = ["register", "run"]
