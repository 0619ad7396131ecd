"""`deskfleet plan`: what fits, why, and what to do about it, on one screen.

A plan takes a second, so what only some ways of calling it need is imported there: rich, the reader of fleet files, the
maker of tiny checkpoints. The flag --json is its own, because `flags` brings the engine's client.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from deskfleet.cli.terminal import print_json, say
from deskfleet.errors import ConfigError, DoesNotFit
from deskfleet.model.embedded import POCKET, locate
from deskfleet.planner.calibration import BootFacts, calibrate, compare, read_calibration, read_facts
from deskfleet.planner.cluster import Cluster, parse_nodes
from deskfleet.planner.headers import inventory_of
from deskfleet.planner.picture import render_svg
from deskfleet.planner.planfile import Asked, calibration_to_dict, find, search_from_dict, search_to_dict
from deskfleet.planner.profiles import PROFILES, ProfileName, profile_toml
from deskfleet.planner.published import PUBLISHED, published_inventory
from deskfleet.planner.v41 import v41_inventory
from deskfleet.planner.wishes import EngineName, EngramPlacement, KvFormat, Wishes
from deskfleet.units import parse_bytes

if TYPE_CHECKING:
    from deskfleet.model.config import ModelConfig
    from deskfleet.planner.budget import BudgetLine
    from deskfleet.planner.inventory import Inventory
    from deskfleet.planner.plan import MemoryPlan

DEFAULT_MODEL = "v4.1-flash"
DEFAULT_NODES = "4xspark"
TINY = "tiny"
"""The checkpoint that `make-tiny` makes."""

LOCAL = "local"


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("plan")(run)


def run(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help=f"Directory of a checkpoint, or {POCKET}; only headers are read.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help=f"A published checkpoint: {', '.join([*PUBLISHED, TINY])}."
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            metavar="NxKIND",
            help=f"Machines: e.g. 3xspark, 4xh200, {LOCAL}. [default: {DEFAULT_NODES}]",
        ),
    ] = None,
    fleet: Annotated[
        Path | None, typer.Option("--fleet", metavar="FILE", help="Machines from a TOML file with [[nodes]].")
    ] = None,
    available: Annotated[
        str | None,
        typer.Option(
            "--available", metavar="SIZE", help="What is free on each node before the start, e.g. 102GiB."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", metavar="NAME", help=f"One of {', '.join(get_args(EngineName))}. [default: all]"
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", metavar="TOKENS", help="Longest prompt plus answer. [default: the longest that fits]"
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option("--max-num-seqs", metavar="N", help="Requests that run at once. [default: 4]"),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option("--kv-tokens", metavar="TOKENS", help="Size of the KV pool. [default: --context]"),
    ] = None,
    drafts: Annotated[
        int | None,
        typer.Option(
            "--drafts", metavar="K", help="Draft tokens; 0 is no speculation. [default: the model's]"
        ),
    ] = None,
    no_images: Annotated[bool, typer.Option("--no-images", help="Serve text only.")] = False,
    engram: Annotated[
        str | None,
        typer.Option(
            "--engram",
            metavar="PLACE",
            help=f"Where Engram tables lie: {', '.join(get_args(EngramPlacement))}.",
        ),
    ] = None,
    kv_format: Annotated[
        str | None,
        typer.Option("--kv-format", metavar="NAME", help=f"One of {', '.join(get_args(KvFormat))}."),
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="Ranks. [default: every number that there is]")
    ] = None,
    ep: Annotated[
        int | None, typer.Option("--ep", metavar="N", help="Ranks that share out whole experts.")
    ] = None,
    dcp: Annotated[
        int | None, typer.Option("--dcp", metavar="N", help="Ranks that share out the compressed KV.")
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            "--chunk", metavar="TOKENS", help="Prompt tokens of a step. [default: the most that fit]"
        ),
    ] = None,
    fraction: Annotated[
        float | None,
        typer.Option(
            "--fraction", metavar="F", help="SGLang's mem-fraction-static, vLLM's gpu-memory-utilization."
        ),
    ] = None,
    bounded_indexer: Annotated[
        bool,
        typer.Option("--bounded-indexer", help="The engine is patched to choose keys in bounded pieces."),
    ] = False,
    margin: Annotated[
        str | None,
        typer.Option("--margin", metavar="SIZE", help="Leave this free on every node beyond the floors."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="NAME", help=f"Sharpen the wishes: {', '.join(PROFILES)}."),
    ] = None,
    why_not: Annotated[
        int | None, typer.Option("--why-not", metavar="CONTEXT", help="Show the arithmetic for this context.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also every line, every choice and the losing layouts.")
    ] = False,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            "--calibration", metavar="FILE", help="Corrections from boots, as --calibrate wrote them."
        ),
    ] = None,
    facts: Annotated[
        list[Path] | None,
        typer.Option(
            "--calibrate", metavar="FACTS", help="Compare the plan with what a boot measured, line by line."
        ),
    ] = None,
    write_calibration: Annotated[
        Path | None,
        typer.Option("--write-calibration", metavar="FILE", help="Keep the corrections of --calibrate."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Make a plan again from what --json printed."),
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the plan.")] = None,
    write_profile: Annotated[
        Path | None,
        typer.Option("--write-profile", metavar="FILE", help="Write the layout as the TOML of a profile."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan and all it rests on as one line of JSON.")
    ] = False,
) -> None:
    """Say what fits on which machines, before anything starts.

    Exit code 0 when it fits, 1 when it does not: then with the reason and the nearest changes that would.
    """
    if write_calibration is not None and not facts:
        raise ConfigError("--write-calibration without --calibrate", hint="give the facts of a boot as well")
    if why_not is not None and context is not None:
        raise ConfigError(f"both --why-not {why_not} and --context {context}", hint="give one of them")
    if profile is not None and max_num_seqs is not None:
        raise ConfigError(f"profile {profile} says how many requests run", hint="leave --max-num-seqs out")
    wishes = Wishes(
        engine=cast(EngineName | None, engine),
        max_model_len=why_not if why_not is not None else context,
        kv_tokens=kv_tokens,
        num_drafts=drafts,
        has_images=not no_images,
        margin_bytes=parse_bytes(margin) if margin else 0,
        tp_size=tp,
        ep_size=ep,
        dcp_size=dcp,
        engram=cast(EngramPlacement | None, engram),
        kv_format=cast(KvFormat | None, kv_format),
        chunk_tokens=chunk,
        fraction=fraction,
        has_bounded_indexer=bounded_indexer or None,
        **({} if max_num_seqs is None else {"max_num_seqs": max_num_seqs}),
    )
    asked = Asked(wishes, _profile(profile))
    if replay is not None:
        if asked != Asked(Wishes()) or any([checkpoint, model, nodes, fleet, available, calibration]):
            raise ConfigError(
                f"--from {replay} says what is planned, and flags do too", hint="leave them out"
            )
        found, asked = search_from_dict(_read_json(replay))
    else:
        calibrations = tuple(map(read_calibration, calibration or ()))
        found = find(_inventory(checkpoint, model), _cluster(nodes, fleet, available), asked, calibrations)
    plan = found.best
    for unused in plan.unused_calibrations:
        say(
            f"not applied: corrections of {unused.engine} {unused.engine_version} on {unused.node_kind}; planned is "
            f"{plan.layout.engine} on {plan.cluster.kind.name}"
        )
    if svg is not None:
        _write(svg, render_svg(plan))
    if write_profile is not None and plan.fits:
        _write(write_profile, profile_toml(asked.profile or "profile", plan))
    if facts:
        _calibrate(plan, facts, write_calibration, as_json=as_json)
        return
    if as_json:
        print_json(search_to_dict(found, asked))
    else:
        from deskfleet.cli.plan_screen import print_plan

        print_plan(found, explain=explain, is_why_not=why_not is not None)
    if not plan.fits:
        if write_profile is not None:
            say(f"{write_profile} is not written: a profile is of a plan that fits")
        raise typer.Exit(DoesNotFit.exit_code)


def _profile(name: str | None) -> ProfileName | None:
    if name is None or name in PROFILES:
        return name
    raise ConfigError(f"there is no profile {name!r}", hint=f"choose one of {', '.join(PROFILES)}")


def _inventory(checkpoint: Path | None, model: str | None) -> Inventory:
    if checkpoint is not None and model is not None:
        raise ConfigError(f"both a checkpoint, {checkpoint}, and --model {model}", hint="give one of them")
    if checkpoint is not None:
        return inventory_of(locate(checkpoint))
    if model == TINY:
        return v41_inventory(_tiny(), name=TINY, origin="the embedded checkpoint's configuration")
    return published_inventory(model or DEFAULT_MODEL)


def _tiny() -> ModelConfig:
    from deskfleet.testing.tiny import tiny_config

    return tiny_config()


def _cluster(nodes: str | None, fleet: Path | None, available: str | None) -> Cluster:
    if nodes is not None and fleet is not None:
        raise ConfigError(f"both --nodes {nodes} and --fleet {fleet}", hint="give one of them")
    free = parse_bytes(available) if available is not None else None
    if fleet is None and nodes != LOCAL:
        return parse_nodes(nodes or DEFAULT_NODES, available_bytes=free)
    from deskfleet.planner.fleetfile import read_fleet, this_machine, with_available

    cluster = this_machine() if fleet is None else read_fleet(fleet)
    return cluster if free is None else with_available(cluster, free)


def _calibrate(plan: MemoryPlan, paths: Sequence[Path], target: Path | None, *, as_json: bool) -> None:
    """Compare the plan with boots, and keep the corrections."""
    pairs = [(_lines_of(plan, each), each) for each in map(read_facts, paths)]
    result = calibrate(pairs)
    compared = [(each, compare(lines, each)) for lines, each in pairs]
    if target is not None:
        _write(target, json.dumps(calibration_to_dict(result), indent=1) + "\n")
    if as_json:
        print_json(
            {
                "calibration": calibration_to_dict(result),
                "boots": [
                    {
                        "source": each.source,
                        "rank": each.rank,
                        "lines": [
                            {
                                "name": row.name,
                                "planned_bytes": row.planned_bytes,
                                "measured_bytes": row.measured_bytes,
                                "difference": row.difference,
                            }
                            for row in rows
                        ],
                    }
                    for each, rows in compared
                ],
            }
        )
    else:
        from deskfleet.cli.plan_screen import print_calibration

        print_calibration(compared)


def _lines_of(plan: MemoryPlan, facts: BootFacts) -> list[BudgetLine]:
    """The lines of the rank that was measured. Raises ConfigError when something else was booted."""
    layout, kind = plan.layout, plan.cluster.kind.name
    planned, booted = (layout.engine, layout.tp_size, kind), (facts.engine, facts.tp_size, facts.node_kind)
    if planned != booted or not 0 <= facts.rank < layout.tp_size:
        raise ConfigError(
            f"{facts.source} is of rank {facts.rank} of {facts.tp_size} of {facts.engine} on {facts.node_kind}, "
            f"and the plan of {layout.tp_size} of {layout.engine} on {kind}",
            hint="plan what was booted: --engine, --tp, --nodes, --context as then",
        )
    return list(plan.budgets[facts.rank].lines)


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(
            f"{path} is not JSON: {error}", hint="give what deskfleet plan --json printed"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object", hint="give what deskfleet plan --json printed")
    return value


def _write(path: Path, text: str) -> None:
    """Write beside `path`, then rename: what was there stays whole until all of the new is there."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}", hint="give a file in a directory that is there"
        ) from error
    say(f"wrote {path}")


__all__ = ["register", "run"]
