"""`deskfleet bench cross-check`: the same work by our load generator and by others, side by side."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deskfleet.bench.load.prompts import KINDS
from deskfleet.cli.bench_output import print_rows
from deskfleet.cli.flags import HOST, PORT, Json
from deskfleet.cli.terminal import print_json, say
from deskfleet.errors import ConfigError
from deskfleet.model.embedded import POCKET, locate

if TYPE_CHECKING:
    from deskfleet.bench.load.other_programs import Figures


def cross_check(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The server's address.")
    ] = f"http://{HOST}:{PORT}",
    programs: Annotated[
        str,
        typer.Option("--with", metavar="P[=FILE],...", help="vllm, aiperf; found on PATH, or at FILE."),
    ] = "vllm,aiperf",
    prompts: Annotated[
        str, typer.Option("--prompts", metavar="K", help=f"One of {', '.join(KINDS)}.")
    ] = "prose",
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", help="Streams at the same time.")
    ] = 4,
    requests: Annotated[int, typer.Option("--requests", metavar="N", help="Requests of each program.")] = 16,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="max_tokens of each answer.")] = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers run on to max_tokens, past their end.")
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="DIR",
            help=f"The model's, or {POCKET}: for vllm, where usage comes with the last piece of text.",
        ),
    ] = None,
    together: Annotated[
        bool,
        typer.Option("--together", help="Both at the same time: a busy machine is busy for both."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Measure the same with `vllm bench serve` and aiperf, where they are installed.

    Ours runs before and after each of them, or beside it. Exit code 1 when tokens are more than 5 % apart, or a rate
    is more than 10 % below both of our runs or above them.
    """
    from deskfleet.bench.load.cross_check import cross_check as check
    from deskfleet.bench.load.suite import LoadSuite

    suite = LoadSuite(kinds=(prompts,), concurrency=(concurrency,), num_tokens=tokens, ignore_eos=ignore_eos)
    found = asyncio.run(
        check(
            url,
            suite,
            kind=prompts,
            concurrency=concurrency,
            num_requests=requests,
            programs=_programs(programs),
            tokenizer=None if tokenizer is None else str(locate(tokenizer)),
            together=together,
            on_figures=_say,
        )
    )
    agrees = all(each.agrees for each in found.others)
    if as_json:
        print_json({**dataclasses.asdict(found), "agrees": agrees})
        return 0 if agrees else 1
    rows = [_cells(figures) for figures in found.ours]
    rows += [
        [*_cells(each.figures)[:-1], f"{each.rate_ratio:.3f}{'' if each.agrees else ' apart'}"]
        for each in found.others
    ]
    head = ["program", "answered", "tokens", "tok/s", "TTFT mean, ms", "TPOT mean, ms", "rate / ours"]
    print_rows(head, rows, first_left=True)
    for name in found.absent:
        print(f"absent: {name} is not installed here")
    return 0 if agrees else 1


def _programs(text: str) -> dict[str, Path | None]:
    from deskfleet.bench.load.other_programs import PROGRAMS

    found: dict[str, Path | None] = {}
    for part in text.split(","):
        name, _, path = part.partition("=")
        if name not in PROGRAMS:
            raise ConfigError(f"--with: there is no {name!r}", hint=f"known are {', '.join(PROGRAMS)}")
        found[name] = Path(path) if path else None
    return found


def _say(figures: Figures) -> None:
    say(f"{figures.program}: {figures.num_completed} answered at {figures.output_tok_s:,.1f} tok/s")


def _cells(figures: Figures) -> list[str]:
    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:,.1f}"

    tokens = "" if figures.num_output_tokens is None else f"{figures.num_output_tokens:,}"
    failed = f", {figures.num_failed} failed" if figures.num_failed else ""
    return [
        figures.program,
        f"{figures.num_completed}{failed}",
        tokens,
        f"{figures.output_tok_s:,.1f}",
        ms(figures.mean_ttft_ms),
        ms(figures.mean_tpot_ms),
        "",
    ]


__all__ = ["cross_check"]
