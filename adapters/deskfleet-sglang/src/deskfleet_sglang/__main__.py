"""What is done beside the engine: write the rows that the mapped store reads, prove the callback store on a device.

    python -m deskfleet_sglang split PACK CHECKPOINT --rank R --world-size N [--to DIR]
    python -m deskfleet_sglang prove PACK CHECKPOINT [--lookups 1000]       in SGLang's image, with a CUDA device, or
        with --kernel-source FILE, SGLang's engram_gather.py, where only torch and Triton are

Exit codes as everywhere: 1 verdict no, 2 bad input, 3 a machine or file failed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from deskfleet_engram.errors import EngramError
from deskfleet_engram.host import HostRows
from deskfleet_engram.host_split import write_split
from deskfleet_engram.manifest import read_manifest
from deskfleet_engram.native import NativeOptions, RowCache
from deskfleet_engram.proof import write_proof
from deskfleet_sglang.adapter import columns_of

FAULTS = 1e-3
"""Share of reads that fail in the second half of a proof, so that some steps go well before one does not."""


def main(argv: list[str] | None = None) -> int:
    """Write one file per layer, and print their names."""
    parser = argparse.ArgumentParser(prog="python -m deskfleet_sglang", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("split", "prove"):
        verb = verbs.add_parser(name)
        verb.add_argument("pack", type=Path)
        verb.add_argument("checkpoint", type=Path)
        verb.add_argument("--rank", type=int, default=0)
        verb.add_argument("--world-size", type=int, default=1)
        if name == "split":
            verb.add_argument("--to", type=Path, default=None, help="by default PACK/split")
        else:
            verb.add_argument("--lookups", type=int, default=1000)
            verb.add_argument("--result", type=Path, metavar="FILE", help="what was measured, as JSON")
            verb.add_argument("--kernel-source", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    try:
        identity = read_manifest(given.pack).identity
        columns = columns_of(identity.geometry.spec.num_columns, given.rank, given.world_size)

        def opened(options: NativeOptions | None = None, cache: RowCache | None = None) -> HostRows:
            return HostRows.open(
                given.pack,
                given.checkpoint,
                rank=given.rank,
                world_size=given.world_size,
                columns=columns,
                options=options,
                cache=cache,
            )

        if given.verb == "prove":
            proof = importlib.import_module("deskfleet_sglang.prove")
            if given.kernel_source is not None:
                importlib.import_module("deskfleet_sglang.standalone").load(given.kernel_source)
            said: list[str] = []
            seconds: dict[str, list[float]] = {}
            with opened() as rows:
                for line in proof.prove(rows, given.checkpoint, given.lookups, seconds):
                    print(line, flush=True)
                    said.append(line)
            with opened(NativeOptions(faults=f"seed=1,eio={FAULTS}", retries=0), RowCache(0)) as broken:
                said.append(proof.check_failures(broken, given.checkpoint, given.lookups))
                print(said[-1])
            if given.result is not None:
                write_proof(given.result, said, seconds)
            return 0
        with opened() as rows:
            for table in rows.tables.values():
                print(write_split(table, identity.sha256.hex(), given.to or given.pack / "split"))
    except EngramError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
