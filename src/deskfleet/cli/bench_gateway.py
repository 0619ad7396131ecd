"""`deskfleet bench gateway`: what the gateway adds, beside the upstream alone and beside LiteLLM's proxy."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deskfleet.bench.provenance import Provenance
from deskfleet.cli.bench_output import keep, print_rows
from deskfleet.cli.flags import Json
from deskfleet.cli.terminal import parse_counts, print_json, say
from deskfleet.model.embedded import POCKET, locate

if TYPE_CHECKING:
    from deskfleet.bench.gateway.record import GatewayResult, GatewaySample

_OWN = ("-c", "import sys; from deskfleet.cli import main; sys.exit(main())")
_QUICK = {"rounds": 2, "seconds": 0.8}
_STREAMS = "1,32,256"
_ROUNDS, _SECONDS = 5, 3.0


def gateway(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Under a minute: two short rounds, and only what targets are about."),
    ] = False,
    streams: Annotated[
        str, typer.Option("--streams", metavar="N,N,...", help="Streams at the same time.")
    ] = _STREAMS,
    rounds: Annotated[
        int | None, typer.Option("--rounds", metavar="N", help=f"Rounds. [default: {_ROUNDS}]")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", metavar="S", help=f"Of each measurement. [default: {_SECONDS}]"),
    ] = None,
    litellm: Annotated[
        Path | None,
        typer.Option(
            "--litellm", metavar="FILE", help="LiteLLM's program. [default: of var/litellm, or on PATH]"
        ),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="DIR", help="Whose tokenizer and prompt format to use.")
    ] = POCKET,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Keep the result in this new file.")
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out-dir", metavar="DIR", help="Keep it there, named by date and suite.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What our gateway adds to the first token and takes of the rate.

    In front of an upstream over HTTP, with an engine inside, beside the upstream alone and LiteLLM's proxy, in turns.
    Every process is its own, so that a gateway's CPU is its own. Without LiteLLM the result says so.
    """
    from deskfleet.bench.gateway.run import GatewaySuite, measure_gateway

    directory = locate(checkpoint)
    suite = GatewaySuite(
        checkpoint=directory,
        front_command=lambda url: _front_command(url, directory),
        streams=parse_counts(streams, "--streams"),
        rounds=rounds if rounds is not None else int(_QUICK["rounds"]) if quick else _ROUNDS,
        seconds=seconds if seconds is not None else _QUICK["seconds"] if quick else _SECONDS,
        litellm=litellm,
        is_quick=quick,
    )
    command = shlex.join(["deskfleet", *sys.argv[1:]])
    result = measure_gateway(suite, Provenance.capture(command), on_sample=_say_sample)
    keep(result, out, out_dir)
    _show(result, as_json=as_json)


def _front_command(url: str, checkpoint: Path) -> tuple[str, ...]:
    flags = ("--upstream", url, "--engine", "vllm", "--checkpoint", str(checkpoint), "--port", "0")
    return (
        sys.executable, *_OWN, "gateway", *flags, "--served-model-name", "bench", "--no-thinking", "--json"
    )  # fmt: skip


def _say_sample(sample: GatewaySample) -> None:
    failed = f", {sample.num_failed} failed: {sample.failure}" if sample.num_failed else ""
    ttft_ms = sample.ttft(50)
    first = "" if ttft_ms is None else f", TTFT p50 {ttft_ms:.2f} ms"
    say(
        f"round {sample.round}: {sample.load.title}: {sample.way}: {sample.tokens_per_s:,.0f} tokens/s{first} "
        f"({sample.wall_s:.1f} s){failed}"
    )


def _show(result: GatewayResult, *, as_json: bool) -> None:
    import msgspec

    rows, verdicts = result.rows(), result.verdicts()
    if as_json:
        summary: dict[str, Any] = {
            "rows": msgspec.to_builtins(rows),
            "verdicts": msgspec.to_builtins(verdicts),
        }
        print_json({**msgspec.to_builtins(result), "summary": summary})
        return
    from deskfleet.bench.gateway.page import HEAD, cells

    print_rows(list(HEAD), [cells(row) for row in rows], first_left=True)
    print()
    for verdict in verdicts:
        measured = verdict.reason if verdict.measured is None else f"{verdict.measured:.2f}"
        word = {True: "met", False: "missed", None: "not measured"}[verdict.met]
        print(f"{word}: {verdict.target}: {measured}")
    for way, reason in result.absent.items():
        print(f"absent: {way}: {reason}")


__all__ = ["gateway"]
