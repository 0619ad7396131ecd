"""A plan as JSON and back. Owns the shape of that JSON; the plan is remade from its inputs, and must come out equal.

What a program reads most is at the top: `fits`, `margin_bytes`, `refusals`. `inputs` holds all that the plan rests on,
`asked` what a search was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import msgspec

from deskfleet.errors import ConfigError
from deskfleet.planner.budget import RankBudget
from deskfleet.planner.calibration import Calibration
from deskfleet.planner.cluster import Cluster
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.plan import MemoryPlan, make_plan
from deskfleet.planner.profiles import ProfileName, profile_search
from deskfleet.planner.search import Search, search
from deskfleet.planner.speed import chunks_of, speed_of
from deskfleet.planner.wishes import EngineName, Wishes

FORMAT = 1

_Kind = TypeVar("_Kind")


class _Inputs(msgspec.Struct, frozen=True):
    """Everything a plan is made from."""

    inventory: Inventory
    cluster: Cluster
    wishes: Wishes
    engine: EngineName
    tp_size: int
    calibrations: tuple[Calibration, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a search was asked for, before it settled engine and split; `profile` when it was for one."""

    wishes: Wishes
    profile: ProfileName | None = None


def find(inventory: Inventory, cluster: Cluster, asked: Asked, calibrations: Sequence[Calibration]) -> Search:
    """Search for what is asked. Raises ConfigError for wishes that contradict the checkpoint or the cluster."""
    if asked.profile is None:
        return search(inventory, cluster, asked.wishes, calibrations=calibrations)
    return profile_search(asked.profile, inventory, cluster, asked.wishes, calibrations=calibrations)


def search_to_dict(found: Search, asked: Asked) -> dict[str, Any]:
    """Return the best plan as `plan_to_dict` does, with the losers, the ways out and what was asked."""
    return plan_to_dict(found.best) | {
        "losers": [
            {
                "engine": each.engine,
                "layout": None if each.plan is None else asdict(each.plan.layout),
                "fits": each.plan is not None and each.plan.fits,
                "verdict": each.verdict,
            }
            for each in found.losers
        ],
        "changes": [
            {
                "title": each.title,
                "cost": each.cost,
                "flags": each.flags,
                "margin_bytes": each.plan.margin_bytes,
            }
            for each in found.changes
        ],
        "asked": msgspec.to_builtins(asked),
    }


def search_from_dict(document: dict[str, Any]) -> tuple[Search, Asked]:
    """Search again for what `search_to_dict` wrote. Raises ConfigError for anything else."""
    inputs = _read_inputs(document)
    asked = _convert(document.get("asked"), Asked, "what was asked")
    return find(inputs.inventory, inputs.cluster, asked, inputs.calibrations), asked


def plan_to_dict(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan as values that JSON can hold."""
    layout = plan.layout
    speed = speed_of(plan.inventory, layout, plan.cluster.kind)
    return {
        "format": FORMAT,
        "fits": plan.fits,
        "margin_bytes": plan.margin_bytes,
        "binding": plan.tightest.binding,
        "binding_line": plan.tightest.binding_line.name,
        "tightest_rank": plan.tightest.rank,
        "model": plan.inventory.name,
        "nodes": plan.cluster.origin,
        "layout": asdict(layout),
        "choices": [asdict(choice) for choice in plan.choices],
        "refusals": [asdict(refusal) for refusal in plan.refusals],
        "needs": list(plan.needs),
        "ranks": [_rank(budget) for budget in plan.budgets],
        "answers": {
            "kv_bytes_per_token": float(plan.kv_rate.bytes_per_token),
            "kv_bytes_per_token_basis": plan.kv_rate.basis,
            "max_kv_tokens": plan.max_kv_tokens,
            "requests_of_full_length": plan.max_kv_tokens // layout.max_model_len,
            "largest_context": plan.largest_context,
            "largest_context_chunk": plan.largest_context_chunk,
            "chunk_schedule": [asdict(run) for run in chunks_of(layout)],
            "boot": None if plan.boot is None else {"line": plan.boot.line, "rule": plan.boot.rule},
            "speed": asdict(speed),
        },
        "inputs": msgspec.to_builtins(
            _Inputs(
                plan.inventory, plan.cluster, plan.wishes, layout.engine, layout.tp_size, plan.calibrations
            )
        ),
    }


def plan_from_dict(document: dict[str, Any]) -> MemoryPlan:
    """Make the plan again from the inputs that `plan_to_dict` wrote. Raises ConfigError for anything else."""
    inputs = _read_inputs(document)
    return make_plan(
        inputs.inventory,
        inputs.cluster,
        inputs.wishes,
        engine=inputs.engine,
        tp_size=inputs.tp_size,
        calibrations=inputs.calibrations,
    )


def _read_inputs(document: dict[str, Any]) -> _Inputs:
    if document.get("format") != FORMAT:
        raise ConfigError(
            f"plan of format {document.get('format')!r}, and this version reads {FORMAT}", hint="plan again"
        )
    return _convert(document.get("inputs"), _Inputs, "the plan's inputs")


def _convert(value: object, kind: type[_Kind], what: str) -> _Kind:
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what} cannot be read: {error}", hint="plan again") from error


def calibration_to_dict(calibration: Calibration) -> dict[str, Any]:
    """Return a correction as values that JSON can hold, as `read_calibration` reads it."""
    document: dict[str, Any] = msgspec.to_builtins(calibration)
    return document


def _rank(budget: RankBudget) -> dict[str, Any]:
    return {
        "rank": budget.rank,
        "node": budget.node,
        "capacity_bytes": budget.capacity_bytes,
        "floor": asdict(budget.floor),
        "held_bytes": budget.held_bytes,
        "peak_bytes": budget.peak_bytes,
        "phase_bytes": budget.phase_bytes,
        "margin_bytes": budget.margin_bytes,
        "fits": budget.fits,
        "binding": budget.binding,
        "lines": [asdict(line) for line in budget.lines],
    }


__all__ = [
    "FORMAT",
    "Asked",
    "calibration_to_dict",
    "find",
    "plan_from_dict",
    "plan_to_dict",
    "search_from_dict",
    "search_to_dict",
]
