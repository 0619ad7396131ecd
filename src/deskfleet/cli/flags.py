"""Flags that several verbs have, and the defaults all of them read from the dataclasses they set.

Each default exists once, where the value is used; a flag holds no copy of it.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deskfleet.engine.client import EngineOptions
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.model.device import Device
from deskfleet.model.embedded import POCKET, locate
from deskfleet.model.limits import PrefixReplay

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CheckpointArgument = Annotated[
    Path,
    typer.Argument(metavar="CHECKPOINT", callback=locate, help=f"Directory of the checkpoint, or {POCKET}."),
]
Json = Annotated[bool, typer.Option("--json", help="Print results as JSON on stdout, one object a line.")]
TensorParallel = Annotated[int, typer.Option("--tp", metavar="N", help="Ranks to split the model over.")]
Host = Annotated[
    str, typer.Option("--host", metavar="ADDRESS", help="Where to listen; 0.0.0.0 is every network.")
]
Port = Annotated[int, typer.Option("--port", metavar="PORT", help="Port to listen on; 0 is any free one.")]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len", metavar="TOKENS", help="Longest prompt plus answer. [default: the model's]"
    ),
]
ThreadsPerRank = Annotated[
    int | None,
    typer.Option(
        "--threads-per-rank",
        metavar="N",
        min=1,
        help="CPU threads of each rank. [default: the cores, shared out]",
    ),
]
EngramPack = Annotated[
    Path | None,
    typer.Option(
        "--engram-pack", metavar="DIR", help="Pack to read Engram rows from. [default: the published shards]"
    ),
]
EngramSecondSource = Annotated[
    bool,
    typer.Option(
        "--engram-second-source",
        help="Rows that the pack cannot give are read from the published shards, and counted.",
    ),
]

DecodeContextParallel = Annotated[
    int, typer.Option("--dcp", metavar="N", help="Ranks of --tp that share out the KV cache; divides --tp.")
]
Speculate = Annotated[
    str,
    typer.Option(
        "--speculate",
        metavar="HOW",
        help="Draft tokens ahead: off, a number, or e.g. k=5,accept=block,cap=conf:0.1.",
    ),
]
KvCacheTokens = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-tokens",
        metavar="N",
        min=1,
        help="Tokens the KV cache holds, over all requests. [default: what 1 GiB holds]",
    ),
]
BlockSize = Annotated[
    int, typer.Option("--block-size", metavar="N", min=1, help="Tokens of one cache block.")
]
WindowTails = Annotated[
    int,
    typer.Option("--window-tails", metavar="N", min=0, help="Ended requests whose window stays at hand."),
]
PrefixCache = Annotated[
    bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Reuse what earlier prompts began with.")
]
Replay = Annotated[
    PrefixReplay,
    typer.Option(
        "--prefix-replay", help="A lost window: run one window again, or as many as give the same bits."
    ),
]
DecoderReplay = Annotated[
    bool,
    typer.Option(
        "--decoder-replay/--no-decoder-replay",
        help="Read prompts with half the work; answers are near those of the full model, not equal.",
    ),
]

OnDevice = Annotated[Device, typer.Option("--device", help="Where the ranks compute.")]
Graphs = Annotated[
    bool,
    typer.Option("--graphs/--no-graphs", help="On a GPU: launch a step as one graph, or kernel by kernel."),
]

ENGINE = EngineOptions()
"""How a checkpoint is run when nobody says otherwise."""


def default_of(kind: type[DataclassInstance], name: str) -> Any:
    """Return the default of a dataclass's field, for a class that cannot be made from defaults alone."""
    field = next(field for field in fields(kind) if field.name == name)
    if field.default is MISSING:
        raise LookupError(f"{kind.__name__}.{name} has no default")
    return field.default


HOST: str = default_of(GatewaySettings, "host")
PORT: int = default_of(GatewaySettings, "port")
THINKING: bool = default_of(GatewaySettings, "default_thinking")

__all__ = [
    "ENGINE",
    "HOST",
    "PORT",
    "THINKING",
    "BlockSize",
    "CheckpointArgument",
    "DecodeContextParallel",
    "DecoderReplay",
    "EngramPack",
    "EngramSecondSource",
    "Graphs",
    "Host",
    "Json",
    "KvCacheTokens",
    "MaxModelLen",
    "OnDevice",
    "Port",
    "PrefixCache",
    "Replay",
    "Speculate",
    "TensorParallel",
    "ThreadsPerRank",
    "WindowTails",
    "default_of",
]
