"""`deskfleet score`: where the logits are and what they hash to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deskfleet.cli.flags import (
    ENGINE,
    CheckpointArgument,
    EngramPack,
    EngramSecondSource,
    Graphs,
    Json,
    OnDevice,
    TensorParallel,
)
from deskfleet.cli.terminal import print_json


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("score")(run)


def run(
    checkpoint: CheckpointArgument,
    ids: Annotated[
        Path, typer.Option("--ids", metavar="FILE", help="JSON list of token ids, e.g. [0, 17, 42].")
    ],
    logits: Annotated[
        Path, typer.Option("--logits", metavar="FILE", help="safetensors file to write, replaced if there.")
    ],
    tp: TensorParallel = ENGINE.tp_size,
    chunk: Annotated[
        int | None,
        typer.Option("--chunk", metavar="N", help="Tokens of one step. [default: all at once]"),
    ] = None,
    engram_pack: EngramPack = ENGINE.engram_pack,
    engram_second_source: EngramSecondSource = ENGINE.engram_second_source,
    device: OnDevice = ENGINE.device,
    graphs: Graphs = ENGINE.graphs,
    as_json: Json = False,
) -> None:
    """Write the logits of every position of a token sequence.

    Teacher-forced: row i ranks the token after position i. The file holds float32 [tokens, vocabulary] under the
    key `logits`, and appears complete or not at all.
    """
    from deskfleet.score import read_token_ids, score_to_file

    score = score_to_file(
        checkpoint,
        read_token_ids(ids),
        logits,
        tp_size=tp,
        chunk=chunk,
        engram_pack=engram_pack,
        engram_second_source=engram_second_source,
        device=device,
        graphs=graphs,
    )
    if as_json:
        print_json(
            {
                "path": str(score.path),
                "shape": list(score.shape),
                "sha256": score.sha256,
                "seconds": round(score.seconds_s, 3),
            }
        )
    else:
        rows, columns = score.shape
        print(f"{score.path}: float32 [{rows}, {columns}], sha256 {score.sha256}, {score.seconds_s:.1f} s")


__all__ = ["register", "run"]
