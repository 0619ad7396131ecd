"""What a boot measured against what was planned, and corrections for the next plan. Owns facts, comparison, storage.

Facts are a small JSON object of lines by name; where they come from (an engine's log, a rank's own census) is not known
here. A correction belongs to one engine version on one kind of node, and carries the facts that it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from deskfleet.errors import ConfigError
from deskfleet.planner.budget import BudgetLine


@dataclass(frozen=True, slots=True)
class BootFacts:
    """What one boot measured. `lines` holds bytes by a line's name or by a group's (`group:weights`), of one rank."""

    engine: str
    engine_version: str
    node_kind: str
    model: str
    tp_size: int
    rank: int
    lines: Mapping[str, int]
    source: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """Corrections in bytes by line name, and the facts behind them. They hold for one engine version and node kind."""

    engine: str
    engine_version: str
    node_kind: str
    corrections: Mapping[str, int]
    sample: tuple[BootFacts, ...]

    def is_of(self, engine: str, engine_version: str, node_kind: str) -> bool:
        """Whether the corrections hold there: 0.33.1 is a version of the rules for 0.33."""
        if (self.engine, self.node_kind) != (engine, node_kind):
            return False
        return f"{self.engine_version}.".startswith(f"{engine_version}.")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line or group: planned and measured bytes."""

    name: str
    planned_bytes: int
    measured_bytes: int

    @property
    def difference(self) -> float:
        """(measured - planned) / planned; 0 when both are 0."""
        if not self.planned_bytes:
            return 0.0 if not self.measured_bytes else float("inf")
        return (self.measured_bytes - self.planned_bytes) / self.planned_bytes


_Kind = TypeVar("_Kind")
_GROUP = "group:"


def compare(lines: Iterable[BudgetLine], facts: BootFacts) -> list[Comparison]:
    """Planned and measured bytes of everything that `facts` name. Raises ConfigError for a name that is not planned."""
    planned = list(lines)
    known = {line.name: line.num_bytes - line.correction_bytes for line in planned}
    for line in planned:
        if line.kind != "temporary":
            key = _GROUP + line.group
            known[key] = known.get(key, 0) + line.num_bytes - line.correction_bytes
    unknown = sorted(set(facts.lines) - set(known))
    if unknown:
        raise ConfigError(
            f"{facts.source} measures {', '.join(map(repr, unknown))}, which the plan does not have",
            hint=f"planned are {', '.join(sorted(known))}",
        )
    return [Comparison(name, known[name], measured) for name, measured in facts.lines.items()]


def calibrate(compared: Sequence[tuple[list[BudgetLine], BootFacts]]) -> Calibration:
    """Corrections from boots of one engine version on one kind of node: of each name the largest shortfall seen.

    Raises ConfigError when the boots are of different engines, versions or kinds, or when there is none.
    """
    if not compared:
        raise ConfigError("no boot to calibrate from")
    first = compared[0][1]
    corrections: dict[str, int] = {}
    for lines, facts in compared:
        if (facts.engine, facts.engine_version, facts.node_kind) != (
            first.engine,
            first.engine_version,
            first.node_kind,
        ):
            raise ConfigError(
                f"{facts.source} is of {facts.engine} {facts.engine_version} on {facts.node_kind}, {first.source} of "
                f"{first.engine} {first.engine_version} on {first.node_kind}",
                hint="calibrate each engine version on each kind of node apart",
            )
        for row in compare(lines, facts):
            difference = row.measured_bytes - row.planned_bytes
            corrections[row.name] = max(corrections.get(row.name, difference), difference)
    return Calibration(
        first.engine,
        first.engine_version,
        first.node_kind,
        corrections,
        tuple(facts for _, facts in compared),
    )


def apply_calibration(
    lines: list[BudgetLine],
    calibrations: Iterable[Calibration],
    *,
    engine: str,
    engine_version: str,
    node_kind: str,
) -> list[BudgetLine]:
    """Lines with the corrections of this engine version and kind of node; what is corrected counts as measured.

    A group's correction changes the group's largest line, by what is left of it when the group's own lines are
    corrected. A correction of a line that this layout does not have is left out.
    """
    for calibration in calibrations:
        if not calibration.is_of(engine, engine_version, node_kind):
            continue
        of_lines: dict[str, int] = {}
        of_groups: dict[str, int] = {}
        for name, correction in calibration.corrections.items():
            (of_groups if name.startswith(_GROUP) else of_lines)[name] = correction
        for name, correction in of_lines.items():
            lines = _corrected(lines, name, correction, calibration)
        for name, correction in of_groups.items():
            held = [line for line in lines if _GROUP + line.group == name and line.kind != "temporary"]
            rest = correction - sum(of_lines.get(line.name, 0) for line in held)
            if held and rest:
                largest = max(held, key=lambda line: line.num_bytes)
                lines = _corrected(lines, largest.name, rest, calibration)
    return lines


def _corrected(
    lines: list[BudgetLine], name: str, correction: int, calibration: Calibration
) -> list[BudgetLine]:
    count = len(calibration.sample)
    boots = f"{count} boot{'s' if count > 1 else ''}"
    source = f"{boots} of {calibration.engine} {calibration.engine_version}"
    return [
        replace(
            line,
            num_bytes=max(0, line.num_bytes + correction),
            correction_bytes=line.correction_bytes + max(correction, -line.num_bytes),
            basis="measured",
            formula=f"{line.formula}; {correction:+,} B by {source}",
        )
        if line.name == name
        else line
        for line in lines
    ]


def read_facts(path: Path) -> BootFacts:
    """Read the facts of a boot. Raises ConfigError naming the file and what is wrong."""
    return _read(path, BootFacts)


def read_calibration(path: Path) -> Calibration:
    """Read a stored correction. Raises ConfigError naming the file and what is wrong."""
    return _read(path, Calibration)


def _read(path: Path, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind, strict=True)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path} is no {kind.__name__}: {error}", hint="see docs/reference/planner.md for the fields"
        ) from error


__all__ = [
    "BootFacts",
    "Calibration",
    "Comparison",
    "apply_calibration",
    "calibrate",
    "compare",
    "read_calibration",
    "read_facts",
]
