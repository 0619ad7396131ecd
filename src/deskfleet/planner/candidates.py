"""Every layout that wishes allow, and which of two is better. Owns the order; whether a layout fits is `plan`'s.

Search and the ways out of what does not fit both walk over these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deskfleet.planner.calibration import Calibration
from deskfleet.planner.cluster import Cluster
from deskfleet.planner.engines.registry import ENGINES, rules_of
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.plan import MemoryPlan, make_plan
from deskfleet.planner.speed import speed_of
from deskfleet.planner.wishes import EngineName, Wishes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that is not the best one, or an engine that is out of the question (`plan` None), and why."""

    engine: EngineName
    plan: MemoryPlan | None
    verdict: str


def engines_for(
    inventory: Inventory, cluster: Cluster, wishes: Wishes
) -> tuple[list[EngineName], list[Candidate]]:
    """The engines that may serve, and why others cannot."""
    asked: Sequence[EngineName] = [wishes.engine] if wishes.engine else list(ENGINES)
    refusals = {engine: rules_of(engine).unserved(inventory, cluster) for engine in asked}
    unserved = [Candidate(engine, None, refusal.message) for engine, refusal in refusals.items() if refusal]
    return [engine for engine, refusal in refusals.items() if refusal is None], unserved


def plans_of(
    inventory: Inventory,
    cluster: Cluster,
    wishes: Wishes,
    engines: Sequence[EngineName],
    calibrations: Sequence[Calibration],
) -> Iterator[MemoryPlan]:
    """Plan every engine, number of ranks and split. Raises ConfigError for wishes that cannot be."""
    for engine in engines:
        sizes = [wishes.tp_size] if wishes.tp_size else range(1, cluster.num_devices + 1)
        for tp_size in sizes:
            options = rules_of(engine).choices(inventory, cluster, tp_size)
            for ep_size in [wishes.ep_size] if wishes.ep_size else options.ep_sizes:
                for dcp_size in [wishes.dcp_size] if wishes.dcp_size else options.dcp_sizes:
                    wish = replace(wishes, ep_size=ep_size, dcp_size=dcp_size)
                    yield make_plan(
                        inventory, cluster, wish, engine=engine, tp_size=tp_size, calibrations=calibrations
                    )


def order(plan: MemoryPlan) -> tuple[object, ...]:
    """Fits, then as released, then context, then speed; what fails, by how little."""
    layout = plan.layout
    if not plan.fits:
        return (1, len(plan.refusals), -plan.margin_bytes, layout.tp_size)
    is_oracle = layout.engine == "native"  # a reference in float64: right, and slow
    return (0, is_oracle, len(plan.needs), -layout.max_model_len, step_s(plan), layout.tp_size)


def step_s(plan: MemoryPlan) -> float:
    """The floor of one request's decode step; 0 where nothing is known."""
    speed = speed_of(plan.inventory, plan.layout, plan.cluster.kind, batches=(1,))
    return speed.decode[0].step_s if speed.decode else 0.0


__all__ = ["Candidate", "engines_for", "order", "plans_of", "step_s"]
