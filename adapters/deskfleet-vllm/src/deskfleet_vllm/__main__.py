"""What is done beside the engine: write the rows that a mapped store reads, print digests, prove a store.

    python -m deskfleet_vllm split PACK CHECKPOINT --rank R --world-size N [--to DIR]
    python -m deskfleet_vllm digests                        in an environment with vLLM
    python -m deskfleet_vllm prove PACK CHECKPOINT [--store callback] [--lookups 1000]      the same, or with
        --kernel-source FILE, vLLM's engram.py, where only torch and Triton are
    python -m deskfleet_vllm generate PACK CHECKPOINT --source FILE [--store callback] [--tokens 256]
        the same of whole Engram layers of that file, which generate tokens

Exit codes are those of the package of errors: 1 the answer is no, 2 bad input, 3 a machine or file failed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from deskfleet_engram.errors import EngramError
from deskfleet_engram.host import HostRows, source_sha256
from deskfleet_engram.host_split import write_split
from deskfleet_engram.manifest import read_manifest
from deskfleet_engram.native import NativeOptions, RowCache
from deskfleet_engram.ownership import ColumnOwnership
from deskfleet_engram.proof import write_proof
from deskfleet_vllm import release_0_33 as release
from deskfleet_vllm.config import STORES

FAULTS = 1e-3
"""Share of reads that fail in the second half of a proof, so that some steps go well before one does not."""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    chosen = _parser().parse_args(arguments)
    try:
        return int(chosen.verb(chosen))
    except EngramError as error:
        print(f"deskfleet-vllm: {error}", file=sys.stderr)
        return error.exit_code


def open_rank(
    pack_dir: Path,
    checkpoint: Path,
    rank: int,
    world_size: int,
    *,
    options: NativeOptions | None = None,
    cache: RowCache | None = None,
) -> HostRows:
    """Open the columns that vLLM gives a rank: runs of equal length, the last ones shorter. Raises EngramError."""
    owners = ColumnOwnership.split(_num_columns(pack_dir), world_size, "contiguous")
    return HostRows.open(
        pack_dir,
        checkpoint,
        rank=rank,
        world_size=world_size,
        columns=owners.columns(rank),
        options=options,
        cache=cache,
    )


def _num_columns(pack_dir: Path) -> int:
    return read_manifest(pack_dir).identity.geometry.spec.num_columns


def _split(chosen: argparse.Namespace) -> int:
    with open_rank(chosen.pack, chosen.checkpoint, chosen.rank, chosen.world_size) as rows:
        for table in rows.tables.values():
            path = write_split(table, rows.manifest.identity.sha256.hex(), chosen.to or chosen.pack / "split")
            print(f"{path}: {table.num_rows} rows of layer {table.layer}")
    return 0


def _digests(chosen: argparse.Namespace) -> int:
    engram = importlib.import_module(release.MODULE)
    state = getattr(importlib.import_module(release.STATE_MODULE), release.STATE_CLASS)
    for name, target in {**release.sources(engram), **release.state_sources(state)}.items():
        print(f'    "{name}": "{source_sha256(target)}",')
    return 0


def _prove(chosen: argparse.Namespace) -> int:
    from deskfleet_vllm.prove import prove, prove_failure  # here, because the other verbs work without torch

    if chosen.kernel_source is None:
        engram: Any = importlib.import_module(release.MODULE)
    else:
        engram = importlib.import_module("deskfleet_vllm.standalone").load(chosen.kernel_source)
    told = {"store": chosen.store, "num_lookups": chosen.lookups}
    place = (chosen.pack, chosen.checkpoint, chosen.rank, chosen.world_size)
    said: list[str] = []
    seconds: dict[str, list[float]] = {}
    with open_rank(*place) as rows:
        for line in prove(engram, rows, chosen.checkpoint, **told, seconds=seconds):
            print(line, flush=True)
            said.append(line)
    failing = NativeOptions(faults=f"seed=1,eio={FAULTS}", retries=0)
    with open_rank(*place, options=failing, cache=RowCache(0)) as rows:
        said.append(prove_failure(engram, rows, chosen.checkpoint, **told))
        print(said[-1], flush=True)
        if chosen.result is not None:
            write_proof(chosen.result, said, seconds)
        if chosen.store == "callback":
            os._exit(0)  # the device has stopped for this process, which is not to tidy up on it
    return 0


def _generate(chosen: argparse.Namespace) -> int:
    from deskfleet_vllm.generate import generate

    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="deskfleet-vllm-") as receipts:
        lines = generate(
            chosen.source,
            chosen.pack,
            chosen.checkpoint,
            Path(receipts),
            store=chosen.store,
            num_tokens=chosen.tokens,
            seconds=seconds,
        )
        said = []
        for line in lines:
            print(line, flush=True)
            said.append(line)
        if chosen.result is not None:
            write_proof(chosen.result, said, seconds)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deskfleet_vllm")
    verbs = parser.add_subparsers(required=True)
    for name, verb in (("split", _split), ("prove", _prove), ("generate", _generate)):
        added = verbs.add_parser(name)
        added.set_defaults(verb=verb)
        added.add_argument("pack", type=Path)
        added.add_argument("checkpoint", type=Path)
        if name != "split":
            added.add_argument(
                "--result", type=Path, metavar="FILE", help="what was measured goes here, as JSON"
            )
        if name != "generate":
            added.add_argument("--rank", type=int, default=0)
            added.add_argument("--world-size", type=int, default=1)
        if name == "split":
            added.add_argument("--to", type=Path, help="by default PACK/split")
            continue
        added.add_argument(
            "--store", choices=[name for name in STORES if name != "mapped"], default="callback"
        )
        if name == "prove":
            added.add_argument("--lookups", type=int, default=1000)
            added.add_argument("--kernel-source", type=Path, metavar="FILE")
        else:
            added.add_argument("--tokens", type=int, default=256)
            added.add_argument("--source", type=Path, metavar="FILE", required=True)
    verbs.add_parser("digests").set_defaults(verb=_digests)
    return parser


if __name__ == "__main__":
    sys.exit(main())
