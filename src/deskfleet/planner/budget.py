"""What one rank needs, byte by byte: `BudgetLine`, `RankBudget`. Owns how lines add up; knows no model and no engine.

Persistent and reserved lines add; temporaries of different phases exclude each other, so of them the largest phase
counts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["persistent", "temporary", "reserved"]
"""`persistent` is held as long as the rank lives, `reserved` too, but for others (the system, a floor, page cache);
`temporary` is held during its phase only."""

Basis = Literal["computed", "measured", "published", "assumed"]
"""Where a number comes from: arithmetic on sizes, a boot of this engine and node kind, a report, or a guess."""

SYSTEM_LINE = "system"
"""The line of what was held before the rank started: all but what was available then."""


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """Some bytes with a name, the formula that gives them, and the reason why they are needed.

    `group` is what a reader adds up: "weights", "engram", "kv", "workspace", "runtime", "system". `phase` is when a
    temporary lives ("load", "prefill", "decode", "capture"); lines of one phase add. `correction_bytes` is what a
    calibration put on top; it is part of `num_bytes`.
    """

    name: str
    group: str
    num_bytes: int
    kind: Kind
    formula: str
    reason: str
    basis: Basis = "computed"
    phase: str | None = None
    correction_bytes: int = 0

    def __post_init__(self) -> None:
        if self.num_bytes < 0:
            raise ValueError(f"{self.name} has {self.num_bytes} bytes")
        if (self.phase is not None) != (self.kind == "temporary"):
            raise ValueError(f"{self.name} is {self.kind} and has phase {self.phase!r}")


@dataclass(frozen=True, slots=True)
class Floor:
    """Memory that must stay free: at rest, and at the worst moment of a step. `reason` says what happens below it."""

    rest_bytes: int
    peak_bytes: int
    reason: str


@dataclass(frozen=True)
class RankBudget:
    """All lines of one rank against what its node has. Raises ValueError for two lines of one name."""

    rank: int
    node: str
    capacity_bytes: int
    floor: Floor
    lines: tuple[BudgetLine, ...]

    def __post_init__(self) -> None:
        names = [line.name for line in self.lines]
        if len(set(names)) != len(names):
            raise ValueError(f"two budget lines of one name: {sorted(names)}")

    def line(self, name: str) -> BudgetLine:
        """Return the line of that name. Raises KeyError."""
        return next((line for line in self.lines if line.name == name), None) or _missing(name)

    def group_bytes(self, group: str) -> int:
        """Bytes of a group that are held all the time."""
        return sum(line.num_bytes for line in self.lines if line.group == group and line.kind != "temporary")

    @property
    def held_bytes(self) -> int:
        """What is held all the time."""
        return sum(line.num_bytes for line in self.lines if line.kind != "temporary")

    @cached_property
    def phase_bytes(self) -> dict[str, int]:
        """What each phase holds besides."""
        phases: defaultdict[str, int] = defaultdict(int)
        for line in self.lines:
            if line.phase is not None:
                phases[line.phase] += line.num_bytes
        return dict(phases)

    @property
    def worst_phase(self) -> str | None:
        """The phase that needs most, None without temporaries."""
        return max(self.phase_bytes, key=self.phase_bytes.__getitem__, default=None)

    @property
    def peak_bytes(self) -> int:
        """What is held at the worst moment."""
        return self.held_bytes + max(self.phase_bytes.values(), default=0)

    @property
    def rest_margin_bytes(self) -> int:
        """What is left above the floor at rest; negative when it does not fit."""
        return self.capacity_bytes - self.floor.rest_bytes - self.held_bytes

    @property
    def peak_margin_bytes(self) -> int:
        """What is left above the floor at the worst moment; negative when it does not fit."""
        return self.capacity_bytes - self.floor.peak_bytes - self.peak_bytes

    @property
    def margin_bytes(self) -> int:
        """The smaller margin: what could be added, or by how much it fails."""
        return min(self.rest_margin_bytes, self.peak_margin_bytes)

    @property
    def fits(self) -> bool:
        """Whether the node keeps its floor at rest and at the worst moment."""
        return self.margin_bytes >= 0

    @property
    def binding(self) -> str:
        """What decides: "at rest", or the phase whose peak leaves least."""
        if self.rest_margin_bytes <= self.peak_margin_bytes:
            return "at rest"
        return str(self.worst_phase)

    @property
    def binding_line(self) -> BudgetLine:
        """The largest line of what decides, the system's apart; a phase's only where what is held would fit without it.

        Raises ValueError for a budget without lines.
        """
        is_phase = (
            self.binding != "at rest" and self.held_bytes + self.floor.peak_bytes <= self.capacity_bytes
        )
        phase = self.binding if is_phase else None
        lines = [line for line in self.lines if line.phase == phase and line.name != SYSTEM_LINE]
        return max(lines, key=lambda line: line.num_bytes)


def _missing(name: str) -> BudgetLine:
    raise KeyError(name)


__all__ = ["SYSTEM_LINE", "Basis", "BudgetLine", "Floor", "Kind", "RankBudget"]
