"""`python -m deskfleet_engram.bench`: measures the row store on this machine, beside fio and other ways of reading.

Makes a pack of random rows, or takes a real one with --pack, and prints a table, or with --json one object: every
ratio by its name, and under `ratios` with its target and meaning.
Exit codes: 0 measured, whatever the numbers are; 2 bad input; 3 a machine or file failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from deskfleet_engram.bench.run import Settings, lines_of, run
from deskfleet_engram.errors import EngramError


def main(argv: list[str] | None = None) -> int:
    """Measure; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m deskfleet_engram.bench",
        description="Measures the row store beside fio and other ways of reading, all in one run.",
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="less than a minute, on a small pack")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON object to this new file")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="where the pack is made; default: here")
    parser.add_argument(
        "--size", type=float, metavar="GIB", help="size of the pack; default: 8, quick: 0.375"
    )
    parser.add_argument("--pack", type=Path, metavar="PACK", help="measure on this pack; packing is left out")
    args = parser.parse_args(argv)
    if args.size is not None and not 0.01 <= args.size <= 1024:
        parser.error(f"--size {args.size} is not between 0.01 and 1024")
    if args.out is not None and args.out.exists():
        parser.error(f"{args.out} exists; results are never overwritten")
    settings = Settings.of(quick=args.quick, directory=args.directory, size_gib=args.size, pack_dir=args.pack)
    try:
        result = run(settings, say=lambda text: print(text, file=sys.stderr, flush=True))
    except (EngramError, OSError) as error:
        if args.json:
            print(json.dumps({"error": str(error)}))
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, EngramError) else 3
    numbers = {name: ratio["value"] for name, ratio in result["ratios"].items()}
    text = json.dumps({**numbers, **result})
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text if args.json else "\n".join(lines_of(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
