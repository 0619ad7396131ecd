"""`deskfleet eval`: asks a checkpoint or a server, shows each batch as it is judged, and the table at the end."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from deskfleet.cli.flags import (
    ENGINE,
    HOST,
    PORT,
    EngramPack,
    EngramSecondSource,
    Graphs,
    Json,
    MaxModelLen,
    OnDevice,
    Speculate,
    default_of,
)
from deskfleet.cli.serve import serve_beside
from deskfleet.cli.terminal import data_console, parse_counts, print_json, printable, say
from deskfleet.engine.client import EngineOptions
from deskfleet.errors import ConfigError
from deskfleet.evaluation.run import EvalSettings
from deskfleet.model.embedded import POCKET, locate

if TYPE_CHECKING:
    from deskfleet.evaluation.report import Report
    from deskfleet.evaluation.run import Batch


def _default(name: str) -> str:
    values = default_of(EvalSettings, name)
    return ",".join("off" if value is None else str(value) for value in values)


_NUM_QUESTIONS: int = default_of(EvalSettings, "num_questions")
_SEED: int = default_of(EvalSettings, "seed")
_CONCURRENCY: int = default_of(EvalSettings, "concurrency")


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("eval")(run)


def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|URL", help=f"A directory to serve, {POCKET}, or a server's address."
        ),
    ] = f"http://{HOST}:{PORT}",
    tasks: Annotated[
        str | None, typer.Option("--tasks", metavar="A,B,...", help="Ask these only. [default: all]")
    ] = None,
    n: Annotated[
        int, typer.Option("--n", metavar="N", help="Questions of each task at each effort, at most.")
    ] = _NUM_QUESTIONS,
    efforts: Annotated[
        str, typer.Option("--efforts", metavar="E,E,...", help="off, or a reasoning effort of 1 to 100.")
    ] = _default("efforts"),
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Which questions, where there are more.")
    ] = _SEED,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", help="Questions asked at the same time.")
    ] = _CONCURRENCY,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", metavar="N", help="Longest answer. [default: what each question needs]"),
    ] = None,
    needle_tokens: Annotated[
        str, typer.Option("--needle-tokens", metavar="N,N,...", help="Lengths of the texts to search.")
    ] = _default("needle_tokens"),
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="Ranks, when a CHECKPOINT is served. [default: 1]")
    ] = None,
    max_model_len: MaxModelLen = None,
    speculate: Speculate = ENGINE.speculation,
    engram_pack: EngramPack = ENGINE.engram_pack,
    engram_second_source: EngramSecondSource = ENGINE.engram_second_source,
    device: OnDevice = ENGINE.device,
    graphs: Graphs = ENGINE.graphs,
    as_json: Json = False,
) -> None:
    """Ask questions with known answers, and say how many are right.

    The questions are Pocket's, asked over HTTP with greedy decoding; a CHECKPOINT is served meanwhile. It measures and
    judges nothing: exit code 0 whatever the rates, 3 when nobody answers.
    """
    settings = EvalSettings(
        tasks=EvalSettings().tasks if tasks is None else tuple(tasks.split(",")),
        efforts=_efforts(efforts),
        num_questions=n,
        seed=seed,
        concurrency=concurrency,
        max_tokens=max_tokens,
        needle_tokens=parse_counts(needle_tokens, "--needle-tokens"),
    )
    engine = EngineOptions(
        tp_size=ENGINE.tp_size if tp is None else tp,
        max_model_len=max_model_len,
        speculation=speculate,
        engram_pack=engram_pack,
        engram_second_source=engram_second_source,
        device=device,
        graphs=graphs,
    )
    with ExitStack() as stack:
        if not target.startswith(("http://", "https://")):
            url = serve_beside(stack, locate(target), engine)
        elif engine != ENGINE:
            raise ConfigError(f"how the model is run is decided by the server at {target}")
        else:
            url = target
        from deskfleet.evaluation.run import evaluate

        report = asyncio.run(evaluate(url, settings, on_batch=_say_batch))
    if as_json:
        print_json({"target": target, **report.to_dict()})
    else:
        _print(report)


def _efforts(text: str) -> tuple[int | None, ...]:
    """Return the efforts in `text`, e.g. `off,50`. Raises ConfigError for what is none."""
    return tuple(
        None if part == "off" else parse_counts(part, "an effort of --efforts")[0] for part in text.split(",")
    )


def _say_batch(batch: Batch) -> None:
    from deskfleet.evaluation.report import effort_name

    found = (
        f"{len(batch.outcomes)} asked"
        if batch.num_right is None
        else f"{batch.num_right} of {len(batch.outcomes)} right"
    )
    unanswered = f", {batch.num_unanswered} unanswered" if batch.num_unanswered else ""
    say(
        f"{batch.position} of {batch.total}: {batch.task}, effort {effort_name(batch.effort)}: {found}{unanswered} "
        f"({batch.seconds_s:.1f} s)"
    )


def _print(report: Report) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from deskfleet.evaluation.report import effort_name, failures, mean_reasoning_tokens, rates, speed

    console = data_console()
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("task", no_wrap=True)
    for name in (*map(effort_name, report.efforts), "asked", "tok/s", "accepted"):
        table.add_column(name, justify="right", no_wrap=True)
    by_effort = [rates(report.at(effort)) for effort in report.efforts]
    for each in report.runs:
        shares = ["" if each.task not in found else f"{found[each.task]:.0%}" for found in by_effort]
        tok_s = speed(each)["tok_s_per_stream"]
        table.add_row(
            each.task,
            *shares,
            str(len(each.outcomes)),
            "" if tok_s is None else f"{tok_s:.1f}",
            "" if each.drafts is None else f"{each.drafts.mean_accepted:.2f}",
        )
    lengths = [mean_reasoning_tokens(report.at(effort)) for effort in report.efforts]
    table.add_section()
    table.add_row(
        "thought tokens", *("" if length is None else f"{length:.0f}" for length in lengths), "", "", ""
    )
    console.print(table)
    for failure in failures(report.outcomes):
        answer = failure["error"] or f"answered {failure['answer']!r} for {failure['expected']!r}"
        line = printable(f"{failure['task']}, effort {failure['effort']}: {answer}")
        console.print(line.replace("\n", " "), overflow="ellipsis", no_wrap=True)


__all__ = ["register", "run"]
