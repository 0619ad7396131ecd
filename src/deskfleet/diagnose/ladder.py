"""Walks the rungs in order. Owns what the walk comes to: the first cause found, and what could not be known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deskfleet.diagnose.finding import Finding, Symptom
from deskfleet.diagnose.rungs import ALL, RUNGS
from deskfleet.diagnose.situation import Situation
from deskfleet.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What every rung said, in order. `cause` is the first that was found; rungs above it were clear or unknown."""

    findings: tuple[Finding, ...]

    @property
    def cause(self) -> Finding | None:
        return next((finding for finding in self.findings if finding.verdict == "found"), None)

    @property
    def next_command(self) -> str | None:
        """What to run now: the cause's, or where nothing was found, what makes the first unknown rung known."""
        if self.cause is not None:
            return self.cause.next_command
        return next((f.next_command for f in self.findings if f.verdict == "unknown"), None)


def walk(situation: Situation, symptoms: Sequence[Symptom] = ALL) -> Diagnosis:
    """Look at every rung that explains one of `symptoms`.

    Raises ConfigError for a symptom that does not exist.
    """
    if unknown := [symptom for symptom in symptoms if symptom not in ALL]:
        raise ConfigError(f"there is no symptom {unknown[0]!r}", hint=f"known are {', '.join(ALL)}")
    findings = []
    for rung in RUNGS:
        if set(rung.symptoms) & set(symptoms):
            findings.append(rung.look(situation))
    return Diagnosis(tuple(findings))


__all__ = ["Diagnosis", "walk"]
