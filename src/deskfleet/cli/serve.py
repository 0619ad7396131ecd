"""`deskfleet serve`: progress while loading, where it answers, and its end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from deskfleet.cli.loading import LoadReport
from deskfleet.cli.terminal import Json, default_of, print_json, say
from deskfleet.engine.client import EngineOptions
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.serve import Ready, ServeEvent, ServeOptions, default_model_id, serve

CheckpointArgument = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Directory of the checkpoint.")]
TensorParallel = Annotated[int, typer.Option("--tp", metavar="N", min=1, help="Ranks to split the model over.")]
Host = Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every network.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 is any free one.")]
MaxModelLen = Annotated[
    int | None,
    typer.Option("--max-model-len", metavar="TOKENS", help="Longest prompt plus answer. [default: the model's]"),
]
ThreadsPerRank = Annotated[
    int | None,
    typer.Option("--threads-per-rank", min=1, help="CPU threads of a rank. [default: the cores, shared out]"),
]


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("serve")(run)


def run(
    checkpoint: CheckpointArgument,
    tp: TensorParallel = default_of(EngineOptions, "tp_size"),
    host: Host = default_of(GatewaySettings, "host"),
    port: Port = default_of(GatewaySettings, "port"),
    max_model_len: MaxModelLen = default_of(EngineOptions, "max_model_len"),
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", min=1, help="Requests that run at the same time.")
    ] = default_of(EngineOptions, "max_num_seqs"),
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", min=1, help="Tokens of one step, over all requests.")
    ] = default_of(EngineOptions, "max_num_batched_tokens"),
    served_model_name: Annotated[
        str | None,
        typer.Option("--served-model-name", metavar="NAME", help="Name for clients. [default: the directory's]"),
    ] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking/--no-thinking", help="Think where a request does not say.")
    ] = default_of(GatewaySettings, "default_thinking"),
    threads_per_rank: ThreadsPerRank = default_of(EngineOptions, "threads_per_rank"),
    as_json: Json = False,
) -> None:
    """Serve a checkpoint on an OpenAI-compatible endpoint.

    The port opens when every rank is ready and has answered; with --json, one object on stdout says so. Ctrl-C
    or SIGTERM stops it: exit code 0. If a rank dies, everything stops: exit code 3.
    """
    options = ServeOptions(
        gateway=GatewaySettings(
            model_id=served_model_name or default_model_id(checkpoint),
            checkpoint=checkpoint,
            host=host,
            port=port,
            default_thinking=thinking,
        ),
        engine=EngineOptions(
            tp_size=tp,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            threads_per_rank=threads_per_rank,
        ),
    )
    with LoadReport() as report:

        def on_event(event: ServeEvent) -> None:
            report.show(event)
            if isinstance(event, Ready):
                print_json(ready_object(event)) if as_json else say(how_to_talk(event))

        asyncio.run(serve_until_signal(options, on_event))
    say("stopped")


async def serve_until_signal(options: ServeOptions, on_event: Callable[[ServeEvent], None]) -> None:
    """Serve until SIGINT or SIGTERM, which is how a server is meant to be stopped."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await serve(options, on_event=on_event, until=stop)


def ready_object(event: Ready) -> dict[str, Any]:
    """Return what --json prints when the port is open."""
    return {
        "event": "ready",
        "url": event.endpoint.url,
        "model": event.endpoint.model_id,
        "max_model_len": event.endpoint.max_model_len,
        "tp_size": event.tp_size,
        "ranks": [dataclasses.asdict(rank) for rank in event.ranks],
    }


def how_to_talk(event: Ready) -> str:
    """Return where the server answers and a command that makes it do so."""
    endpoint = event.endpoint
    body = {"model": endpoint.model_id, "messages": [{"role": "user", "content": "Hello"}]}
    data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return (
        f"{endpoint.model_id} answers at {endpoint.url}/v1 (context {endpoint.max_model_len} tokens). "
        "Ctrl-C stops it. Try:\n"
        f"  curl {endpoint.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{data}'\n"
        f"  deskfleet chat {endpoint.url}"
    )


__all__ = ["how_to_talk", "ready_object", "register", "run", "serve_until_signal"]
