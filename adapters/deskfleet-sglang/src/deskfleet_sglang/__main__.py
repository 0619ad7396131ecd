"""What is done beside the engine: write the rows that the mapped store reads, prove the callback store on a device.

    python -m deskfleet_sglang split PACK CHECKPOINT --rank R --world-size N [--to DIR]
    python -m deskfleet_sglang prove PACK CHECKPOINT [--lookups 1000]       in SGLang's image, with a CUDA device

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
from deskfleet_engram.native import NativeOptions
from deskfleet_sglang.adapter import columns_of


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
    given = parser.parse_args(argv)
    try:
        identity = read_manifest(given.pack).identity
        columns = columns_of(identity.geometry.spec.num_columns, given.rank, given.world_size)

        def opened(options: NativeOptions | None = None) -> HostRows:
            return HostRows.open(
                given.pack,
                given.checkpoint,
                rank=given.rank,
                world_size=given.world_size,
                columns=columns,
                options=options,
            )

        if given.verb == "prove":
            proof = importlib.import_module("deskfleet_sglang.prove")
            with opened() as rows:
                proof.prove(rows, given.lookups)
            with opened(NativeOptions(faults="seed=1,eio=1")) as broken:
                proof.check_failures(broken)
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
