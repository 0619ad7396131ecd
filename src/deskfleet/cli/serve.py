"""`deskfleet serve`: progress while loading, where it answers, and its end.

Other verbs serve a checkpoint for as long as they need it, in the same way (`serve_beside`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deskfleet.cli.flags import (
    ENGINE,
    HOST,
    PORT,
    THINKING,
    BlockSize,
    CheckpointArgument,
    DecodeContextParallel,
    DecoderReplay,
    EngramPack,
    EngramSecondSource,
    Graphs,
    Host,
    Json,
    KvCacheTokens,
    MaxModelLen,
    OnDevice,
    Port,
    PrefixCache,
    Replay,
    Speculate,
    TensorParallel,
    ThreadsPerRank,
    WindowTails,
)
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
from deskfleet.engine.client import EngineOptions
from deskfleet.gateway.loop import run_server, settle
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.model.device import DEFAULT_MAX_NUM_BATCHED_TOKENS as STEP_TOKENS

if TYPE_CHECKING:  # the gateway and the engine are imported when they are started: --help needs neither
    from deskfleet.serve import Ready, ServeEvent, ServeOptions


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("serve")(run)


def run(
    checkpoint: CheckpointArgument,
    tp: TensorParallel = ENGINE.tp_size,
    host: Host = HOST,
    port: Port = PORT,
    max_model_len: MaxModelLen = ENGINE.max_model_len,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", metavar="N", min=1, help="Requests that run at the same time.")
    ] = ENGINE.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens",
            metavar="N",
            min=1,
            help=f"Tokens of one step, over all requests. [default: {STEP_TOKENS['cpu']}; on a GPU "
            f"{STEP_TOKENS['cuda']:,}]",
        ),
    ] = ENGINE.max_num_batched_tokens,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name", metavar="NAME", help="The model's name. [default: the directory's]"
        ),
    ] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking/--no-thinking", help="Think where a request does not say.")
    ] = THINKING,
    threads_per_rank: ThreadsPerRank = ENGINE.threads_per_rank,
    dcp: DecodeContextParallel = ENGINE.dcp_size,
    speculate: Speculate = ENGINE.speculation,
    kv_cache_tokens: KvCacheTokens = ENGINE.kv_cache_tokens,
    block_size: BlockSize = ENGINE.block_size,
    window_tails: WindowTails = ENGINE.num_window_tails,
    prefix_cache: PrefixCache = ENGINE.prefix_cache,
    prefix_replay: Replay = ENGINE.prefix_replay,
    decoder_replay: DecoderReplay = ENGINE.decoder_replay,
    engram_pack: EngramPack = ENGINE.engram_pack,
    engram_second_source: EngramSecondSource = ENGINE.engram_second_source,
    device: OnDevice = ENGINE.device,
    graphs: Graphs = ENGINE.graphs,
    policies: PoliciesFile = None,
    keys: KeysFile = None,
    access_log: AccessLogFile = None,
    traces: TracesUrl = None,
    debug_answers: DebugAnswers = 0,
    as_json: Json = False,
) -> None:
    """Serve a checkpoint on an OpenAI-compatible endpoint.

    The port opens when every rank is ready and has answered; with --json, one object on stdout says so. Ctrl-C
    or SIGTERM stops it once running requests have finished, a second one at once: exit code 0. If a rank dies,
    everything stops: exit code 3.
    """
    from deskfleet.cli.loading import LoadReport
    from deskfleet.serve import Ready, ServeOptions, default_model_id

    model_id = served_model_name or default_model_id(checkpoint)
    options = ServeOptions(
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
        engine=EngineOptions(
            tp_size=tp,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            threads_per_rank=threads_per_rank,
            dcp_size=dcp,
            speculation=speculate,
            kv_cache_tokens=kv_cache_tokens,
            block_size=block_size,
            num_window_tails=window_tails,
            prefix_cache=prefix_cache,
            prefix_replay=prefix_replay,
            decoder_replay=decoder_replay,
            engram_pack=engram_pack,
            engram_second_source=engram_second_source,
            device=device,
            graphs=graphs,
        ),
    )
    with LoadReport(shows_memory=True) as report:

        def on_event(event: ServeEvent) -> None:
            report.show(event)
            if isinstance(event, Ready):
                settle()
                warn_if_open(host, options.gateway.policies)
                announce(event, as_json=as_json)

        run_server(serve_until_signal(options, on_event))
    say("stopped")


async def serve_until_signal(options: ServeOptions, on_event: Callable[[ServeEvent], None]) -> None:
    """Serve until SIGINT or SIGTERM, which is how a server is meant to be stopped."""
    from deskfleet.serve import serve

    await serve(options, on_event=on_event, until=stop_on_signals(options.gateway.policies))


def serve_beside(stack: ExitStack, checkpoint: Path, engine: EngineOptions) -> str:
    """Serve `checkpoint` on a free port, showing how it loads, until `stack` is left. Return where it answers."""
    from deskfleet.cli.loading import LoadReport
    from deskfleet.serve import ServeOptions, ServerThread, default_model_id

    options = ServeOptions(
        gateway=GatewaySettings(model_id=default_model_id(checkpoint), checkpoint=checkpoint, port=0),
        engine=engine,
    )
    with LoadReport() as report:
        ready = stack.enter_context(ServerThread(options, on_event=report.show))
    return ready.endpoint.url


def announce(event: Ready, *, as_json: bool) -> None:
    """Say that the port is open: one object on stdout, or how to talk to it on stderr."""
    if as_json:
        print_json(ready_object(event))
        return
    endpoint = event.endpoint
    say(
        f"{endpoint.model_id} answers at {endpoint.url}/v1 ({endpoint.max_model_len:,} tokens). Ctrl-C stops it."
    )
    if event.engram is not None:
        second = f", then {event.engram.second_source}" if event.engram.second_source else ""
        say(f"Engram rows: {event.engram.source}{second}; {event.engram.backend}")
    say(f"operators: {event.ranks[0].operators}")
    if event.tp_size > 1:
        say(f"collectives: {event.ranks[0].collectives}")
    say(how_to_talk(event))


def ready_object(event: Ready) -> dict[str, Any]:
    """Return what --json prints when the port is open."""
    return {
        "event": "ready",
        "url": event.endpoint.url,
        "model": event.endpoint.model_id,
        "max_model_len": event.endpoint.max_model_len,
        "tp_size": event.tp_size,
        "engram": None if event.engram is None else dataclasses.asdict(event.engram),
        "ranks": [dataclasses.asdict(rank) for rank in event.ranks],
        "memory": [dataclasses.asdict(check) for check in event.memory],
    }


def how_to_talk(event: Ready) -> str:
    """Return two commands, either of which gets an answer; they can be pasted into a shell."""
    endpoint = event.endpoint
    body = {"model": endpoint.model_id, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
    data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return (
        f"  curl {endpoint.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{data}'\n"
        f"  {own_command()} chat {endpoint.url}"
    )


__all__ = ["announce", "how_to_talk", "ready_object", "register", "run", "serve_beside", "serve_until_signal"]
