"""`deskfleet inspect`: a checkpoint's report as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from deskfleet.cli.flags import CheckpointArgument, Json
from deskfleet.cli.terminal import data_console, print_json, say
from deskfleet.errors import CheckpointError
from deskfleet.model.inspect import Architecture, Inspection, RankBytes, inspect_checkpoint
from deskfleet.units import format_bytes

_RANKS_ACROSS = 4


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("inspect")(run)


def run(
    checkpoint: CheckpointArgument,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", min=1, help="Also show each of N ranks.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a checkpoint holds, and what each rank would hold.

    Reads headers only. Exit code 3 when something is wrong with the checkpoint.
    """
    inspection = inspect_checkpoint(checkpoint, tp)
    if as_json:
        print_json(inspection.to_dict())
    else:
        _print(inspection)
    if inspection.problems:
        raise typer.Exit(CheckpointError.exit_code)


def _print(inspection: Inspection) -> None:
    console = data_console()
    console.print(str(inspection.directory), style="bold", soft_wrap=True)
    if inspection.architecture is not None:
        console.print(_architecture(inspection.architecture))
    if inspection.contents is not None:
        contents = inspection.contents
        console.print(
            f"{contents.num_tensors:,} tensors in {contents.num_files:,} files, "
            f"{contents.total_bytes:,} bytes ({format_bytes(contents.total_bytes)})",
            soft_wrap=True,
        )
        by_class = {kind.value: num_bytes for kind, num_bytes in contents.bytes_by_class.items()}
        console.print()
        console.print(_shares("class", by_class, contents.total_bytes))
        console.print()
        console.print(_shares("dtype", contents.bytes_by_dtype, contents.total_bytes))
    for start in range(0, len(inspection.ranks), _RANKS_ACROSS):
        console.print()
        console.print(_ranks(inspection.ranks[start : start + _RANKS_ACROSS]))
    _print_problems(inspection.problems)


def _print_problems(problems: tuple[str, ...]) -> None:
    if not problems:
        say("no problems")
        return
    say(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}:")
    for problem in problems:
        say(f"  {problem}")


def _architecture(architecture: Architecture) -> Table:
    engram = ", ".join(map(str, architecture.engram_layer_ids)) or "none"
    facts = {
        "model": architecture.model_type,
        "layers": f"{architecture.num_layers}, and {architecture.num_draft_layers} draft stages",
        "width": f"{architecture.hidden_size:,}",
        "vocabulary": f"{architecture.vocab_size:,}",
        "context": f"{architecture.max_position_embeddings:,} tokens",
        "experts": f"{architecture.num_experts:,}, {architecture.num_chosen_experts} chosen",
        "Engram layers": engram,
        "vision": "yes" if architecture.has_vision else "no",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _shares(title: str, parts: Mapping[str, int], total_bytes: int) -> Table:
    table = _table(title, "bytes", "size", "share")
    for name, num_bytes in parts.items():
        if num_bytes:
            table.add_row(name, f"{num_bytes:,}", format_bytes(num_bytes), f"{num_bytes / total_bytes:.1%}")
    return table


def _ranks(ranks: Sequence[RankBytes]) -> Table:
    """Classes down, ranks across: `_RANKS_ACROSS` of them fit 80 columns."""
    table = _table("per rank", *(f"rank {rank.rank}" for rank in ranks))
    for kind in ranks[0].bytes_by_class:
        sizes = [rank.bytes_by_class[kind] for rank in ranks]
        if any(sizes):
            table.add_row(kind.value, *map(format_bytes, sizes))
    table.add_row("padding", *(format_bytes(rank.padding_bytes) for rank in ranks))
    table.add_section()
    table.add_row("total", *(format_bytes(rank.total_bytes) for rank in ranks))
    return table


__all__ = ["register", "run"]
