"""`deskfleet bench`: runs a suite, shows each sample as it comes, and the table at the end."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deskfleet import env
from deskfleet.bench.engine import DecodeSuite, measure_decode
from deskfleet.bench.engram import measure_reader
from deskfleet.bench.provenance import Provenance
from deskfleet.bench.report import ways_head, ways_rows
from deskfleet.bench.result import Result, Sample, Spread
from deskfleet.bench.serving import (
    PrefixSuite,
    SpeculationSuite,
    WaySample,
    WaysResult,
    measure_prefix,
    measure_speculation,
)
from deskfleet.cli import bench_compare, bench_cross_check, bench_gateway, bench_serve
from deskfleet.cli.bench_output import keep, print_rows
from deskfleet.cli.flags import CheckpointArgument, Json, ThreadsPerRank, default_of
from deskfleet.cli.terminal import parse_counts, print_json, say
from deskfleet.errors import ConfigError


def _defaults(kind: type[DecodeSuite | PrefixSuite | SpeculationSuite]) -> dict[str, Any]:
    return {name: default_of(kind, name) for name in kind.__dataclass_fields__ if name != "checkpoint"}


_SUITE, _PREFIX, _SPECULATION = map(_defaults, (DecodeSuite, PrefixSuite, SpeculationSuite))

Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Keep the result in this new file.")]
OutDir = Annotated[
    Path | None, typer.Option("--out-dir", metavar="DIR", help="Keep it there, named by date and suite.")
]
Rounds = Annotated[
    int, typer.Option("--rounds", metavar="N", help="Rounds that count, after one of warm-up.")
]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", metavar="N", help="Tokens of each prompt.")]


def register(app: typer.Typer) -> None:
    """Add the verb, with its suites, to `app`."""
    suites = typer.Typer(rich_markup_mode=None)
    suites.callback()(bench)
    suites.command("serve")(bench_serve.serve)
    suites.command("gateway")(bench_gateway.gateway)
    suites.command("cross-check")(bench_cross_check.cross_check)
    bench_compare.register(suites)
    suites.command("engine")(engine)
    suites.command("prefix")(prefix)
    suites.command("speculation")(speculation)
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
    prompt_tokens: PromptTokens = _SUITE["num_prompt_tokens"],
    rounds: Rounds = _SUITE["rounds"],
    threads_per_rank: ThreadsPerRank = _SUITE["threads_per_rank"],
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="DIR", help="Every rank leaves a trace of some steps there. One --tp only."
        ),
    ] = None,
    out: Out = None,
    out_dir: OutDir = None,
    as_json: Json = False,
) -> None:
    """Decode speed of the engine, by ranks and batch.

    Engines of all sizes run side by side and take turns, so that the ratios hold on a busy machine too. Recording a
    trace slows the steps it records, and those are part of the numbers: look at the trace, not at them.
    """
    if trace is not None:
        if len(parse_counts(tp, "--tp")) > 1:
            raise ConfigError(f"--trace with --tp {tp}: every engine's rank 0 would write the same file")
        os.environ[env.TRACE_DIR.name] = str(trace.resolve())
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
    keep(result, out, out_dir)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(result))
    else:
        _print_table(result)


def prefix(
    checkpoint: CheckpointArgument,
    prompt_tokens: PromptTokens = _PREFIX["num_prompt_tokens"],
    turn_tokens: Annotated[
        int, typer.Option("--turn-tokens", metavar="N", help="Tokens of the new turn.")
    ] = _PREFIX["num_turn_tokens"],
    rounds: Rounds = _PREFIX["rounds"],
    threads_per_rank: ThreadsPerRank = _PREFIX["threads_per_rank"],
    out: Out = None,
    out_dir: OutDir = None,
    as_json: Json = False,
) -> None:
    """Time to the first token of a session that comes back.

    Cold, with its window still there, and with the window made again in both ways; four engines side by side.
    """
    suite = PrefixSuite(
        checkpoint=checkpoint,
        num_prompt_tokens=prompt_tokens,
        num_turn_tokens=turn_tokens,
        rounds=rounds,
        threads_per_rank=threads_per_rank,
    )
    command = shlex.join(["deskfleet", *sys.argv[1:]])
    result = asyncio.run(measure_prefix(suite, Provenance.capture(command), on_sample=_say_way))
    _show_ways(result, out, out_dir, as_json=as_json)


def speculation(
    checkpoint: CheckpointArgument,
    drafts: Annotated[
        str, typer.Option("--drafts", metavar="0,N,...", help="Numbers of drafts; 0 is off and comes first.")
    ] = ",".join(map(str, _SPECULATION["num_drafts"])),
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens to generate.")] = _SPECULATION[
        "num_tokens"
    ],
    prompt_tokens: PromptTokens = _SPECULATION["num_prompt_tokens"],
    ask: Annotated[
        list[str] | None,
        typer.Option(
            "--ask",
            metavar="TEXT",
            help="Instead of random tokens: a question, without thinking. Several take turns, a round each.",
        ),
    ] = None,
    rounds: Rounds = _SPECULATION["rounds"],
    threads_per_rank: ThreadsPerRank = _SPECULATION["threads_per_rank"],
    out: Out = None,
    out_dir: OutDir = None,
    as_json: Json = False,
) -> None:
    """Decode speed of one stream, by number of drafts.

    An engine for each number, side by side. Only a trained checkpoint shows what drafts are worth, and only with
    questions that it was trained for.
    """
    suite = SpeculationSuite(
        checkpoint=checkpoint,
        num_drafts=parse_counts(drafts, "--drafts"),
        num_tokens=tokens,
        num_prompt_tokens=prompt_tokens,
        questions=tuple(ask or ()),
        rounds=rounds,
        threads_per_rank=threads_per_rank,
    )
    command = shlex.join(["deskfleet", *sys.argv[1:]])
    result = asyncio.run(measure_speculation(suite, Provenance.capture(command), on_sample=_say_way))
    _show_ways(result, out, out_dir, as_json=as_json)


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
    keep(result, out, out_dir)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(result))
    else:
        for line in lines_of(result.measurement):
            print(line)


def _show_ways(result: WaysResult, out: Path | None, out_dir: Path | None, *, as_json: bool) -> None:
    keep(result, out, out_dir)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(result))
    else:
        print_rows(ways_head(result), ways_rows(result))


def _say_way(sample: WaySample) -> None:
    say(f"{_which(sample.round)}: {sample.way}: {sample.num_tokens} tokens in {sample.seconds_s:.2f} s")


def _which(number: int) -> str:
    return f"round {number}" if number else "warm-up"


def _say_sample(sample: Sample) -> None:
    say(
        f"{_which(sample.round)}: TP {sample.tp_size}, batch {sample.batch}: "
        f"{sample.aggregate_tok_s:.1f} tok/s aggregate ({sample.seconds_s:.1f} s)"
    )


def _print_table(result: Result) -> None:
    rows = []
    for tp_size, batch in result.configurations():
        rates = result.aggregate(tp_size, batch), result.per_stream(tp_size, batch)
        rows.append([str(tp_size), str(batch), *map(_cell, rates)])
    print_rows(["TP", "batch", "tok/s aggregate", "tok/s per stream"], rows)


def _cell(spread: Spread) -> str:
    return f"{spread.median:.1f} [{spread.least:.1f}-{spread.greatest:.1f}]"


__all__ = ["register"]
