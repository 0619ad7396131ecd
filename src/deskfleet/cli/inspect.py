"""`deskfleet inspect`: a checkpoint's or a pack's report as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from deskfleet.cli.flags import Json
from deskfleet.cli.terminal import data_console, print_json, say
from deskfleet.errors import CheckpointError, ConfigError, PackError, WrongPack
from deskfleet.model.embedded import POCKET, locate
from deskfleet.model.inspect import (
    Architecture,
    Inspection,
    PackedLayerContents,
    PackFit,
    PackInspection,
    RankBytes,
    inspect_checkpoint,
    inspect_pack,
)
from deskfleet.model.packs import is_pack, spell_missing
from deskfleet.units import format_bytes
from deskfleet_engram.ownership import spell_numbers

_RANKS_ACROSS = 4


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("inspect")(run)


def run(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT|PACK",
            callback=locate,
            help=f"Directory of a checkpoint or a pack, or {POCKET}.",
        ),
    ],
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", min=1, help="Also show each of N ranks.")
    ] = None,
    engram_pack: Annotated[
        Path | None,
        typer.Option(
            "--engram-pack",
            metavar="DIR",
            help="Also say whether this pack is of CHECKPOINT and covers each rank.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a checkpoint or a pack holds, and what is wrong.

    Of a checkpoint only headers are read; of a pack manifest, file ends and random blocks. Exit code 3 when
    something is wrong with it, 1 when --engram-pack is of another checkpoint or lacks columns of a rank.
    """
    if is_pack(directory):
        if tp is not None or engram_pack is not None:
            raise ConfigError(
                f"{directory} is a pack; --tp and --engram-pack go with a checkpoint",
                hint=f"deskfleet inspect CHECKPOINT --engram-pack {directory} --tp N",
            )
        _inspect_pack(directory, as_json=as_json)
        return
    inspection = inspect_checkpoint(directory, tp, engram_pack=engram_pack)
    if as_json:
        print_json(inspection.to_dict())
    else:
        _print(inspection)
    if inspection.problems:
        raise typer.Exit(CheckpointError.exit_code)
    if inspection.pack is not None and not inspection.pack.is_fit:
        raise typer.Exit(WrongPack.exit_code)


def _inspect_pack(directory: Path, *, as_json: bool) -> None:
    inspection = inspect_pack(directory)
    if as_json:
        print_json(inspection.to_dict())
    else:
        _print_pack(inspection)
    if inspection.problems:
        raise typer.Exit(PackError.exit_code)


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
    if inspection.pack is not None:
        _print_fit(inspection.pack)
    _print_problems(inspection.problems)


def _print_fit(fit: PackFit) -> None:
    console = data_console()
    verdict = "is of this checkpoint" if fit.mismatch is None else f"does not belong: {fit.mismatch}"
    console.print(f"\npack {fit.directory}: {verdict}", soft_wrap=True)
    for rank, missing in enumerate(fit.missing):
        lacks = f"lacks {spell_missing(missing)}" if missing else "covered"
        console.print(f"  rank {rank}: {lacks}", soft_wrap=True)


def _print_pack(inspection: PackInspection) -> None:
    console = data_console()
    console.print(str(inspection.directory), style="bold", soft_wrap=True)
    if inspection.identity:
        source = inspection.identity["source"]
        facts = {
            "checkpoint": f"{source['repo'] or 'unnamed'}, revision {source['revision'] or 'unknown'}",
            "pack": f"{inspection.pack_id}, {inspection.format}",
            "written by": inspection.written_by or "",
            "size": f"{inspection.total_bytes:,} bytes ({format_bytes(inspection.total_bytes)})",
        }
        console.print(_facts(facts))
        console.print()
        console.print(_packed_layers(inspection.layers))
    if inspection.is_unfinished:
        say("packing was interrupted; the same deskfleet pack goes on from there")
    _print_problems(inspection.problems)


def _packed_layers(layers: Sequence[PackedLayerContents]) -> Table:
    table = _table("layer", "columns", "of", "rows", "of", "bytes")
    for layer in layers:
        held = spell_numbers(layer.columns)
        numbers = (layer.num_columns, layer.num_rows, layer.total_rows, layer.num_bytes)
        table.add_row(str(layer.layer), held, *(f"{number:,}" for number in numbers))
    return table


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
    return _facts(facts)


def _facts(facts: Mapping[str, str]) -> Table:
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
