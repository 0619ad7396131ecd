"""Everything Pocket must do before it may ship, as verdicts in a file: `python -m pocket.accept --out FILE`.

Owns the file. A line that it already has for this checkpoint and as many questions is not asked again, so a run that
was interrupted goes on. Exit code 1 when a line fails. What the lines are says `pocket.lines`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deskfleet.model.embedded import POCKET, locate
from pocket.kept import kept_in, write_kept
from pocket.lines import LINES, Desk, Line


def accept(
    checkpoint: Path,
    lines: Sequence[Line],
    num_questions: int,
    known: dict[str, Any],
    keep: Callable[[], None],
) -> None:
    """Fill `known` with the verdict of every line that it lacks, telling `keep` after each."""
    with ExitStack() as stack:
        desk = Desk(checkpoint, num_questions, stack)
        for line in lines:
            if known.get(line.name, {}).get("num_questions") == num_questions:
                continue
            begin = time.monotonic()
            found = line.run(desk)
            known[line.name] = {
                "verdict": "pass" if found.passed else "fail",
                "limit": line.limit,
                "measured": found.measured,
                "asked": found.asked,
                "num_questions": num_questions,
                "seconds_s": round(time.monotonic() - begin, 1),
                "detail": found.detail,
            }
            print(f"{line.name}: {known[line.name]['verdict']}, {found.measured} ({line.limit})", flush=True)
            keep()


def as_markdown(lines: Mapping[str, Mapping[str, Any]]) -> str:
    """The verdicts as a table."""
    rows = ["| line | must be | found | asked | |", "|---|---|---|---:|---|"]
    for name, line in lines.items():
        found = line["measured"]
        told = (
            ", ".join(f"{key} {_told(value)}" for key, value in found.items())
            if isinstance(found, dict)
            else _told(found)
        )
        rows.append(f"| {name} | {line['limit']} | {told} | {line['asked']} | {line['verdict']} |")
    return "\n".join(rows) + "\n"


def _told(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> None:
    """Ask every line."""
    parser = argparse.ArgumentParser(prog="python -m pocket.accept", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", default=POCKET)
    parser.add_argument(
        "--out", type=Path, required=True, help="verdicts as JSON; what is there is not asked again"
    )
    parser.add_argument("--only", help="these lines, with commas")
    parser.add_argument("--n", type=int, default=60, help="questions of a task at one effort, at most")
    given = parser.parse_args(arguments)
    checkpoint = locate(given.checkpoint)
    lines = LINES
    if given.only is not None:
        wanted = [name.strip() for name in given.only.split(",")]
        if unknown := set(wanted) - {line.name for line in LINES}:
            parser.error(
                f"there is no line {sorted(unknown)[0]!r}; lines are {', '.join(line.name for line in LINES)}"
            )
        lines = tuple(line for line in LINES if line.name in wanted)
    kept = kept_in(
        given.out, checkpoint, f"python -m pocket.accept {given.checkpoint} --n {given.n}", "lines"
    )

    def keep() -> None:
        write_kept(given.out, kept)

    accept(checkpoint, lines, given.n, kept["lines"], keep)
    print(as_markdown(kept["lines"]), end="")
    if any(kept["lines"].get(line.name, {}).get("verdict") != "pass" for line in lines):
        sys.exit(1)


if __name__ == "__main__":
    main()


__all__ = ["accept", "as_markdown", "main"]
