"""Exchanges as files: one JSON object for each question, its request as it was sent, its answer as it came.

Owns the form and the names of the files. What is written can be sent again: `request` is a whole body.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from deskfleet.errors import ConfigError
from deskfleet.gates.junit import to_junit
from deskfleet.gates.page import to_page
from deskfleet.gates.report import GateResult, Report
from deskfleet.gates.subject import Answered


def write_evidence(report: Report, directory: str) -> Report:
    """Write every exchange, and the report as JSON, JUnit and HTML, below `directory`; return the report with names.

    Raises ConfigError when that cannot be done.
    """
    root = Path(directory)
    results = tuple(_write_gate(result, root) for result in report.results)
    told = replace(report, results=results, evidence_dir=directory)
    write_text(root / "report.json", json.dumps(told.to_dict(), ensure_ascii=False, indent=1) + "\n")
    write_text(root / "report.xml", to_junit(told))
    write_text(root / "report.html", to_page(told))
    return told


def write_text(path: Path, text: str) -> None:
    """Write a file and the directories above it. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _write_gate(result: GateResult, root: Path) -> GateResult:
    files = []
    for number, answered in enumerate(result.evidence, 1):
        name = f"{result.gate.name}/{number:03}-{'right' if answered.is_right else 'wrong'}.json"
        write_text(root / name, json.dumps(as_object(answered), ensure_ascii=False, indent=1) + "\n")
        files.append(name)
    return replace(result, files=tuple(files))


def as_object(answered: Answered) -> dict[str, Any]:
    """Return one exchange as JSON values."""
    return {
        "label": answered.puzzle.label,
        "is_right": answered.is_right,
        "wrong": answered.wrong,
        "cause": answered.cause,
        "began_s": round(answered.began_s, 4),
        "ended_s": round(answered.ended_s, 4),
        "num_pieces": answered.num_pieces,
        "request": dict(answered.body),
        "reply": None if answered.reply is None else _plain(asdict(answered.reply)),
    }


def _plain(value: Any) -> Any:
    """Return JSON values: times to a tenth of a millisecond, null for numbers that JSON does not have."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


__all__ = ["as_object", "write_evidence", "write_text"]
