"""`deskfleet smoke`: asks the launch gates, shows each verdict as it falls, the table, and what to do about failures.

`deskfleet verify` asks more gates in the same way, with what is here: the flags, the progress, the outputs.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deskfleet.cli.flags import ENGINE, HOST, PORT, Json, MaxModelLen, Speculate, default_of
from deskfleet.cli.serve import serve_beside
from deskfleet.cli.terminal import data_console, print_json, printable, say
from deskfleet.engine.client import EngineOptions
from deskfleet.errors import ConfigError
from deskfleet.gates.contract import Limits
from deskfleet.model.embedded import POCKET, locate

if TYPE_CHECKING:
    from deskfleet.gates.contract import Gate
    from deskfleet.gates.report import GateResult, Report
    from deskfleet.gates.subject import Progress, Session

Target = Annotated[
    str,
    typer.Argument(metavar="URL|CHECKPOINT", help=f"A server's address, a directory to serve, or {POCKET}."),
]
Only = Annotated[
    list[str] | None, typer.Option("--only", "--gate", metavar="NAME", help="Ask this gate; may be repeated.")
]
Skip = Annotated[
    list[str] | None,
    typer.Option("--skip", metavar="NAME", help="Leave this gate out; may be repeated."),
]
Evidence = Annotated[
    Path | None,
    typer.Option("--evidence", metavar="DIR", help="Keep every exchange and the reports there."),
]
JUnit = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Write the verdicts as JUnit XML.")
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the report as one page.")]
Repeat = Annotated[
    int,
    typer.Option("--repeat", metavar="N", min=1, help="Ask each gate N times; one failure fails it."),
]
Questions = Annotated[
    str | None,
    typer.Option("--questions", metavar="FAMILY", help="pocket or general. [default: by the model's name]"),
]
Model = Annotated[str | None, typer.Option("--model", metavar="NAME", help="The model that must be served.")]
Concurrency = Annotated[
    int, typer.Option("--concurrency", metavar="N", min=1, help="The most streams at once.")
]
Patience = Annotated[
    float,
    typer.Option("--patience", metavar="S", help="Seconds a server may be silent, reading a prompt apart."),
]
Chunk = Annotated[
    int,
    typer.Option("--chunk", metavar="TOKENS", min=64, help="Tokens of a prompt the server reads in a step."),
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Ask the same again. [default: new values]")
]
KeyFile = Annotated[
    Path | None, typer.Option("--key-file", metavar="FILE", help="File with the server's API key.")
]
Tp = Annotated[
    int | None, typer.Option("--tp", metavar="N", help="Ranks, when a CHECKPOINT is served. [default: 1]")
]

DEFAULT_TARGET = f"http://{HOST}:{PORT}"
CONCURRENCY: int = default_of(Limits, "concurrency")
PATIENCE_S: float = default_of(Limits, "patience_s")
CHUNK_TOKENS: int = default_of(Limits, "chunk_tokens")
_LONG_PROMPT_S: float = default_of(Limits, "long_prompt_s")
_PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True)
class Asking:
    """How gates are asked, and where what they found goes."""

    verb: str
    target: str
    only: Sequence[str]
    skip: Sequence[str]
    family: str | None
    rounds: int
    key_file: Path | None
    engine: EngineOptions
    evidence: Path | None
    junit: Path | None
    html: Path | None
    as_json: bool
    flags: tuple[str, ...]


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("smoke")(run)


def run(
    target: Target = DEFAULT_TARGET,
    only: Only = None,
    skip: Skip = None,
    questions: Questions = None,
    model: Model = None,
    concurrency: Concurrency = CONCURRENCY,
    patience: Patience = PATIENCE_S,
    chunk: Chunk = CHUNK_TOKENS,
    long_prompt: Annotated[
        float,
        typer.Option("--long-prompt", metavar="S", help="Seconds that the longest prompt may take."),
    ] = _LONG_PROMPT_S,
    seed: Seed = None,
    repeat: Repeat = 1,
    evidence: Evidence = None,
    junit: JUnit = None,
    html: Html = None,
    key_file: KeyFile = None,
    tp: Tp = None,
    max_model_len: MaxModelLen = None,
    speculate: Speculate = ENGINE.speculation,
    as_json: Json = False,
) -> int:
    """Ask the launch gates, in seconds: may traffic open?

    Of any OpenAI-compatible server, or of a CHECKPOINT that is served meanwhile. Exit code 1 when a gate fails, 3 when
    nobody answers or nothing could be shown. Without --evidence, what failed is kept in a temporary directory.
    """
    from deskfleet.gates.registry import LAUNCH_GATES

    limits = Limits(
        expected_model=model,
        concurrency=concurrency,
        patience_s=patience,
        chunk_tokens=chunk,
        long_prompt_s=long_prompt,
        seed=seed,
    )
    asking = Asking(
        verb="smoke",
        target=target,
        only=only or (),
        skip=skip or (),
        family=questions,
        rounds=repeat,
        key_file=key_file,
        engine=engine_options(tp, max_model_len, speculate),
        evidence=evidence,
        junit=junit,
        html=html,
        as_json=as_json,
        flags=given_flags(
            questions=questions, model=model, tp=tp, speculate=speculate, concurrency=concurrency
        ),
    )
    return ask_gates(LAUNCH_GATES, limits, asking)


def engine_options(tp: int | None, max_model_len: int | None, speculate: str) -> EngineOptions:
    """Return how a checkpoint is served meanwhile."""
    return EngineOptions(
        tp_size=ENGINE.tp_size if tp is None else tp, max_model_len=max_model_len, speculation=speculate
    )


def given_flags(
    *, questions: str | None, model: str | None, tp: int | None, speculate: str, concurrency: int
) -> tuple[str, ...]:
    """Return the flags that the command for one gate repeats: those that change what is asked."""
    flags: list[str] = []
    for name, value, default in (
        ("--questions", questions, None),
        ("--model", model, None),
        ("--tp", tp, None),
        ("--speculate", speculate, ENGINE.speculation),
        ("--concurrency", concurrency, CONCURRENCY),
    ):
        if value != default:
            flags += [name, str(value)]
    return tuple(flags)


def ask_gates(gates: Sequence[Gate], limits: Limits, asking: Asking) -> int:
    """Ask `gates`, show what they find, write what is to be written; return the exit code."""
    from deskfleet.bench.provenance import Provenance
    from deskfleet.gates.run import run_gates, select

    chosen = select(gates, asking.only, asking.skip)
    origin = Provenance.capture(shlex.join(["deskfleet", *sys.argv[1:]]))
    with ExitStack() as stack:
        if asking.target.startswith(("http://", "https://")):
            if asking.engine != ENGINE:
                raise ConfigError(f"how the model is run is decided by the server at {asking.target}")
            url = asking.target
        else:
            url = serve_beside(stack, locate(asking.target), asking.engine)
        report = asyncio.run(
            run_gates(
                url,
                chosen,
                limits,
                verb=asking.verb,
                target=asking.target,
                key=_key(asking.key_file),
                family=asking.family,
                flags=asking.flags,
                provenance={
                    "command": origin.command,
                    "commit": origin.commit or "",
                    "python": origin.python,
                    "asked from": f"{origin.cpu}, {origin.num_cores} cores, load {origin.load_average[0]:.1f}",
                },
                rounds=asking.rounds,
                on_start=lambda session: _say_start(session, len(chosen)),
                on_result=_say_result,
                on_progress=_Talk().say,
            )
        )
    report = _write(report, asking)
    if asking.as_json:
        print_json(report.to_dict())
    else:
        _print(report)
    return report.exit_code


def _key(path: Path | None) -> str | None:
    """Return the key in a file. Raises ConfigError."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the key in {path}: {error}") from error


def _write(report: Report, asking: Asking) -> Report:
    from deskfleet.gates.evidence import write_evidence, write_text
    from deskfleet.gates.junit import to_junit
    from deskfleet.gates.page import to_page

    directory = None if asking.evidence is None else str(asking.evidence)
    if directory is None and report.counts["fail"]:
        directory = tempfile.mkdtemp(prefix=f"deskfleet-{asking.verb}-")
    if directory is not None:
        report = write_evidence(report, directory)
    if asking.junit is not None:
        write_text(asking.junit, to_junit(report))
    if asking.html is not None:
        write_text(asking.html, to_page(report))
    return report


def _say_start(session: Session, num_gates: int) -> None:
    limit = "" if session.model.max_model_len is None else f", {session.model.max_model_len:,} tokens"
    say(f"{session.model.id} at {session.client.url}{limit}: {num_gates} gates")
    say(f"questions: {session.questions.name}, because {session.questions.reason}")


def _say_result(result: GateResult) -> None:
    finding = result.finding
    said = finding.measured if finding.verdict == "pass" else finding.reason
    say(f"{finding.verdict:4}  {result.gate.name} ({result.seconds_s:.1f} s): {printable(said)}")


class _Talk:
    """Tells how far long gates are, now and then."""

    def __init__(self) -> None:
        self._said_at: dict[str, float] = {}

    def say(self, progress: Progress) -> None:
        """Say a line when the last one about this gate is a while ago."""
        now = time.monotonic()
        if now - self._said_at.setdefault(progress.gate, now) < _PROGRESS_S:
            return
        self._said_at[progress.gate] = now
        left = "" if progress.eta_s is None else f", about {progress.eta_s:.0f} s left"
        rate = "" if progress.unit == "s" else f", {progress.rate:,.1f} a second"
        say(
            f"      {progress.gate}: {progress.done:,.0f} of {progress.total:,.0f} {progress.unit}{rate}{left}"
        )


def _print(report: Report) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console = data_console()
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("verdict", no_wrap=True)
    table.add_column("gate", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    table.add_column("measured", overflow="fold")
    for result in report.results:
        measured = printable(result.finding.measured)
        table.add_row(result.verdict, result.gate.name, f"{result.seconds_s:.1f}", measured)
    console.print(table)
    for result in report.results:
        if result.verdict == "pass":
            continue
        console.print(
            f"{result.verdict}: {result.gate.name}: {printable(result.finding.reason)}", soft_wrap=True
        )
        if result.verdict == "fail":
            console.print(f"      again: {report.command(result)}", soft_wrap=True)
    counts = report.counts
    console.print(
        f"verdict: {report.verdict} ({counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped) "
        f"in {report.seconds_s:.1f} s",
        soft_wrap=True,
    )
    if report.evidence_dir is not None:
        console.print(f"evidence: {report.evidence_dir} (report.html is the page)", soft_wrap=True)


__all__ = ["Asking", "ask_gates", "engine_options", "given_flags", "register", "run"]
