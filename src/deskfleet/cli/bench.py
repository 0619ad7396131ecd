"""`deskfleet bench`: runs a suite, shows each sample as it comes, and the table at the end."""

from __future__ import annotations

import asyncio
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from deskfleet.bench.engine import DecodeSuite, measure_decode
from deskfleet.bench.engram import ReaderResult, measure_reader
from deskfleet.bench.provenance import Provenance
from deskfleet.bench.result import Result, Sample, Spread, result_path
from deskfleet.cli.flags import CheckpointArgument, Json, ThreadsPerRank, default_of
from deskfleet.cli.terminal import data_console, parse_counts, print_json, say
from deskfleet.errors import ConfigError

_SUITE = {
    name: default_of(DecodeSuite, name) for name in DecodeSuite.__dataclass_fields__ if name != "checkpoint"
}

Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Keep the result in this new file.")]
OutDir = Annotated[
    Path | None, typer.Option("--out-dir", metavar="DIR", help="Keep it there, named by date and suite.")
]


def register(app: typer.Typer) -> None:
    """Add the verb, with its suites, to `app`."""
    suites = typer.Typer(rich_markup_mode=None)
    suites.callback()(bench)
    suites.command("engine")(engine)
    suites.command("engram")(engram)
    app.add_typer(suites, name="bench")


def bench() -> None:
    """Measure, and keep the numbers with their provenance.

    Each suite prints its raw samples with --json and keeps them with --out or --out-dir; a file that exists is
    never overwritten.
    """


def engine(
    checkpoint: CheckpointArgument,
    tp: Annotated[
        str, typer.Option("--tp", metavar="N,N,...", help="Numbers of ranks to compare.")
    ] = ",".join(map(str, _SUITE["tp_sizes"])),
    batch: Annotated[
        str, typer.Option("--batch", metavar="N,N,...", help="Numbers of streams at the same time.")
    ] = ",".join(map(str, _SUITE["batches"])),
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", help="Tokens to generate per stream.")
    ] = _SUITE["num_tokens"],
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="N", help="Tokens of each prompt.")
    ] = _SUITE["num_prompt_tokens"],
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", help="Rounds that count, after one of warm-up.")
    ] = _SUITE["rounds"],
    threads_per_rank: ThreadsPerRank = _SUITE["threads_per_rank"],
    out: Out = None,
    out_dir: OutDir = None,
    as_json: Json = False,
) -> None:
    """Decode speed of the engine, by ranks and batch.

    Engines of all sizes run side by side and take turns, so that the ratios hold on a busy machine too.
    """
    suite = DecodeSuite(
        checkpoint=checkpoint,
        tp_sizes=parse_counts(tp, "--tp"),
        batches=parse_counts(batch, "--batch"),
        num_tokens=tokens,
        num_prompt_tokens=prompt_tokens,
        rounds=rounds,
        threads_per_rank=threads_per_rank,
    )
    command = shlex.join(["deskfleet", *sys.argv[1:]])
    result = asyncio.run(measure_decode(suite, Provenance.capture(command), on_sample=_say_sample))
    _keep(result, out, out_dir)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(result))
    else:
        _print_table(result)


def engram(
    quick: Annotated[bool, typer.Option("--quick", help="Less than a minute, on a small pack.")] = False,
    size: Annotated[
        float | None,
        typer.Option("--size", metavar="GIB", min=0.01, max=1024, help="Size of the pack. [default: 8]"),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--directory", metavar="DIR", help="Where the pack is made. [default: here]"),
    ] = None,
    pack: Annotated[
        Path | None, typer.Option("--pack", metavar="PACK", help="Measure on this pack; packing is left out.")
    ] = None,
    out: Out = None,
    out_dir: OutDir = None,
    as_json: Json = False,
) -> None:
    """Speed of the row store, beside fio and other ways of reading.

    Makes a pack of random rows and asks for the rows of real text, every method in its turn. `python -m
    deskfleet_engram.bench` does the same without deskfleet, and without provenance.
    """
    from deskfleet_engram.bench.run import Settings, lines_of

    if out is not None and out.exists():
        raise ConfigError(f"{out} exists; results are never overwritten", hint="name another file")
    settings = Settings.of(quick=quick, directory=directory, size_gib=size, pack_dir=pack)
    command = shlex.join(["deskfleet", *sys.argv[1:]])
    result = measure_reader(settings, Provenance.capture(command), say=say)
    _keep(result, out, out_dir)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(result))
    else:
        for line in lines_of(result.measurement):
            print(line)


def _keep(result: Result | ReaderResult, out: Path | None, out_dir: Path | None) -> None:
    if out_dir is not None:
        out = result_path(out_dir, result.name, date.fromisoformat(result.provenance.date[:10]))
    if out is not None:
        result.write(out)
        say(f"wrote {out}")


def _say_sample(sample: Sample) -> None:
    which = f"round {sample.round}" if sample.round else "warm-up"
    say(
        f"{which}: TP {sample.tp_size}, batch {sample.batch}: {sample.aggregate_tok_s:.1f} tok/s aggregate "
        f"({sample.seconds_s:.1f} s)"
    )


def _print_table(result: Result) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("TP", "batch", "tok/s aggregate", "tok/s per stream"):
        table.add_column(name, justify="right", no_wrap=True)
    for tp_size, batch in result.configurations():
        rates = result.aggregate(tp_size, batch), result.per_stream(tp_size, batch)
        table.add_row(str(tp_size), str(batch), *map(_cell, rates))
    data_console().print(table)


def _cell(spread: Spread) -> str:
    return f"{spread.median:.1f} [{spread.least:.1f}-{spread.greatest:.1f}]"


__all__ = ["register"]
