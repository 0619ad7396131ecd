"""`python -m deskfleet_engram.bench.sample DIRECTORY [--size GIB]`: a checkpoint of two Engram layers, and its pack.

For proofs on machines that cannot hold the published tables: DIRECTORY/model and DIRECTORY/pack, random rows without
NaN, layers 1 and 14 as published. Exit code 3 when the disk does not take it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deskfleet_engram.bench.checkpoint import make_checkpoint
from deskfleet_engram.errors import EngramError
from deskfleet_engram.native_functions import accelerate_blocks
from deskfleet_engram.pack import pack

LAYERS = (1, 14)


def main(argv: list[str] | None = None) -> int:
    """Make both; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deskfleet_engram.bench.sample", allow_abbrev=False)
    parser.add_argument("directory", type=Path, metavar="DIRECTORY")
    parser.add_argument("--size", type=float, default=2.0, metavar="GIB", help="of the pack; default: 2")
    given = parser.parse_args(argv)
    try:
        pack_bytes = int(given.size * (1 << 30))
        source = make_checkpoint(given.directory / "model", pack_bytes, layer_ids=LAYERS, is_finite=True)
        accelerate_blocks()
        pack(source, given.directory / "pack")
    except (EngramError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, EngramError) else 3
    print(f"{given.directory / 'model'} {given.directory / 'pack'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
