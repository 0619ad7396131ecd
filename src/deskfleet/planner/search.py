"""Which layout is best, which lost and why, and, when none fits, the nearest changes that would.

Owns the answer to one question of a user. Layouts and their order are `candidates`', the ways out `changes`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from deskfleet.errors import ConfigError
from deskfleet.planner.calibration import Calibration
from deskfleet.planner.candidates import Candidate, engines_for, order, plans_of, step_s
from deskfleet.planner.changes import Change, ways_out
from deskfleet.planner.cluster import Cluster
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.plan import MemoryPlan
from deskfleet.planner.wishes import Wishes
from deskfleet.units import format_bytes


@dataclass(frozen=True, slots=True)
class Search:
    """The plan to use (the best that fits, or the one that fails by least), the others in order, and ways out."""

    best: MemoryPlan
    losers: tuple[Candidate, ...]
    changes: tuple[Change, ...]


def search(
    inventory: Inventory,
    cluster: Cluster,
    wishes: Wishes,
    *,
    calibrations: Sequence[Calibration] = (),
    num_changes: int = 3,
) -> Search:
    """Plan every layout that the wishes allow, best first; when none fits, find changes that would.

    Raises ConfigError for wishes that contradict the checkpoint or the cluster.
    """
    engines, unserved = engines_for(inventory, cluster, wishes)
    if not engines:
        reasons = "; ".join(each.verdict for each in unserved)
        raise ConfigError(
            f"no engine serves {inventory.name} on {cluster.origin}: {reasons}",
            hint="leave --engine open, or choose machines and a checkpoint that it serves",
        )
    plans = sorted(plans_of(inventory, cluster, wishes, engines, calibrations), key=order)
    best = plans[0]
    losers = (*(Candidate(plan.layout.engine, plan, _verdict(plan, best)) for plan in plans[1:]), *unserved)
    changes = (
        () if best.fits else tuple(islice(ways_out(replace(best, wishes=wishes), calibrations), num_changes))
    )
    return Search(best, losers, changes)


def _verdict(plan: MemoryPlan, best: MemoryPlan) -> str:
    """Why a plan is not the best one, in a few words."""
    if plan.refusals:
        return plan.refusals[0].message
    if not plan.fits:
        return f"{format_bytes(-plan.margin_bytes)} too little ({plan.tightest.binding})"
    if plan.layout.engine == "native" != best.layout.engine:
        return "the exact reference, not made for speed"
    if len(plan.needs) > len(best.needs):
        return f"needs {plan.needs[0]}"
    if plan.layout.max_model_len < best.layout.max_model_len:
        return f"context {plan.layout.max_model_len:,} only"
    ours, theirs = step_s(plan), step_s(best)
    if ours > theirs:
        return f"a decode step takes at least {ours / theirs:.2f} times as long"
    return "as fast, with more ranks" if plan.layout.tp_size > best.layout.tp_size else "as good"


__all__ = ["Candidate", "Change", "Search", "search"]
