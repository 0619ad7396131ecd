"""`deskfleet gateway`: the gateway alone, in front of vLLM or SGLang servers that run already."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deskfleet.cli.flags import HOST, PORT, THINKING, Host, Json, Port
from deskfleet.cli.serving import (
    AccessLogFile,
    DebugAnswers,
    KeysFile,
    PoliciesFile,
    TracesUrl,
    observed,
    open_policies,
    stop_on_signals,
    warn_if_open,
)
from deskfleet.cli.terminal import own_command, print_json, say
from deskfleet.errors import ConfigError
from deskfleet.gateway.loop import run_server, settle
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.gateway.upstream.options import UpstreamOptions

if TYPE_CHECKING:  # the gateway is imported when it is started: --help needs none of it
    from deskfleet.gateway.upstream.serving import FrontEvent, FrontOptions, FrontReady

UPSTREAM = UpstreamOptions()
"""How an engine is talked to when nobody says otherwise."""


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("gateway")(run)


def run(
    upstream: Annotated[
        str,
        typer.Option(
            "--upstream", metavar="URL[,URL...]", help="Where the engines answer; replicas of one model."
        ),
    ],
    engine: Annotated[Literal["vllm", "sglang"], typer.Option("--engine", help="What they are.")],
    checkpoint: Annotated[
        Path,
        typer.Option(
            "--checkpoint", metavar="DIR", help="Directory with their model's tokenizer.json and config.json."
        ),
    ],
    host: Host = HOST,
    port: Port = PORT,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name", metavar="NAME", help="The model's name here. [default: the directory's]"
        ),
    ] = None,
    upstream_model: Annotated[
        str | None,
        typer.Option(
            "--upstream-model", metavar="NAME", help="Its name there. [default: the first they serve]"
        ),
    ] = None,
    upstream_key_file: Annotated[
        Path | None,
        typer.Option("--upstream-key-file", metavar="FILE", help="Holds the key that the engines ask for."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            metavar="TOKENS",
            help="Longest prompt plus answer. [default: the engines' least]",
        ),
    ] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking/--no-thinking", help="Think where a request does not say.")
    ] = THINKING,
    wait: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=0, help="Wait so long for an engine that still loads."),
    ] = 0.0,
    silence: Annotated[
        float,
        typer.Option("--silence", metavar="SECONDS", help="Silence after which an engine is looked at."),
    ] = UPSTREAM.silence_s,
    stall: Annotated[
        float, typer.Option("--stall", metavar="SECONDS", help="How long its counters may then stand still.")
    ] = UPSTREAM.stall_s,
    policies: PoliciesFile = None,
    keys: KeysFile = None,
    access_log: AccessLogFile = None,
    traces: TracesUrl = None,
    debug_answers: DebugAnswers = 0,
    as_json: Json = False,
) -> None:
    """Serve what vLLM or SGLang servers run already.

    The port opens when one of them has answered; with --json, one object on stdout says so. Ctrl-C or SIGTERM stops
    it: exit code 0. The engines go on. Without an engine that answers: exit code 3.
    """
    from deskfleet.gateway.upstream.serving import FrontOptions, FrontReady, parse_urls
    from deskfleet.serve import default_model_id

    model_id = served_model_name or default_model_id(checkpoint)
    options = FrontOptions(
        gateway=GatewaySettings(
            model_id=model_id,
            checkpoint=checkpoint,
            host=host,
            port=port,
            default_thinking=thinking,
            policies=open_policies(policies, keys, model_id=model_id),
            observation=observed(access_log, traces),
            debug_answers=debug_answers,
        ),
        urls=parse_urls(upstream),
        engine=engine,
        upstream=UpstreamOptions(
            api_key=None if upstream_key_file is None else read_key(upstream_key_file),
            model=upstream_model,
            max_model_len=max_model_len,
            silence_s=silence,
            stall_s=stall,
        ),
        wait_s=wait,
    )

    def on_event(event: FrontEvent) -> None:
        if isinstance(event, FrontReady):
            settle()
            warn_if_open(host, options.gateway.policies)
            announce(event, as_json=as_json)
        else:
            say(f"waiting for an engine: {event.reason}")

    run_server(_serve_until_signal(options, on_event))
    say("stopped")


async def _serve_until_signal(options: FrontOptions, on_event: Callable[[FrontEvent], None]) -> None:
    from deskfleet.gateway.upstream.serving import serve_front
    from deskfleet.serve import check_port

    stop = stop_on_signals(options.gateway.policies)
    await serve_front(options, check_address=check_port, on_event=on_event, until=stop)


def read_key(path: Path) -> str:
    """Return the key in a file, without the line's end. Raises ConfigError for a missing or empty file."""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"cannot read --upstream-key-file {path}: {reason}") from error
    if not key:
        raise ConfigError(f"--upstream-key-file {path} is empty")
    return key


def announce(event: FrontReady, *, as_json: bool) -> None:
    """Say that the port is open: one object on stdout, or how to talk to it on stderr."""
    if as_json:
        print_json(ready_object(event))
        return
    endpoint = event.endpoint
    say(
        f"{endpoint.model_id} answers at {endpoint.url}/v1 ({endpoint.max_model_len:,} tokens). Ctrl-C stops it."
    )
    for replica in event.replicas:
        state = "answers" if replica.state == "closed" else f"does not answer yet: {replica.reason}"
        say(f"  {replica.engine} {replica.url} {state}")
    if not event.exact_tokens:
        say(
            "These engines send text, not tokens: counts are near, not exact, and there are no log probabilities."
        )
    say(f"  {own_command()} chat {endpoint.url}")


def ready_object(event: FrontReady) -> dict[str, Any]:
    """Return what --json prints when the port is open."""
    return {
        "event": "ready",
        "url": event.endpoint.url,
        "model": event.endpoint.model_id,
        "max_model_len": event.endpoint.max_model_len,
        "engine": event.engine,
        "exact_tokens": event.exact_tokens,
        "upstreams": [dataclasses.asdict(replica) for replica in event.replicas],
    }


__all__ = ["announce", "read_key", "ready_object", "register", "run"]
