"""`deskfleet facts`: what an engine was asked for and what it granted, from its boot logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deskfleet.cli.bench_output import print_rows
from deskfleet.cli.flags import Json
from deskfleet.cli.terminal import print_json
from deskfleet.errors import ConfigError

if TYPE_CHECKING:
    from deskfleet.bootfacts.facts import FactSheet


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("facts")(run)


def run(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help="Boot logs, one file or one for each rank.")
    ],
    as_json: Json = False,
) -> int:
    """Say what an engine was asked for, and what it granted.

    Reads boot logs of vLLM, SGLang and deskfleet, and sets ranks side by side. Exit code 1 when something was clamped,
    replaced or is missing, or when ranks differ that must not.
    """
    from deskfleet.bootfacts.sheet import read_sheet

    sheet = read_sheet(read_logs(logs))
    if as_json:
        print_json(as_object(sheet))
    else:
        _print(sheet)
    return 1 if any(flag.kind != "warned" for flag in sheet.flags) else 0


def read_logs(paths: list[Path]) -> dict[str, str]:
    """Return the text of each file by its name. Raises ConfigError for one that cannot be read."""
    found: dict[str, str] = {}
    for path in paths:
        try:
            found[str(path)] = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    return found


def as_object(sheet: FactSheet) -> dict[str, Any]:
    """Return the sheet for programs."""
    return {
        "engine": sheet.engine,
        "facts": [
            {
                "key": row.key,
                "asked": row.asked,
                "granted": {
                    "all" if rank is None else str(rank): value for rank, value in row.granted.items()
                },
            }
            for row in sheet.rows
        ],
        "flags": [{"kind": flag.kind, "key": flag.key, "text": flag.text} for flag in sheet.flags],
    }


def _print(sheet: FactSheet) -> None:
    from deskfleet.bootfacts.facts import SPECS
    from deskfleet.bootfacts.sheet import show

    ranks = sorted({rank for row in sheet.rows for rank in row.granted if rank is not None})
    rows = []
    for row in sheet.rows:
        asked = "" if row.asked is None else show(row.key, row.asked)
        cells = [show(row.key, row.granted[rank]) if rank in row.granted else "" for rank in (None, *ranks)]
        rows.append([SPECS[row.key].meaning, asked, *cells])
    print(f"{sheet.engine}")
    print_rows(["", "asked", "granted", *(f"rank {rank}" for rank in ranks)], rows, first_left=True)
    for flag in sheet.flags:
        print(f"{flag.kind}: {flag.text}")


__all__ = ["as_object", "read_logs", "register", "run"]
