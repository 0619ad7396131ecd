"""What came of the gates: verdicts, how they are told to programs, and the exit code. Prints nothing.

Exit codes are those of deskfleet.errors: 0 every verdict is a pass (or a skip with its reason, beside passes), 1 a gate
failed, 3 nothing was shown at all, or a gate could not do its own work.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deskfleet.gates.contract import Finding, Gate, Verdict
from deskfleet.gates.subject import Answered

VERDICTS: tuple[Verdict, ...] = ("pass", "fail", "skip")


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate as it was asked, `rounds` times. `evidence` are its exchanges, `files` where they were written."""

    gate: Gate
    finding: Finding
    seconds_s: float
    num_asked: int
    evidence: tuple[Answered, ...] = ()
    files: tuple[str, ...] = ()
    rounds: int = 1

    @property
    def verdict(self) -> Verdict:
        """The verdict."""
        return self.finding.verdict

    def command(self, verb: str, target: str, flags: Sequence[str] = ()) -> str:
        """Return the command that asks this gate again."""
        return shlex.join(["deskfleet", verb, target, *flags, "--gate", self.gate.name])


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. `target` is what the command was given, `flags` those of it that change what is asked.

    `provenance` says with what and from where it was asked, `evidence_dir` where the exchanges were written.
    """

    verb: str
    url: str
    target: str
    model_id: str
    max_model_len: int | None
    questions: str
    questions_reason: str
    started_at: str
    seconds_s: float
    results: tuple[GateResult, ...]
    flags: tuple[str, ...] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)
    evidence_dir: str | None = None

    @property
    def counts(self) -> dict[Verdict, int]:
        """How many gates passed, failed, were skipped."""
        found = Counter(result.verdict for result in self.results)
        return {verdict: found[verdict] for verdict in VERDICTS}

    @property
    def verdict(self) -> Verdict:
        """`fail` when a gate failed, `skip` when nothing passed, else `pass`."""
        counts = self.counts
        if counts["fail"]:
            return "fail"
        return "pass" if counts["pass"] else "skip"

    @property
    def exit_code(self) -> int:
        """The command's."""
        if self.verdict == "fail":
            return 1
        broken = any(result.finding.cause == "tool" for result in self.results)
        return 3 if broken or self.verdict == "skip" else 0

    def command(self, result: GateResult) -> str:
        """Return the command that asks one gate again."""
        return result.command(self.verb, self.target, self.flags)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "verb": self.verb,
            "url": self.url,
            "model": self.model_id,
            "max_model_len": self.max_model_len,
            "questions": self.questions,
            "questions_reason": self.questions_reason,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "counts": self.counts,
            "started_at": self.started_at,
            "seconds_s": round(self.seconds_s, 3),
            "limits": dict(self.limits),
            "provenance": dict(self.provenance),
            "evidence_dir": self.evidence_dir,
            "gates": [self._gate(result) for result in self.results],
        }

    def _gate(self, result: GateResult) -> dict[str, Any]:
        gate, finding = result.gate, result.finding
        return {
            "name": gate.name,
            "verdict": finding.verdict,
            "measured": finding.measured,
            "threshold": gate.threshold,
            "reason": finding.reason,
            "cause": finding.cause,
            "question": gate.question,
            "protects": gate.protects,
            "when": gate.when,
            "values": dict(finding.values),
            "figures": [
                {"kind": type(figure).__name__.lower(), **asdict(figure)} for figure in finding.figures
            ],
            "seconds_s": round(result.seconds_s, 3),
            "num_asked": result.num_asked,
            "rounds": result.rounds,
            "evidence": list(result.files),
            "command": self.command(result),
        }


def of_rounds(results: Sequence[GateResult]) -> GateResult:
    """Return one result of several rounds of a gate: a failure where any failed, else a skip, else a pass."""
    if len(results) == 1:
        return results[0]
    worst = min(results, key=lambda result: ("fail", "skip", "pass").index(result.verdict))
    failures = sum(result.verdict == "fail" for result in results)
    finding = worst.finding
    if failures:
        reason = f"failed in {failures} of {len(results)} rounds: {finding.reason}"
        finding = Finding("fail", finding.measured, reason, finding.cause, finding.values, finding.figures)
    return GateResult(
        worst.gate,
        finding,
        sum(result.seconds_s for result in results),
        sum(result.num_asked for result in results),
        tuple(answered for result in results for answered in result.evidence),
        rounds=len(results),
    )


__all__ = ["VERDICTS", "GateResult", "Report", "of_rounds"]
