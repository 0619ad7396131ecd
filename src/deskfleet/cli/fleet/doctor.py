"""`deskfleet fleet doctor`: one line a check and node, the worst first, each with what to do about it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Json, Overrides, open_fleet
from deskfleet.cli.terminal import data_console, print_json, printable, say
from deskfleet.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from deskfleet.fleet.checks import Finding
    from deskfleet.fleet.doctor import Examination
    from deskfleet.fleet.spec import FleetSource, FleetSpec
    from deskfleet.planner.plan import MemoryPlan

_WORST_FIRST = ("fail", "warn", "skip", "pass")
_STYLES = {"fail": "bold red", "warn": "yellow", "skip": "dim", "pass": "green"}


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("doctor")(run)


def run(
    file: FleetFile = FLEET_FILE,
    traffic: Annotated[
        bool,
        typer.Option(
            "--traffic/--no-traffic",
            help="Try the links: packets, and a second of traffic from node to node.",
        ),
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run on each node, and run nothing.")
    ] = False,
    overrides: Overrides = None,
    as_json: Json = False,
) -> int:
    """Check every node, one line a check, before anything starts.

    Only asks: nothing is changed on any node. Exit code 0 when no check fails, 1 when one does, 3 when a node cannot be
    reached; the others are checked all the same.
    """
    source = open_fleet(file, overrides)
    if dry_run:
        _print_commands(source.spec, as_json=as_json)
        return 0
    plan = _plan(source)
    if not as_json:
        nodes = ", ".join(node.name for node in source.spec.nodes)
        say(f"{source.spec.name}: asking {nodes}")
    found = asyncio.run(_ask(source.spec, plan, with_traffic=traffic))
    if as_json:
        print_json(to_dict(found))
    else:
        _print(found)
    return found.exit_code


async def _ask(spec: FleetSpec, plan: MemoryPlan | None, *, with_traffic: bool) -> Examination:
    from deskfleet.fleet.doctor import see_doctor
    from deskfleet.fleet.remote import Remotes

    async with Remotes(spec.nodes) as remotes:
        return await see_doctor(spec, remotes, plan, with_traffic=with_traffic)


def _plan(source: FleetSource) -> MemoryPlan | None:
    """The plan that nodes are measured by; without one that fits there is nothing to measure by, and that is said."""
    from deskfleet.fleet.up import plan_launch

    try:
        best = plan_launch(source)
    except (CheckpointError, ConfigError) as error:  # before pull there is no checkpoint to plan
        say(f"memory and disk are not compared with a plan: {error.message}")
        return None
    if not best.fits:
        say("memory and disk are not compared with a plan: none fits; see deskfleet fleet plan")
        return None
    return best


def to_dict(found: Examination) -> dict[str, Any]:
    """Return what --json prints."""
    return {
        "exit_code": found.exit_code,
        "counts": {verdict: found.counts[verdict] for verdict in _WORST_FIRST},
        "unreachable": {name: error.message for name, error in found.unreachable.items()},
        "topology": found.fabric.topology,
        "fabric": {
            name: {
                "NCCL_IB_HCA": node.hca,
                "NCCL_IB_GID_INDEX": node.gid_index,
                "NCCL_SOCKET_IFNAME": node.socket_interface,
                "address": node.rendezvous,
                "reasons": node.reasons,
            }
            for name, node in found.fabric.nodes.items()
        },
        "findings": [dataclasses.asdict(finding) for finding in worst_first(found.findings)],
    }


def worst_first(findings: tuple[Finding, ...]) -> list[Finding]:
    """Return the findings, failures first, else in the order in which they were asked."""
    return sorted(findings, key=lambda finding: _WORST_FIRST.index(finding.verdict))


def _print(found: Examination) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    console = data_console()
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("verdict", no_wrap=True)
    table.add_column("node", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("measured", overflow="fold")
    for finding in worst_first(found.findings):
        measured = Text(printable(finding.measured))
        if finding.hint is not None:
            measured.append(f"\nhint: {printable(finding.hint)}", style="dim")
        verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
        table.add_row(verdict, finding.node, finding.check, measured)
    console.print(table)
    counts = found.counts
    lost = f", {len(found.unreachable)} of the nodes not reached" if found.unreachable else ""
    console.print(
        f"{counts['fail']} failed, {counts['warn']} to look at, {counts['pass']} passed, "
        f"{counts['skip']} skipped{lost}",
        soft_wrap=True,
    )


def _print_commands(spec: FleetSpec, *, as_json: bool) -> None:
    from deskfleet.fleet.probe import read_script
    from deskfleet.fleet.remote import Remote

    scripts = {name: read_script(name) for name in ("probe.sh", "ping.sh", "bandwidth.sh")}
    commands = {node.name: Remote(node).command() for node in spec.nodes}
    if as_json:
        print_json({"commands": commands, "scripts": scripts})
        return
    for name, argv in commands.items():
        print(f"# {name}: bash on stdin, reached by")
        print(f"#   {' '.join(argv)}")
    for name, text in scripts.items():
        print(f"\n# {name}, on each node\n{text}", end="")


__all__ = ["register", "run", "to_dict", "worst_first"]
