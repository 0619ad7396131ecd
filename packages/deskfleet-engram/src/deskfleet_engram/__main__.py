"""`python -m deskfleet_engram pack | verify | unpack | info`: the functions of this distribution from a shell.

Parses and prints, nothing else. stdout is data, stderr is talk. Exit codes: 0 done, 1 verdict no (faults found,
another checkpoint, does not fit), 2 bad input, 3 a machine or file failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from deskfleet_engram.errors import EngramError, SelectionError
from deskfleet_engram.manifest import read_manifest
from deskfleet_engram.native_blocks import use_native_blocks
from deskfleet_engram.ownership import Split, select_columns, spell_numbers
from deskfleet_engram.pack import PackProgress, pack
from deskfleet_engram.source import open_source, read_spec
from deskfleet_engram.unpack import unpack
from deskfleet_engram.verify import VerifyProgress, verify

_MAX_ROWS = 100_000
_TELL_EVERY_S = 1.0
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except EngramError as error:
        if args.json:
            print(json.dumps({"error": error.message, "hint": error.hint}))
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code


def _use_fastest() -> str:
    """Have blocks encoded and checked by native code where it is installed; return what does it."""
    why_not = use_native_blocks()
    if why_not is None:
        return "native"
    print(f"note: blocks go through numpy, which is ten times slower: {why_not}", file=sys.stderr)
    return "numpy"


def _pack(args: argparse.Namespace) -> int:
    if args.split is not None and args.rank is None:
        args.fail("--split says which columns are a rank's: give --rank and --world-size")
    try:
        columns = select_columns(
            read_spec(args.model),
            layers=args.layers,
            columns=args.columns,
            rank=args.rank,
            world_size=args.world_size,
            split=args.split or "strided",
        )
    except SelectionError as error:
        args.fail(error.message)
    encoder = _use_fastest()
    source = open_source(args.model, repo=args.repo, revision=args.revision)
    report = pack(
        source,
        args.pack_dir,
        columns=columns,
        on_progress=_throttled(_pack_line),
        max_bytes_per_s=args.max_rate,
        restart=args.restart,
        allow_holes=args.allow_holes,
    )
    _print(args, {**report.to_dict(), "encoder": encoder}, [str(report)])
    return 0


def _verify(args: argparse.Namespace) -> int:
    if args.level == "sample" and args.source is None:
        args.fail("--level sample compares with the checkpoint: give --source")
    checker = _use_fastest()
    source = None if args.source is None else open_source(args.source, repo=args.repo, revision=args.revision)
    report = verify(
        args.pack_dir,
        level=args.level,
        source=source,
        num_blocks=args.blocks,
        seed=args.seed,
        on_progress=_throttled(_verify_line),
    )
    result = {"pack_dir": str(args.pack_dir), **report.to_dict(), "checker": checker}
    _print(args, result, [*map(str, report.faults), f"{args.pack_dir}: {report}"])
    return 0 if report.is_sound else 1


def _unpack(args: argparse.Namespace) -> int:
    rows = unpack(args.pack_dir, args.layer, args.rows)
    result = [
        {
            "layer": row.layer,
            "row": row.row,
            "column": row.column,
            "column_row": row.column_row,
            "file": row.file,
            "block": row.block,
            "slot": row.slot,
            "codes": row.codes.hex(),
            "scales": row.scales.hex(),
            "values": [float(value) for value in row.values],
        }
        for row in rows
    ]
    lines = []
    for row in rows:
        lines.append(
            f"layer {row.layer} row {row.row}: column {row.column} row {row.column_row}, {row.file} block {row.block} "
            f"slot {row.slot}"
        )
        lines.append(f"  codes  {row.codes.hex()}")
        lines.append(f"  scales {row.scales.hex()}")
        lines.append("  values " + " ".join(f"{value:g}" for value in row.values))
    _print(args, result, lines)
    return 0


def _info(args: argparse.Namespace) -> int:
    manifest = read_manifest(args.pack_dir)
    identity = manifest.identity
    columns = {str(layer): list(manifest.columns(layer)) for layer in identity.layers}
    num_bytes = sum(map(manifest.num_bytes, identity.layers))
    result = {
        "pack_dir": str(args.pack_dir),
        "pack_id": f"{identity.pack_id:016x}",
        "identity": identity.document,
        "extent_bytes": manifest.extent_bytes,
        "columns": columns,
        "num_bytes": num_bytes,
        "written_by": manifest.written_by,
    }
    source = identity.document["source"]
    lines = [
        f"pack {identity.pack_id:016x}, written by {manifest.written_by}",
        f"checkpoint: {source['repo'] or 'unnamed'}, revision {source['revision'] or 'unknown'}",
        f"rows: {identity.rows.name}, {identity.rows.row_bytes} bytes, {identity.rows.rows_per_block} per block",
    ]
    for layer in identity.layers:
        held = spell_numbers(manifest.columns(layer))
        lines.append(f"layer {layer}: columns {held} of {identity.geometry.spec.num_columns}")
    lines.append(f"{len(manifest.files)} files, {num_bytes:,} bytes")
    _print(args, result, lines)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deskfleet_engram",
        description="Engram rows on disk. Exit codes: 1 verdict no, 2 bad input, 3 a machine or file failed.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="print one JSON value instead of text")
        sub.set_defaults(run=run, fail=sub.error)  # prints usage and exits with 2
        return sub

    sub = verb("pack", _pack, "pack columns of a checkpoint; goes on where an interrupted run stopped")
    sub.add_argument("model", type=Path, help="directory of the checkpoint")
    sub.add_argument("pack_dir", type=Path, help="directory of the pack")
    sub.add_argument("--layers", type=_numbers, help="ids of the layers, such as 1,14; all by default")
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--columns", type=_numbers, help="columns, such as 0-7,12; all by default")
    which.add_argument("--rank", type=int, help="only the columns that this rank reads; needs --world-size")
    sub.add_argument("--world-size", type=int, help="number of ranks")
    sub.add_argument(
        "--split",
        choices=get_args(Split),
        help="how --rank's engine shares tables out: strided is deskfleet's own, runs of columns are vLLM's and "
        "SGLang's, rows is every column that an equal range of rows touches; default: strided",
    )
    sub.add_argument("--max-rate", type=_rate, help="bytes to read per second at most, such as 300M")
    sub.add_argument("--restart", action="store_true", help="throw away what an interrupted run left")
    sub.add_argument("--allow-holes", action="store_true", help="take holes of a sparse source for zeros")
    _add_names(sub)
    sub = verb("verify", _verify, "check a pack, by itself or beside its checkpoint")
    sub.add_argument("pack_dir", type=Path, help="directory of the pack")
    sub.add_argument("--level", choices=("quick", "sample", "full"), default="quick", help="default: quick")
    sub.add_argument("--source", type=Path, help="directory of the checkpoint, to compare rows with")
    sub.add_argument(
        "--blocks", type=int, default=1024, help="random blocks for quick and sample; default: 1024"
    )
    sub.add_argument("--seed", type=int, help="makes the choice of blocks repeatable")
    _add_names(sub)
    sub = verb("unpack", _unpack, "print rows")
    sub.add_argument("pack_dir", type=Path, help="directory of the pack")
    sub.add_argument("--layer", type=int, required=True, help="id of the layer")
    sub.add_argument("--rows", type=_numbers, required=True, help="ids in the layer's table, such as 5,17-20")
    sub = verb("info", _info, "say what a pack is and holds")
    sub.add_argument("pack_dir", type=Path, help="directory of the pack")
    return parser


def _add_names(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--repo", help="what the checkpoint is called; part of the pack's identity")
    sub.add_argument("--revision", help="its revision; part of the pack's identity")


def _numbers(text: str) -> list[int]:
    """Parse "0-7,12"."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        begin, end = int(first), int(last) if dash else int(first)
        if end < begin or len(numbers) + end - begin >= _MAX_ROWS:
            raise argparse.ArgumentTypeError(f"{part!r} is no range, or too long")
        numbers.extend(range(begin, end + 1))
    return numbers


def _rate(text: str) -> float:
    """Parse "300M"."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    if unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} does not end in K, M, G or a digit")
    rate = float(text[: len(text) - len(unit)]) * _UNITS[unit]
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no rate")
    return rate


def _print(args: argparse.Namespace, result: Any, lines: list[str]) -> None:
    print(json.dumps(result) if args.json else "\n".join(lines))


def _throttled(line: Callable[[Any], str]) -> Callable[[Any], None]:
    """Return a callback that prints to stderr about once a second."""
    told_s = time.monotonic()

    def tell(progress: Any) -> None:
        nonlocal told_s
        now = time.monotonic()
        if now - told_s >= _TELL_EVERY_S:
            told_s = now
            print(line(progress), file=sys.stderr)

    return tell


def _pack_line(progress: PackProgress) -> str:
    eta = "?" if progress.eta_s is None else f"{progress.eta_s:.0f} s"
    return (
        f"{progress.file}: packed {_percent(progress.packed_bytes, progress.total_bytes)}, read back "
        f"{_percent(progress.checked_bytes, progress.total_bytes)}, {progress.rate_bytes_s / 1e6:.0f} MB/s, {eta} left"
    )


def _verify_line(progress: VerifyProgress) -> str:
    return f"{progress.file}: {_percent(progress.done_bytes, progress.total_bytes)}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.1f} %"


if __name__ == "__main__":
    sys.exit(main())
