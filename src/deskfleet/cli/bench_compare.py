"""`deskfleet bench compare` and `bench published`: two results side by side, or one beside what was claimed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from deskfleet.bench.compare import Comparison, Row
from deskfleet.bench.compare import compare as compare_results
from deskfleet.bench.published import QUANTITIES, PublishedFigure, published_figures
from deskfleet.bench.series import read_comparable
from deskfleet.cli.bench_output import print_rows
from deskfleet.cli.flags import Json
from deskfleet.cli.terminal import print_json

_SAID = {"better": "better", "worse": "worse", "noise": "within noise", "too few": "too few rounds"}


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A result file.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The one to hold against it.")],
    vary: Annotated[
        list[str] | None,
        typer.Option("--vary", metavar="NAME", help="A condition that is meant to differ, or machine."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say whether two results differ by more than noise.

    Refuses, with exit code 1 and every difference named, when they were not measured under the same conditions.
    """
    found = compare_results(read_comparable(a), read_comparable(b), vary=vary or ())
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    print_rows(
        ["what", "unit", "A", "B", "B/A", "95% of noise", "rounds", ""],
        [_cells(row) for row in found.rows],
        first_left=True,
    )
    for line in _lines(found):
        print(line)


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        row.unit,
        f"{row.a:,.1f}",
        f"{row.b:,.1f}",
        f"{row.ratio:.3f}",
        f"{row.low:.3f}-{row.high:.3f}",
        "/".join(map(str, row.num_clusters)),
        _SAID[row.verdict],
    ]


def _lines(found: Comparison) -> list[str]:
    lines = [f"under test: {each}" for each in found.varied]
    lines += [f"also differs: {each}" for each in found.told]
    lines += [f"only in A: {name}" for name in found.only_in_a]
    lines += [f"only in B: {name}" for name in found.only_in_b]
    return lines + [f"note: {note}" for note in found.notes]


def published(
    result: Annotated[
        Path | None, typer.Argument(metavar="RESULT", help="A result of `bench serve` to set beside them.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the figures that recipes published, with their conditions; with RESULT, beside ours.

    A ratio is no verdict while anything differs: what does is named in each row.
    """
    if result is None:
        _list_figures(as_json=as_json)
        return
    from deskfleet.bench.load.record import LoadResult
    from deskfleet.bench.published import beside_published

    rows = beside_published(LoadResult.read(result))
    if as_json:
        print_json([{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows])
        return
    for row in rows:
        print(
            f"{_title(row.published)}: published {row.published.value:,.1f}, here {row.ours:,.1f} ({row.ratio:.2f})"
        )
        for line in (*row.differences, *_flaw(row.published)):
            print(f"  {line}")
    if not rows:
        print("no published figure is of a kind and size that was measured here")


def _list_figures(*, as_json: bool) -> None:
    figures = published_figures()
    if as_json:
        print_json([dataclasses.asdict(figure) for figure in figures])
        return
    for figure in figures:
        conditions = ", ".join(f"{name} {value}" for name, value in figure.conditions.items())
        print(f"{_title(figure)}: {figure.value:,.1f} ({conditions})")
        for line in _flaw(figure):
            print(f"  {line}")


def _title(figure: PublishedFigure) -> str:
    size = f"{figure.at:,} tokens" if figure.quantity == "prefill_tok_s" else f"{figure.at} streams"
    return f"{figure.source}, {QUANTITIES[figure.quantity]}, {figure.case}, {size}"


def _flaw(figure: PublishedFigure) -> tuple[str, ...]:
    return () if figure.flaw is None else (f"flaw: {figure.flaw}",)


def register(suites: typer.Typer) -> None:
    """Add both to `deskfleet bench`."""
    suites.command("compare")(compare)
    suites.command("published")(published)


__all__ = ["register"]
