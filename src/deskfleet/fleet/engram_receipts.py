"""What our adapters have logged on every rank of an engine of others, and whether that may serve. Pure.

Owns the meaning of the line `deskfleet-engram receipt: KEY=VALUE ...` (`deskfleet_engram.host.log_receipt` makes it):
which values must be alike on all ranks, and which must be the launch's. Ranks that differ would still answer, fluently
and wrongly (G-23), so nobody is let in. Knows no log files and no files of receipts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from deskfleet.fleet.launch import AdapterReceipts, LaunchSpec

_LINE = re.compile(r"deskfleet-engram receipt: (?P<said>[a-z]+=[\w./+-]+(?: [a-z]+=[\w./+-]+)*)")

_ALIKE = {
    "engine": "releases of the engine",
    "plugin": "releases of the adapter",
    "sources": "digests of the engine's source",
    "pack": "packs",
    "store": "ways of reading rows",
    "warnings": "numbers of warnings",
}
"""Keys whose value must be the same on every rank, and what to call it."""

_HINT = "the whole receipt is in the rank's log, and below DESKFLEET_ENGRAM_RECEIPTS on its node"


def find_receipt(line: str) -> str | None:
    """Return what a line of a rank's log says as a receipt, `KEY=VALUE` pairs; None when it is none."""
    found = _LINE.search(line)
    return None if found is None else found["said"]


def refusal(launch: LaunchSpec, said: Mapping[int, str]) -> str | None:
    """Return the first thing that is wrong with the ranks' receipts, as one sentence with both values; None: nothing.

    `said` are the latest receipts by rank, as `find_receipt` returns them. A launch without an adapter needs none.
    """
    if launch.adapter is None:
        return None
    places = [f"rank {rank.rank} on {rank.node}" for rank in launch.ranks]
    silent = [place for rank, place in enumerate(places) if rank not in said]
    if silent:
        return f"{', '.join(silent)}: no receipt of the Engram adapter, so it may not be at work"
    pairs = [dict(pair.split("=", 1) for pair in said[rank].split()) for rank in range(len(places))]
    for rank, place in enumerate(places):
        sentence = _misfit(launch, launch.adapter, rank, pairs[rank]) or _difference(
            pairs[0], pairs[rank], places[0]
        )
        if sentence is not None:
            return f"{place} {sentence}; {_HINT}"
    return None


def _misfit(launch: LaunchSpec, wanted: AdapterReceipts, rank: int, said: Mapping[str, str]) -> str | None:
    """What of one rank's receipt is not as launched."""
    lacking = sorted({*_ALIKE, "rank", "columns"} - set(said))
    if lacking:
        return (
            f"says nothing of {', '.join(lacking)} in its receipt: another adapter than this launcher knows"
        )
    columns = f"{wanted.columns[rank][0]}-{wanted.columns[rank][1]}"
    if said["rank"] != f"{rank}/{len(wanted.columns)}":
        return f"reads Engram rows as rank {said['rank']}, not {rank}/{len(wanted.columns)}"
    if said["columns"] != columns:
        return f"reads Engram columns {said['columns']}, not {columns}"
    if not said["engine"].startswith(f"{launch.engine}-"):
        return f"reads Engram rows in {said['engine']}, not in {launch.engine}"
    if wanted.store is not None and said["store"] != wanted.store:
        return f"reads Engram rows by {said['store']}, not by {wanted.store} as asked"
    return None


def _difference(first: Mapping[str, str], other: Mapping[str, str], first_place: str) -> str | None:
    """In what a rank is not like the first."""
    for key, what in _ALIKE.items():
        if other[key] != first[key]:
            return f"has {key}={other[key]}, and {first_place} {key}={first[key]}: the ranks have different {what}"
    return None


__all__ = ["find_receipt", "refusal"]
