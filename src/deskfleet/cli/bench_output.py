"""What the suites of `deskfleet bench` share on a terminal: keeping a result, printing a table."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Protocol

from deskfleet.bench.provenance import Provenance
from deskfleet.bench.result import result_path
from deskfleet.cli.terminal import data_console, say

_WIDEST = 100_000


class Kept(Protocol):
    """A result that knows its name and can be written once."""

    @property
    def name(self) -> str: ...

    @property
    def provenance(self) -> Provenance: ...

    def write(self, path: Path) -> None: ...


def keep(result: Kept, out: Path | None, out_dir: Path | None) -> None:
    """Write the result at `out`, or in `out_dir` under its name and date. Raises ConfigError when it cannot be."""
    if out_dir is not None:
        out = result_path(out_dir, result.name, date.fromisoformat(result.provenance.date[:10]))
    if out is not None:
        result.write(out)
        say(f"wrote {out}")


def print_rows(head: list[str], rows: list[list[str]], *, first_left: bool = False) -> None:
    """Print a table on stdout. Where that is no terminal it is as wide as it must be: a pipe cuts nothing off."""
    from rich.box import SIMPLE_HEAD
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, name in enumerate(head):
        is_left = first_left and number == 0
        table.add_column(name, justify="left" if is_left else "right", no_wrap=not is_left)
    for row in rows:
        table.add_row(*row)
    console = data_console()
    if not console.is_terminal:
        unbounded = console.options.update(max_width=_WIDEST)
        console.width = max(console.width, Measurement.get(console, unbounded, table).maximum)
    console.print(table)


__all__ = ["keep", "print_rows"]
