"""`deskfleet selfcheck`: each check as it is decided, the table, and the verdict as exit code."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from deskfleet.cli.flags import CheckpointArgument, Json
from deskfleet.cli.terminal import data_console, print_json, say

if TYPE_CHECKING:  # the engine is imported when it is started: --help needs it not
    from deskfleet.selfcheck import Check, EngineRun, SelfCheck

_FAILED = 1  # as of deskfleet.errors: the verdict is no


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("selfcheck")(run)


def run(
    checkpoint: CheckpointArgument,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and shorter prompts: about a minute for a tiny checkpoint.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check that answers do not depend on how they are made.

    In one pass or in steps, alone or beside others, over several ranks, with drafts, from the prefix cache, pushed
    out and resumed. Exit code 1 when a check fails; one that this machine or checkpoint cannot run is skipped.
    """
    from deskfleet.selfcheck import self_check

    report = asyncio.run(self_check(checkpoint, quick=quick, on_run=_say_run, on_check=_say_check))
    if as_json:
        print_json(report.to_dict())
    else:
        _print(report)
    if report.verdict == "fail":
        raise typer.Exit(_FAILED)


def _say_run(run: EngineRun) -> None:
    started = run.number - 1  # at about the same pace, so many more like these are still to come
    left = f", about {run.elapsed_s / started * (run.total - started):.0f} s left" if started > 1 else ""
    say(f"engine {run.number} of {run.total}{left}: {'; '.join(run.names)}")


def _say_check(check: Check) -> None:
    say(f"  {check.verdict}: {check.name}: {check.detail}")


def _print(report: SelfCheck) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console = data_console()
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("check", "verdict", "worst", "limit"):
        table.add_column(name, justify="right" if name in ("worst", "limit") else "left", no_wrap=True)
    for check in report.checks:
        worst = "" if check.worst is None else f"{check.worst:.3g}"
        table.add_row(check.name, check.verdict, worst, f"{check.limit:.3g}")
    console.print(table)
    for check in report.checks:
        if check.verdict != "pass":
            console.print(f"{check.verdict}: {check.name}: {check.detail}", soft_wrap=True)
    counts = [
        sum(check.verdict == verdict for check in report.checks) for verdict in ("pass", "fail", "skip")
    ]
    console.print("verdict: {} ({} passed, {} failed, {} skipped)".format(report.verdict, *counts))


__all__ = ["register", "run"]
