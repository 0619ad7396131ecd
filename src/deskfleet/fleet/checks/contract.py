"""What a check of the doctor is: a question about one node, answered from facts.

Owns the words pass, warn, fail and skip, and what checks see. Knows no check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from deskfleet.fleet.fabric import Fabric, NodeFabric
from deskfleet.fleet.facts import Container, NodeFacts
from deskfleet.fleet.links import LinkMeasure
from deskfleet.fleet.render import FLEET_LABEL
from deskfleet.fleet.spec import FleetSpec, NodeSpec
from deskfleet.planner.budget import RankBudget
from deskfleet.planner.plan import MemoryPlan

Verdict = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check came to on a node: what was measured, and for warn and fail what to do."""

    verdict: Verdict
    measured: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """One node as checks see it, among all of which there are facts. `ports` are those that ranks will listen on."""

    spec: FleetSpec
    node: NodeSpec
    facts: NodeFacts
    everyone: Mapping[str, NodeFacts]
    fabric: Fabric
    links: tuple[LinkMeasure, ...]
    plan: MemoryPlan | None
    ports: tuple[int, ...]

    @property
    def head(self) -> NodeFacts:
        """The node that others are compared with: the fleet's head, or the first that could be asked."""
        return next(self.everyone[node.name] for node in self.spec.nodes if node.name in self.everyone)

    @property
    def is_head(self) -> bool:
        """Whether this is the node that others are compared with."""
        return self.head.node == self.node.name

    @property
    def is_alone(self) -> bool:
        """Whether the fleet is one node."""
        return len(self.spec.nodes) == 1

    @property
    def network(self) -> NodeFabric:
        """What ranks on this node are told of the network."""
        return self.fabric.nodes[self.node.name]

    @property
    def budgets(self) -> tuple[RankBudget, ...]:
        """The plan's budgets of the ranks on this node."""
        return () if self.plan is None else tuple(b for b in self.plan.budgets if b.node == self.node.name)

    @property
    def our_containers(self) -> tuple[Container, ...]:
        """Containers of this fleet on the node."""
        return tuple(
            each for each in self.facts.containers or () if each.labels.get(FLEET_LABEL) == self.spec.name
        )

    @property
    def is_serving(self) -> bool:
        """Whether a rank of this fleet runs on the node."""
        return any(each.state == "running" for each in self.our_containers)

    def unknown(self, topic: str) -> Outcome:
        """The outcome of a check whose facts could not be read."""
        return skipped(f"unknown: {self.facts.unknown.get(topic, 'it was not told')}")


@dataclass(frozen=True, slots=True)
class Check:
    """One question. With `is_must` a node that fails it cannot be launched on."""

    name: str
    question: str
    examine: Callable[[Subject], Outcome]
    is_must: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's outcome on a node."""

    node: str
    check: str
    verdict: Verdict
    measured: str
    hint: str | None


def passed(measured: str) -> Outcome:
    """All is as it must be."""
    return Outcome("pass", measured)


def warned(measured: str, hint: str) -> Outcome:
    """It will run, and may be slow or hard to explain later."""
    return Outcome("warn", measured, hint)


def failed(measured: str, hint: str) -> Outcome:
    """It will not run, or not well enough to be started."""
    return Outcome("fail", measured, hint)


def skipped(measured: str) -> Outcome:
    """It could not be asked, or there is nothing to ask; `measured` says why."""
    return Outcome("skip", measured)


def compared(
    subject: Subject, own: str | None, theirs: str | None, topic: str, verdict: Verdict, hint: str
) -> Outcome:
    """Pass when the head has the same; otherwise `verdict` with both. Unknown on either side is skipped."""
    if own is None:
        return subject.unknown(topic)
    if subject.is_head or own == theirs:
        return passed(own)
    if theirs is None:
        return skipped(f"{own}; what {subject.head.node} has is unknown")
    return Outcome(verdict, f"{own}, but {theirs} on {subject.head.node}", hint)


__all__ = [
    "Check",
    "Finding",
    "Outcome",
    "Subject",
    "Verdict",
    "compared",
    "failed",
    "passed",
    "skipped",
    "warned",
]
