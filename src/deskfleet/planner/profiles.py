"""Three ways to use the same machines: longest context, most requests, least latency. Owns how each wish is sharpened.

A profile is wishes with nothing left open that the plan chose, so that two profiles differ by what their files say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Literal, get_args

from deskfleet.errors import ConfigError
from deskfleet.planner.calibration import Calibration
from deskfleet.planner.cluster import Cluster
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.plan import MemoryPlan, make_plan
from deskfleet.planner.search import Search, search
from deskfleet.planner.speed import speed_of
from deskfleet.planner.wishes import Wishes

ProfileName = Literal["max-context", "max-concurrency", "lowest-latency"]
PROFILES: tuple[ProfileName, ...] = get_args(ProfileName)

PROFILE_CONTEXT = 131_072
"""What a long session with a coding agent grows to."""

MAX_CONCURRENCY = 64
"""Beyond it decode steps of these machines are too slow for anyone."""


def profile_search(
    name: ProfileName,
    inventory: Inventory,
    cluster: Cluster,
    wishes: Wishes,
    *,
    calibrations: Sequence[Calibration] = (),
) -> Search:
    """The plan of a profile; what fails, and the ways out, when nothing fits. Raises ConfigError.

    `max-context`: one request as long as fits. `max-concurrency`: as many of the wished context as fit, at most 64.
    `lowest-latency`: one request of the wished context, on the layout whose decode step has the lowest floor. Without a
    wish that context is 131,072 tokens. How many requests run is the profile's to say; what else `wishes` fix stays
    fixed. No profile takes a layout that needs more beyond the engines as released than the best one does.
    """
    if name == "max-context":
        if wishes.max_model_len is not None or wishes.kv_tokens is not None:
            raise ConfigError(
                f"profile {name} finds the context, and one is given", hint="leave context and pool open"
            )
        return search(inventory, cluster, replace(wishes, max_num_seqs=1), calibrations=calibrations)
    if name == "max-concurrency" and wishes.kv_tokens is not None:
        raise ConfigError(f"profile {name} finds the pool, and one is given", hint="leave the pool open")
    longest = min(PROFILE_CONTEXT, inventory.max_position_embeddings)
    wishes = replace(wishes, max_model_len=wishes.max_model_len or longest, max_num_seqs=1)
    found = search(inventory, cluster, wishes, calibrations=calibrations)
    if not found.best.fits:
        return found
    rivals = _rivals(found)
    best = min(rivals, key=_latency) if name == "lowest-latency" else _fullest(rivals, calibrations)
    return Search(best, (), ())


def _rivals(found: Search) -> list[MemoryPlan]:
    """The best plan and those that fit and ask for no more than it: neither patches nor patience."""
    best = found.best
    others = (each.plan for each in found.losers if each.plan is not None)
    return [
        best,
        *(
            plan
            for plan in others
            if plan.fits
            and len(plan.needs) <= len(best.needs)
            and (plan.layout.engine == "native") == (best.layout.engine == "native")
        ),
    ]


def _fullest(plans: Sequence[MemoryPlan], calibrations: Sequence[Calibration]) -> MemoryPlan:
    """The plan with most requests, and a pool as large; the first of those with as many."""
    best = plans[0]
    for plan in plans:
        low, high = best.layout.max_num_seqs + 1, MAX_CONCURRENCY
        count = low  # so that a plan that cannot win is made once
        while low <= high:
            tried = _with_requests(plan, count, calibrations)
            if tried.fits:
                best, low = tried, count + 1
            else:
                high = count - 1
            count = (low + high) // 2
    return best


def _with_requests(plan: MemoryPlan, count: int, calibrations: Sequence[Calibration]) -> MemoryPlan:
    """The plan made again for `count` requests of full length; what was left open is chosen again."""
    return make_plan(
        plan.inventory,
        plan.cluster,
        replace(plan.wishes, max_num_seqs=count, kv_tokens=count * plan.layout.max_model_len),
        engine=plan.layout.engine,
        tp_size=plan.layout.tp_size,
        calibrations=calibrations,
    )


def _latency(plan: MemoryPlan) -> float:
    speed = speed_of(plan.inventory, plan.layout, plan.cluster.kind, batches=(1,))
    return speed.decode[0].step_s if speed.decode else float("inf")


def profile_toml(name: str, plan: MemoryPlan) -> str:
    """The layout of `plan` as the TOML of a profile: every value written out, with the reason where it was chosen."""
    reasons = {choice.name: choice.reason for choice in plan.choices}
    lines = [
        f"# {name}: {plan.inventory.name} on {plan.cluster.origin}, written by deskfleet plan",
        "[profile]",
    ]
    for field in fields(plan.layout):
        value = getattr(plan.layout, field.name)
        if value is None:
            continue
        text = f'"{value}"' if isinstance(value, str) else str(value).lower()
        reason = f"  # {reasons[field.name]}" if field.name in reasons else ""
        lines.append(f"{field.name} = {text}{reason}")
    return "\n".join(lines) + "\n"


__all__ = ["MAX_CONCURRENCY", "PROFILES", "PROFILE_CONTEXT", "ProfileName", "profile_search", "profile_toml"]
